"""The draft families that users run, one record each: what `--family` drives and what is generated for it.

A family is data over the same records, checks and runner as every other; it must not have code of its own. Nothing
here may import torch, Hypothesis or sglang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from cases.boots import BY_NAME, HEADS, OF_FAMILY, TWO_BY_TWO, Boot, spec_of
from cases.fixed import default_scenarios, of_table, shapes
from cases.fixed_held import held_texts
from cases.fixed_hicache import host_shapes
from cases.fixed_parts import joining, on_boot, parts
from cases.fixed_recurrent import SHAPES, recurrent_shapes
from cases.fixed_weights import adapter_shapes, weight_shapes
from cases.fixed_windows import window_shapes
from harness.contract.scenario import Scenario
from harness.contract.settings import EngineConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of draft. boots: the boot configurations generation takes turns on; sets: what makes `scenarios`."""

    name: str
    why: str
    boots: tuple[Boot, ...]
    sets: Callable[[], Iterable[Iterable[Scenario]]]

    @cached_property
    def scenarios(self) -> tuple[Scenario, ...]:
        """The fixed set that `eaglecheck run --family` drives, which asks for what it must show; made when needed."""
        return tuple(one for each in self.sets() for one in each)


FAMILIES: dict[str, Family] = {}


def _family(name: str, why: str, sets: Callable[[], Iterable[Iterable[Scenario]]]) -> None:
    FAMILIES[name] = Family(name=name, why=why, boots=OF_FAMILY[name], sets=sets)


#: Without overlap scheduling a batch that shrinks filters its proposals itself, and their probabilities with them.
UNLAPPED = EngineConfig(overlap_schedule=False)
#: The shapes that a boot configuration beside a family's first one is driven through.
FEW = ("four-together", "chunked-long-prompt", "staggered-arrivals")
CACHED = (*FEW, "shared-prefix")
#: The hand-overs that a configuration beside the first is driven through.
HANDED = ("together", "last-chunk-of-one", "ends-at-once")


def _apart(boot: Boot, *, prefix: str = "apart-") -> Iterator[Scenario]:
    """A configuration of five steps and a pool that is outgrown: some common shapes, and what happens to a part."""
    yield from (*shapes(**boot.given, prefix=prefix, only=FEW), *parts(boot, prefix=prefix))


def _each(boots: str, *only: str) -> Iterator[Scenario]:
    """The shapes named `only`, on each of these boot configurations."""
    yield from (one for name in boots.split() for one in on_boot(BY_NAME[name], only=only))


def _ranks(boot: str, prefix: str = "", *only: str) -> list[Scenario]:
    return of_table("ranks", **BY_NAME[boot].given, prefix=prefix, only=only)


_family(
    "eagle",
    "EAGLE-1 chains: the default set of three steps, and five steps on a pool that is outgrown",
    lambda: (default_scenarios(), of_table("read-twice", "one-row"), _apart(BY_NAME["apart"])),
)

_family(
    "eagle3",
    "EAGLE-3 heads: three features by default, two and one by name, a smaller vocabulary, a wider draft",
    lambda: (
        shapes(checkpoint="eagle3-tiny", spec=HEADS, prefix="default-"),
        of_table("one-row", checkpoint="eagle3-tiny", spec=HEADS, prefix="default-"),
        shapes(checkpoint="eagle3-two", spec=HEADS, prefix="two-", only=FEW),
        shapes(checkpoint="eagle3-wide", spec=HEADS, prefix="wide-", only=FEW),
        _apart(BY_NAME["eagle3-apart"]),
    ),
)

_family(
    "tree",
    "trees of two, four and eight candidates a step, from a few nodes to all; from three steps on they meet F-003",
    lambda: (
        shapes(spec=TWO_BY_TWO, prefix="t2-", only=FEW),
        shapes(spec=spec_of("EAGLE 2 4 8"), prefix="t4-", only=FEW),
        shapes(spec=spec_of("EAGLE 2 8 16"), prefix="t8-", only=FEW),
        shapes(spec=spec_of("EAGLE 2 2 3"), prefix="few-", only=FEW),
        shapes(spec=BY_NAME["small-tree"].spec, engine=UNLAPPED, prefix="few-unlapped-", only=("four-together",)),
        _apart(BY_NAME["tree-apart"]),
        shapes(spec=BY_NAME["tree"].spec, prefix="three-steps-", only=FEW),
        shapes(spec=BY_NAME["wide-tree"].spec, prefix="three-wide-", only=FEW),
        _apart(BY_NAME["deep-apart"], prefix="five-steps-apart-"),
    ),
)

#: Chunks are whole pages, so a page of 64 needs a longer one.
_family(
    "paged",
    "pages of 4, 16 and 64 tokens, chains and trees",
    lambda: (
        shapes(engine=EngineConfig(page_size=4), prefix="page4-", only=CACHED),
        shapes(engine=EngineConfig(page_size=16), prefix="page16-", only=CACHED),
        shapes(engine=EngineConfig(page_size=64), chunk=64, prefix="page64-", only=FEW),
        shapes(spec=TWO_BY_TWO, engine=EngineConfig(page_size=4), prefix="page4-tree-", only=CACHED),
        shapes(**BY_NAME["pages-16-tree"].given, prefix="page16-tree-", only=("four-together",)),
        _apart(BY_NAME["pages-apart"]),
    ),
)

_family(
    "mla",
    "latent attention and a NextN layer, DeepSeek-V3 style: chains, pages of four tokens, trees of two candidates",
    lambda: (
        shapes(checkpoint="mla-tiny"),
        shapes(checkpoint="mla-tiny", engine=EngineConfig(page_size=4), prefix="page4-", only=CACHED),
        shapes(checkpoint="mla-tiny", spec=TWO_BY_TWO, prefix="tree-", only=FEW),
        _apart(BY_NAME["latent-apart"]),
    ),
)

_family(
    "mtp",
    "multi-layer MTP: three layers, each proposing one token; they read the target's states, or each other's",
    lambda: (
        _each("layers", *(one.name for one in default_scenarios() if one.name != "shared-prefix")),
        of_table("one-row", **BY_NAME["layers"].given, prefix="layers-"),
        _each("layers-pages", *FEW),
        _each("layers-cache", "shared-prefix"),
        _each("layers-chained", *FEW, "chunk-borders", "finish-together", "abort-midway"),
        _apart(BY_NAME["layers-apart"]),
        parts(BY_NAME["chained-apart"], prefix="chained-apart-", only=("some-taken-back", "some-aborted")),
    ),
)

_family(
    "window",
    "a KV pool of their own for layers with sliding windows: gpt-oss style with EAGLE-3, MiMo-V2 style with MTP",
    lambda: (*map(window_shapes, OF_FAMILY["window"]), parts(BY_NAME["window-pool"], prefix="window-pool-")),
)

_family(
    "recurrent",
    "recurrent states: Qwen3-Next and Qwen3.5 style targets with their MTP layer, Nemotron-H style with either",
    lambda: (
        recurrent_shapes(BY_NAME["hybrid"], only=SHAPES),
        *(
            recurrent_shapes(BY_NAME[f"hybrid-{name}"])
            for name in ("cache", "long", "tree", "dense", "mamba", "mamba-cache", "mamba-next")
        ),
        parts(BY_NAME["hybrid-pool"], prefix="hybrid-pool-"),
    ),
)

_family(
    "hicache",
    "a hierarchical cache: evicted, written to the host and storage, loaded back; chains, trees, windows, layers",
    lambda: (
        *(host_shapes(boot) for boot in OF_FAMILY["hicache"] if boot.name != "hicache-five"),
        parts(BY_NAME["hicache-five"], prefix="hicache-five-"),
    ),
)

_family(
    "trained",
    "trained weights over Python source: EAGLE-3 chains of three and five steps and trees, EAGLE-1 chains",
    lambda: (
        of_table("text", **BY_NAME["trained"].given),
        *(
            of_table(
                "text",
                **BY_NAME[f"trained-{name}"].given,
                prefix=f"{name}-",
                only=("together", "chunks", "arrivals", "shared-prefix"),
            )
            for name in ("long", "tree", "eagle1")
        ),
        of_table("text-pool", **BY_NAME["trained-tight"].given, prefix="tight-"),
    ),
)

_family(
    "texts",
    "requests as texts, with a tokenizer: grammars, thoughts before them, stop strings and patterns",
    lambda: (held_texts(), parts(BY_NAME["texts-five"], prefix="five-")),
)

_family(
    "dp",
    "DP attention over two ranks, idle ones too: EAGLE-3 drafts as wide as the target and wider, MTP layers",
    lambda: (
        _ranks("dp"),
        _ranks("dp-wide", "wide-", "held-back", "idle-inside-chunks"),
        parts(BY_NAME["dp-apart"], prefix="apart-"),
        _ranks("dp-lm-head", "lm-head-", "held-back", "uneven-batches"),
        _ranks("dp-layers", "layers-", "held-back", "uneven-batches"),
        _ranks("dp-layers-head", "layers-head-", "held-back"),
        # How ranks pad is the release's choice, and older ones have no coordination.
    ),
)

_family(
    "tp",
    "two and four TP ranks that share each request: EAGLE, EAGLE-3, trees, pages, latents, MTP",
    lambda: (
        on_boot(BY_NAME["tp"]),
        _each("tp-pages", "shared-prefix", "retracted", "chunked-long-prompt"),
        _each("tp-eagle3 tp-latent tp-tree tp-layers tp-four", "four-together", "chunked-long-prompt"),
        _ranks("tp-below-dp", "tp-below-dp-", "uneven-batches"),
        parts(BY_NAME["tp-five"], prefix="tp-five-"),
    ),
)

_family(
    "adaptive",
    "a number of draft steps that changes while SGLang serves, none included: EAGLE, and EAGLE-3 over pages",
    lambda: (
        _each("adaptive adaptive-eagle3", *("four-together", "staggered-arrivals", "shared-prefix", "retracted")),
        parts(BY_NAME["adaptive-pool"], prefix="adaptive-pool-"),
    ),
)

_family(
    "mixed",
    "requests that decode by one token in batches of prompt chunks: EAGLE chains and trees, EAGLE-3 over pages",
    lambda: (
        *(
            (*on_boot(BY_NAME[name], only=("staggered-arrivals", "shared-prefix", "retracted")), joining(BY_NAME[name]))
            for name in ("mixed", "mixed-eagle3", "mixed-tree")
        ),
        parts(BY_NAME["mixed-five"], prefix="mixed-five-"),
    ),
)

_family(
    "weights",
    "weights that change while SGLang serves, and memory given back: EAGLE, EAGLE-3, MTP, latents, TP ranks",
    lambda: (*map(weight_shapes, OF_FAMILY["weights"]), parts(BY_NAME["weights-five"], prefix="weights-five-")),
)

_family(
    "lora",
    "LoRA adapters on the target, requests with and without them in one batch: EAGLE chains and trees, EAGLE-3",
    lambda: (
        *(adapter_shapes(BY_NAME[name]) for name in ("lora", "lora-tree", "lora-eagle3")),
        parts(BY_NAME["lora-five"], prefix="lora-five-"),
    ),
)

_family(
    "token-map",
    "EAGLE drafts that propose some tokens only (FR-Spec): chains and trees",
    lambda: (
        _each("hot-tokens hot-tree", *("four-together", "chunked-long-prompt", "staggered-arrivals", "retracted")),
        parts(BY_NAME["hot-five"], prefix="hot-five-"),
    ),
)

_family(
    "disagg",
    "prefill and decode on two engines: EAGLE-1 chains, EAGLE-3 drafts wider than their target, trees, pages",
    lambda: (
        of_table("handoff", engine=BY_NAME["pd"].engine),
        of_table("handoff", **BY_NAME["pd-wide"].given, prefix="wide-", only=HANDED),
        of_table("handoff", **BY_NAME["pd-tree"].given, prefix="tree-", only=HANDED),
        of_table("handoff", **BY_NAME["pd-pages"].given, prefix="page4-", only=HANDED),
        of_table("handoff", **BY_NAME["pd-five"].given, prefix="apart-", only=HANDED),
        parts(BY_NAME["pd-five"], prefix="apart-"),
        # Before 0.5.23 no decode side that speculates may keep a prefix cache, or survives a late write: in files.
    ),
)

_family(
    "disagg-dp",
    "hand-overs to a decode side of two DP-attention ranks, one of them idle, busy, or handed over to as well",
    lambda: (
        of_table("handoff-ranks", **BY_NAME["pd-ranks"].given, prefix="ranks-"),
        of_table("handoff-ranks", **BY_NAME["pd-ranks-five"].given, prefix="five-"),
        parts(BY_NAME["pd-ranks-five"], prefix="five-"),
    ),
)

#: What a test session drives of families it was not asked for.
SOME: dict[str, tuple[str, ...]] = {
    "lora": ("lora-together",),
    "hicache": ("hicache-chunks",),
    "eagle3": ("default-four-together", "default-chunked-long-prompt", "default-shared-prefix"),
    "tree": ("t4-four-together", "t4-staggered-arrivals"),
    "paged": ("page16-shared-prefix", "page16-staggered-arrivals"),
}


def of_family(name: str | None) -> list[tuple[str, Scenario]]:
    """(family, scenario): all of the named family, or SOME where none is named."""
    chosen = SOME if name is None else {name: tuple(one.name for one in FAMILIES[name].scenarios)}
    return [
        (family, scenario)
        for family, names in chosen.items()
        for scenario in FAMILIES[family].scenarios
        if scenario.name in names
    ]
