"""The draft families that users run, one record each: what `--family` drives and what is generated for it.

A family is data over the same records, checks and runner as every other; it must not have code of its own. Nothing
here may import torch, Hypothesis or sglang.
"""

from __future__ import annotations

from dataclasses import dataclass

from cases.boots import (
    ADAPTER_BOOTS,
    ADAPTIVE_BOOTS,
    BOOTS,
    DP_BOOTS,
    DRAWN,
    EAGLE3_BOOTS,
    HOSTED,
    HOT_BOOTS,
    LATENT,
    LAYERED,
    MIXED_BOOTS,
    PAGES,
    PAIR,
    PD_BOOTS,
    RANKED_FIVE,
    RANKED_PAIR,
    RECURRENT,
    SPELLED_BOOTS,
    STATES,
    TP_BOOTS,
    TRAINED,
    TREES,
    WEIGHT_BOOTS,
    WINDOWED,
    Boot,
)
from cases.fixed import default_scenarios, read_twice, shapes
from cases.fixed_handoff import handoffs, ranked_handoffs
from cases.fixed_held import held_texts
from cases.fixed_hicache import host_shapes
from cases.fixed_parts import parts
from cases.fixed_ranks import joining, on_boot, rank_shapes
from cases.fixed_recurrent import SHAPES, recurrent_shapes
from cases.fixed_text import text_shapes
from cases.fixed_weights import adapter_shapes, weight_shapes
from cases.fixed_windows import window_shapes
from harness.contract.scenario import Scenario
from harness.contract.settings import EngineConfig, SpecConfig
from harness.coverage import Where, names


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of draft.

    scenarios: the fixed set that `eaglecheck run --family` drives. boots: the boot configurations generation takes
    turns on. coverage points: what the fixed set must show; a run in which one did not happen is UNKNOWN, since each is
    asked for by some scenario.
    """

    name: str
    why: str
    scenarios: tuple[Scenario, ...]
    boots: tuple[Boot, ...]
    coverage_points: tuple[str, ...]

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The tiny pairs it uses, in order of first use."""
        names = [scenario.checkpoint for scenario in self.scenarios] + [boot.checkpoint for boot in self.boots]
        return tuple(dict.fromkeys(names))


#: Without overlap scheduling a batch that shrinks filters its proposals itself, and their probabilities with them.
UNLAPPED = EngineConfig(overlap_schedule=False)
#: The shapes that a boot configuration beside a family's first one is driven through.
FEW = ("four-together", "chunked-long-prompt", "staggered-arrivals")
#: The same of text.
TEXT_FEW = ("together", "chunks", "arrivals", "shared-prefix")
#: The hand-overs that a configuration beside the first is driven through.
HANDED = ("together", "last-chunk-of-one", "ends-at-once")
COMMON = ("non_final_chunk", "batch_shrinks", "batch_grows")
#: What every family shows of a part of a batch.
OF_PARTS = ("partial_retraction", "abort_of_some", "pool_exhausted")


def _apart(boot: Boot, *, only: tuple[str, ...] = FEW) -> tuple[Scenario, ...]:
    """A configuration of five steps and a pool that is outgrown: some common shapes, and what happens to a part."""
    usual = shapes(**boot.given, prefix="apart-", only=only)
    return (*usual, *parts(boot, prefix="apart-"))


_EAGLE = Family(
    name="eagle",
    why="EAGLE-1 chains: the default set of three steps, and five steps on a pool that is outgrown",
    scenarios=(*default_scenarios(), read_twice(), *_apart(BOOTS["apart"])),
    boots=(*BOOTS.values(), STATES, DRAWN),
    coverage_points=(*COMMON, *OF_PARTS, "prefix_hit", "abort_in_decode", "all_finished_in_one_verify"),
)

#: Chunks are whole pages, so a page of 64 needs a longer one.
_PAGED = Family(
    name="paged",
    why="pages of 4, 16 and 64 tokens, chains and trees",
    scenarios=(
        *shapes(engine=EngineConfig(page_size=4), prefix="page4-", only=(*FEW, "shared-prefix")),
        *shapes(engine=EngineConfig(page_size=16), prefix="page16-", only=(*FEW, "shared-prefix")),
        *shapes(engine=EngineConfig(page_size=64), chunk=64, prefix="page64-", only=FEW),
        *shapes(
            spec=SpecConfig(num_steps=2, eagle_topk=2, num_draft_tokens=6),
            engine=EngineConfig(page_size=4),
            prefix="page4-tree-",
            only=(*FEW, "shared-prefix"),
        ),
        *shapes(
            spec=PAGES["pages-16-tree"].spec,
            engine=PAGES["pages-16-tree"].engine,
            prefix="page16-tree-",
            only=("four-together",),
        ),
        *_apart(PAGES["pages-apart"]),
    ),
    boots=(BOOTS["pages"], *PAGES.values()),
    coverage_points=(*COMMON, *OF_PARTS, "prefix_hit"),
)

_TREE = Family(
    name="tree",
    why="trees of two, four and eight candidates a step, from a few nodes to all; from three steps on they meet F-003",
    scenarios=(
        *shapes(spec=SpecConfig(num_steps=2, eagle_topk=2, num_draft_tokens=6), prefix="t2-", only=FEW),
        *shapes(spec=SpecConfig(num_steps=2, eagle_topk=4, num_draft_tokens=8), prefix="t4-", only=FEW),
        *shapes(spec=SpecConfig(num_steps=2, eagle_topk=8, num_draft_tokens=16), prefix="t8-", only=FEW),
        *shapes(spec=SpecConfig(num_steps=2, eagle_topk=2, num_draft_tokens=3), prefix="few-", only=FEW),
        *shapes(spec=TREES["small-tree"].spec, engine=UNLAPPED, prefix="few-unlapped-", only=("four-together",)),
        *_apart(TREES["tree-apart"]),
        *shapes(spec=TREES["tree"].spec, prefix="three-steps-", only=FEW),
        *shapes(spec=TREES["wide-tree"].spec, prefix="three-wide-", only=FEW),
        *(one.model_copy(update={"name": f"five-steps-{one.name}"}) for one in _apart(TREES["deep-apart"])),
    ),
    boots=tuple(TREES.values()),
    coverage_points=(*COMMON, *OF_PARTS),
)

_HEADS = SpecConfig(algorithm="EAGLE3", num_steps=3, eagle_topk=1, num_draft_tokens=4)
_EAGLE3 = Family(
    name="eagle3",
    why="EAGLE-3 heads: three features by default, two and one by name, a smaller vocabulary, a wider draft",
    scenarios=(
        *shapes(checkpoint="eagle3-tiny", spec=_HEADS, prefix="default-"),
        *shapes(checkpoint="eagle3-two", spec=_HEADS, prefix="two-", only=FEW),
        *shapes(checkpoint="eagle3-wide", spec=_HEADS, prefix="wide-", only=FEW),
        *_apart(EAGLE3_BOOTS["eagle3-apart"]),
    ),
    boots=tuple(EAGLE3_BOOTS.values()),
    coverage_points=(*COMMON, *OF_PARTS, "prefix_hit", "abort_in_decode", "all_finished_in_one_verify"),
)

_DP = Family(
    name="dp",
    why="DP attention over two ranks, idle ones too: EAGLE-3 drafts as wide as the target and wider, MTP layers",
    scenarios=(
        *rank_shapes(DP_BOOTS["dp"]),
        *rank_shapes(DP_BOOTS["dp-wide"], prefix="wide-", only=("held-back", "idle-inside-chunks")),
        *parts(DP_BOOTS["dp-apart"], prefix="apart-"),
        *rank_shapes(DP_BOOTS["dp-lm-head"], prefix="lm-head-", only=("held-back", "uneven-batches")),
        *rank_shapes(DP_BOOTS["dp-layers"], prefix="layers-", only=("held-back", "uneven-batches")),
        *rank_shapes(DP_BOOTS["dp-layers-head"], prefix="layers-head-", only=("held-back",)),
    ),
    boots=tuple(DP_BOOTS.values()),
    # How ranks pad is the release's choice, and older ones have no coordination.
    coverage_points=(
        *(name for name in names(Where.RANKS) if not name.startswith("padded_") and name != "verify_beside_prefill"),
        *OF_PARTS,
    ),
)

_TP = Family(
    name="tp",
    why="two and four TP ranks that share each request: EAGLE, EAGLE-3, trees, pages, latents, MTP",
    scenarios=(
        *on_boot(TP_BOOTS["tp"]),
        *on_boot(TP_BOOTS["tp-pages"], only=("shared-prefix", "retracted", "chunked-long-prompt")),
        *(
            one
            for name in ("tp-eagle3", "tp-latent", "tp-tree", "tp-layers", "tp-four")
            for one in on_boot(TP_BOOTS[name], only=("four-together", "chunked-long-prompt"))
        ),
        *rank_shapes(TP_BOOTS["tp-below-dp"], prefix="tp-below-dp-", only=("uneven-batches",)),
        *parts(TP_BOOTS["tp-five"], prefix="tp-five-"),
    ),
    boots=tuple(TP_BOOTS.values()),
    coverage_points=(*COMMON, *OF_PARTS, "prefix_hit", "abort_in_decode", "retract_resume"),
)

_ADAPTIVE = Family(
    name="adaptive",
    why="a number of draft steps that changes while SGLang serves, none included: EAGLE, and EAGLE-3 over pages",
    scenarios=(
        *(
            one
            for name in ("adaptive", "adaptive-eagle3")
            for one in on_boot(
                ADAPTIVE_BOOTS[name], only=("four-together", "staggered-arrivals", "shared-prefix", "retracted")
            )
        ),
        *parts(ADAPTIVE_BOOTS["adaptive-pool"], prefix="adaptive-pool-"),
    ),
    boots=tuple(ADAPTIVE_BOOTS.values()),
    coverage_points=(*OF_PARTS, "batch_shrinks", "batch_grows", "prefix_hit", "retract_resume"),
)

_TEXTS = Family(
    name="texts",
    why="requests as texts, with a tokenizer: grammars, thoughts before them, stop strings and patterns",
    scenarios=(*held_texts(), *parts(SPELLED_BOOTS["texts-five"], prefix="five-")),
    boots=tuple(SPELLED_BOOTS.values()),
    coverage_points=(
        *OF_PARTS,
        *("first_token_by_grammar", "draft_off_grammar", "constrained_beside_free", "grammar_ends_text"),
        *("stop_string_inside_run", "ended_by_stop_regex", "grammar_after_thoughts"),
    ),
)

_MIXED = Family(
    name="mixed",
    why="requests that decode by one token in batches of prompt chunks: EAGLE chains and trees, EAGLE-3 over pages",
    scenarios=(
        *(
            one
            for boot in (MIXED_BOOTS[name] for name in ("mixed", "mixed-eagle3", "mixed-tree"))
            for one in (*on_boot(boot, only=("staggered-arrivals", "shared-prefix", "retracted")), joining(boot))
        ),
        *parts(MIXED_BOOTS["mixed-five"], prefix="mixed-five-"),
    ),
    boots=tuple(MIXED_BOOTS.values()),
    coverage_points=(*OF_PARTS, "mixed_batch", "non_final_chunk", "batch_grows", "prefix_hit", "retract_resume"),
)

_WEIGHTS = Family(
    name="weights",
    why="weights that change while SGLang serves, and memory given back: EAGLE, EAGLE-3, MTP, latents, TP ranks",
    scenarios=(
        *(one for boot in WEIGHT_BOOTS.values() for one in weight_shapes(boot)),
        *parts(WEIGHT_BOOTS["weights-five"], prefix="weights-five-"),
    ),
    boots=tuple(WEIGHT_BOOTS.values()),
    coverage_points=(*names(Where.UPDATED), *OF_PARTS),
)

_ADAPTERS = Family(
    name="lora",
    why="LoRA adapters on the target, requests with and without them in one batch: EAGLE chains and trees, EAGLE-3",
    scenarios=(
        *(one for name in ("lora", "lora-tree", "lora-eagle3") for one in adapter_shapes(ADAPTER_BOOTS[name])),
        *parts(ADAPTER_BOOTS["lora-five"], prefix="lora-five-"),
    ),
    boots=tuple(ADAPTER_BOOTS.values()),
    coverage_points=(
        *OF_PARTS,
        "adapters_in_one_batch",
        "non_final_chunk",
        "batch_grows",
        "prefix_hit",
        "retract_resume",
    ),
)

_HOT = Family(
    name="token-map",
    why="EAGLE drafts that propose some tokens only (FR-Spec): chains and trees",
    scenarios=(
        *(
            one
            for name in ("hot-tokens", "hot-tree")
            for one in on_boot(
                HOT_BOOTS[name], only=("four-together", "chunked-long-prompt", "staggered-arrivals", "retracted")
            )
        ),
        *parts(HOT_BOOTS["hot-five"], prefix="hot-five-"),
    ),
    boots=tuple(HOT_BOOTS.values()),
    coverage_points=(*COMMON, *OF_PARTS, "retract_resume"),
)

_LAYERS = LAYERED["layers"]
_MTP = Family(
    name="mtp",
    why="multi-layer MTP: three layers, each proposing one token; they read the target's states, or each other's",
    scenarios=(
        *(
            one
            for boot, only in (
                (_LAYERS, tuple(one.name for one in default_scenarios() if one.name != "shared-prefix")),
                (LAYERED["layers-pages"], FEW),
                (LAYERED["layers-cache"], ("shared-prefix",)),
                (LAYERED["layers-chained"], (*FEW, "chunk-borders", "finish-together", "abort-midway")),
            )
            for one in shapes(**boot.given, prefix=f"{boot.name}-", only=only)
        ),
        *_apart(LAYERED["layers-apart"]),
        *parts(LAYERED["chained-apart"], prefix="chained-apart-", only=("some-taken-back", "some-aborted")),
    ),
    boots=tuple(LAYERED.values()),
    coverage_points=(*COMMON, *OF_PARTS, "prefix_hit", "abort_in_decode", "all_finished_in_one_verify"),
)

_MLA = Family(
    name="mla",
    why="latent attention and a NextN layer, DeepSeek-V3 style: chains, pages of four tokens, trees of two candidates",
    scenarios=(
        *shapes(checkpoint="mla-tiny"),
        *shapes(checkpoint="mla-tiny", engine=EngineConfig(page_size=4), prefix="page4-", only=(*FEW, "shared-prefix")),
        *shapes(
            checkpoint="mla-tiny",
            spec=SpecConfig(num_steps=2, eagle_topk=2, num_draft_tokens=6),
            prefix="tree-",
            only=FEW,
        ),
        *_apart(LATENT["latent-apart"]),
    ),
    boots=tuple(LATENT.values()),
    coverage_points=(*COMMON, *OF_PARTS, "prefix_hit", "abort_in_decode", "all_finished_in_one_verify"),
)

_DISAGG = Family(
    name="disagg",
    why="prefill and decode on two engines: EAGLE-1 chains, EAGLE-3 drafts wider than their target, trees, pages",
    scenarios=(
        *handoffs(),
        *handoffs(checkpoint="eagle3-wide", spec=_HEADS, prefix="wide-", only=HANDED),
        *handoffs(spec=SpecConfig(num_steps=2, eagle_topk=2, num_draft_tokens=6), prefix="tree-", only=HANDED),
        *handoffs(engine=PAIR.model_copy(update={"page_size": 4}), prefix="page4-", only=HANDED),
        *handoffs(checkpoint="eagle-apart", spec=PD_BOOTS["pd-five"].spec, prefix="apart-", only=HANDED),
        *parts(PD_BOOTS["pd-five"], prefix="apart-"),
    ),
    boots=tuple(PD_BOOTS.values()),
    # Before 0.5.23 no decode side that speculates may keep a prefix cache, or survives a late write: in files.
    coverage_points=(
        *(name for name in names(Where.HANDOFF) if name not in ("prefix_on_decode_side", "late_write")),
        *OF_PARTS,
    ),
)

_DISAGG_DP = Family(
    name="disagg-dp",
    why="hand-overs to a decode side of two DP-attention ranks, one of them idle, busy, or handed over to as well",
    scenarios=(
        *ranked_handoffs(),
        *ranked_handoffs(boot=RANKED_FIVE, prefix="five-"),
        *parts(RANKED_FIVE, prefix="five-"),
    ),
    boots=(RANKED_PAIR, RANKED_FIVE),
    coverage_points=(
        *names(Where.HANDOFF_RANKS),
        *OF_PARTS,
        "prebuilt_all_finished",
        "failed_transfer",
        "abort_in_transfer",
    ),
)

_TRAINED = Family(
    name="trained",
    why="trained weights over Python source: EAGLE-3 chains of three and five steps and trees, EAGLE-1 chains",
    scenarios=tuple(
        one
        for boot, prefix, only in (
            (TRAINED["trained"], "", ()),
            (TRAINED["trained-long"], "long-", TEXT_FEW),
            (TRAINED["trained-tree"], "tree-", TEXT_FEW),
            (TRAINED["trained-eagle1"], "eagle1-", TEXT_FEW),
            (TRAINED["trained-tight"], "tight-", ("pool", "taken-back", "abort-of-some")),
        )
        for one in text_shapes(**boot.given, prefix=prefix, only=only)
    ),
    boots=tuple(TRAINED.values()),
    coverage_points=(*COMMON, *OF_PARTS, "prefix_hit", "abort_in_decode", "every_accept_len_seen"),
)

_WINDOW = Family(
    name="window",
    why="a KV pool of their own for layers with sliding windows: gpt-oss style with EAGLE-3, MiMo-V2 style with MTP",
    scenarios=(
        *(one for boot in WINDOWED.values() for one in window_shapes(boot)),
        *parts(WINDOWED["window-pool"], prefix="window-pool-"),
    ),
    boots=tuple(WINDOWED.values()),
    coverage_points=(*COMMON, *OF_PARTS, *names(Where.WINDOWS), "prefix_hit"),
)
_HICACHE = Family(
    name="hicache",
    why="a hierarchical cache: evicted, written to the host and storage, loaded back; chains, trees, windows, layers",
    scenarios=(
        *(one for name, boot in HOSTED.items() if name != "hicache-five" for one in host_shapes(boot)),
        *parts(HOSTED["hicache-five"], prefix="hicache-five-"),
    ),
    boots=tuple(HOSTED.values()),
    coverage_points=(*OF_PARTS, "non_final_chunk", "batch_shrinks", "prefix_hit", *names(Where.HOST)),
)

_RECURRENT = Family(
    name="recurrent",
    why="recurrent states: Qwen3-Next and Qwen3.5 style targets with their MTP layer, Nemotron-H style with either",
    scenarios=(
        *recurrent_shapes(RECURRENT["hybrid"], only=SHAPES),
        *(
            one
            for name in (
                "hybrid-cache",
                "hybrid-long",
                "hybrid-tree",
                "hybrid-dense",
                "hybrid-mamba",
                "hybrid-mamba-cache",
                "hybrid-mamba-next",
            )
            for one in recurrent_shapes(RECURRENT[name])
        ),
        *parts(RECURRENT["hybrid-pool"], prefix="hybrid-pool-"),
    ),
    boots=tuple(RECURRENT.values()),
    coverage_points=(*COMMON, *OF_PARTS, *names(Where.RECURRENT), "abort_in_decode"),
)

_ALL = (
    *(_EAGLE, _EAGLE3, _TREE, _PAGED, _MLA, _MTP, _WINDOW, _RECURRENT, _HICACHE, _TRAINED, _TEXTS, _DP, _TP),
    *(_ADAPTIVE, _MIXED, _WEIGHTS, _ADAPTERS, _HOT, _DISAGG, _DISAGG_DP),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
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
