"""Boot configurations that generated scenarios run on: a short fixed list, since a reboot is what costs.

To add one: a `Boot` in the list of its family below; `cases/families` says which lists a family has. Pure data; it must
not draw anything and must not import Hypothesis or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from packaging.version import Version

from cases.fixed import CHAIN, CHECKPOINT, PLAIN, VOCAB, boot_program
from harness.contract.known_issues import assumable
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import Algorithm, EngineConfig, SpecConfig

#: Of an op update: source and selector.
Take = tuple[Literal["disk", "tensor"], Literal["target", "draft", "all"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """One boot configuration, what it is for, and the oldest release it works on. text: generated prompts are text.

    successor: the pair whose weights its engine is given while it serves; takes: from where, and whose.
    """

    name: str
    why: str
    checkpoint: str = CHECKPOINT
    spec: SpecConfig = field(default_factory=SpecConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    since: str = "0"
    text: bool = False
    successor: str = ""
    takes: tuple[Take, ...] = ()

    @property
    def vocab(self) -> int:
        """Token ids that prompts are drawn below."""
        return BYTES if self.text else VOCAB

    @property
    def spelled(self) -> bool:
        """Whether its engine has a tokenizer, so that requests can have grammars and stop strings."""
        return not self.engine.skip_tokenizer_init

    @property
    def assumes(self) -> tuple[str, ...]:
        """Known issues that no release is without, and that would fail it if they were not assumed."""
        return tuple(name for name, one in assumable().items() if one.shows_in(self.spec, self.engine))

    @property
    def given(self) -> dict[str, Any]:
        """What a scenario on it takes from it."""
        return {"checkpoint": self.checkpoint, "spec": self.spec, "engine": self.engine}

    def program(self, prefix: str) -> Callable[..., Scenario]:
        """Makes scenarios on it, as `cases.fixed.boot_program`."""
        return partial(boot_program, prefix=prefix, checkpoint=self.checkpoint, spec=self.spec, engine=self.engine)

    def works_on(self, release: str) -> bool:
        return Version(release) >= Version(self.since)

    def boot_key(self) -> str:
        return Scenario(
            name="x",
            **self.given,
            requests=(RequestSpec(rid="x", input_ids=(1,)),),
            script=(Op(kind="submit", rids=("x",)), Op(kind="drain")),
        ).boot_key()


#: What a row of a table says of a boot.
OF_A_ROW = ("name", "why", "checkpoint", "spec", "engine")


def _boots(
    *rows: tuple[Any, ...], fields: Sequence[str] = (*OF_A_ROW, "since"), why: str = "", since: str = "0"
) -> dict[str, Boot]:
    """A boot a row, of which the last entries may be missing. why: how all of them begin, in words; since: unless a
    row has its own."""
    found = [{"since": since, **dict(zip(fields, row, strict=False))} for row in rows]
    return {one["name"]: Boot(**{**one, "why": why + one["why"]}) for one in found}


def _but(engine: EngineConfig, **changes: Any) -> EngineConfig:
    return engine.model_copy(update=changes)


def _chain(k: int, algorithm: Algorithm = "EAGLE") -> SpecConfig:
    return SpecConfig(algorithm=algorithm, num_steps=k, num_draft_tokens=k + 1)


def tree_of(k: int, t: int, n: int, algorithm: Algorithm = "EAGLE") -> SpecConfig:
    return SpecConfig(algorithm=algorithm, num_steps=k, eagle_topk=t, num_draft_tokens=n)


def _paged(page: int, **more: Any) -> EngineConfig:
    return EngineConfig(page_size=page, **more)


BYTES = 256
MOST_WAITING = 5
UNCACHED = EngineConfig(radix_cache=False)
#: A pool that a few requests outgrow, and more of them admitted than it can hold to their ends.
OUTGROWN: dict[str, Any] = {"max_total_tokens": 160, "schedule_conservativeness": 0.1}
TIGHT = EngineConfig(**OUTGROWN)
HEADS, HEADS_OF_FIVE, MTP = _chain(3, "EAGLE3"), _chain(5, "EAGLE3"), _chain(3, "MTP")
#: Two candidates a step, two steps.
TWO_BY_TWO = tree_of(2, 2, 6)
FIRST_MIXED = "0.5.19"
#: Until 0.5.12.post1 trees need the v1 worker; from then on also DP attention and hand-overs are driven.
V2 = "0.5.13"

BOOTS = _boots(
    ("plain", "the default chain: three steps, pages of one token, prefix cache"),
    ("pages", "pages of four tokens", CHECKPOINT, CHAIN, _paged(4)),
    ("small-pool", "a pool that a few requests outgrow", CHECKPOINT, CHAIN, TIGHT),
    (
        "apart",
        "a pair of which no two tensors are alike, five steps, a pool that a few requests outgrow",
        *("eagle-apart", _chain(5), TIGHT),
    ),
    (
        "no-cache",
        "no prefix cache, two steps, custom logit processors",
        *(CHECKPOINT, _chain(2), _but(UNCACHED, enable_custom_logit_processor=True)),
    ),
    (
        "long-draft",
        "five steps, two requests at a time, and five that wait",
        *(CHECKPOINT, _chain(5), EngineConfig(max_running_requests=2, max_queued_requests=MOST_WAITING)),
    ),
    ("one-step", "a draft of one token", CHECKPOINT, _chain(1), PLAIN),
)

#: Apart, since every release fails there (F-041, F-044); before 0.5.17 at every verify (F-042).
STATES = Boot(
    name="states",
    why="hidden states come back",
    since="0.5.17",
    engine=EngineConfig(enable_return_hidden_states=True, max_running_requests=4),
)

#: All its requests sample: drafts of greedy ones are drawn too, on every release (F-038).
DRAWN = Boot(
    name="drawn",
    why="drafts are drawn, and accepted by rejection sampling",
    since="0.5.14",
    engine=EngineConfig(rejection_sampling=True),
)

#: Multi-layer MTP: before 0.5.17 the worker runs neither eagerly nor in CUDA graphs without a known issue.
LAYERED = _boots(
    ("layers", "three MTP layers, no prefix cache", "mtp-tiny", MTP, UNCACHED),
    ("layers-cache", "three MTP layers with the prefix cache", "mtp-tiny", MTP, PLAIN),
    (
        "layers-pages",
        "two MTP layers, pages of four tokens",
        *("mtp-tiny", _chain(2, "MTP"), _paged(4, radix_cache=False)),
    ),
    # No prefix cache: what it hands out is predicted only in part where layers read each other's output
    # (docs/evidence/families.md).
    (
        "layers-chained",
        "three MTP layers, each of which reads the output of the one before, behind 45 target layers",
        *("mtp-chained", MTP, UNCACHED),
    ),
    (
        "layers-apart",
        "five MTP layers of which no two tensors are alike, a pool that a few requests outgrow",
        *("mtp-apart", _chain(5, "MTP"), _but(UNCACHED, **OUTGROWN)),
    ),
    (
        "chained-apart",
        "five MTP layers that read each other's output, of which no two tensors are alike",
        *("mtp-chained-apart", _chain(5, "MTP"), UNCACHED),
    ),
    since="0.5.17",
)

#: From three steps on every release deviates.
TREES = _boots(
    ("tree", "two candidates a step, three steps, six nodes", CHECKPOINT, tree_of(3, 2, 6), PLAIN),
    ("wide-tree", "four candidates a step, three steps", CHECKPOINT, tree_of(3, 4, 8), PLAIN),
    ("small-tree", "two steps, all but a few nodes left out", CHECKPOINT, tree_of(2, 2, 3), PLAIN),
    ("full-tree", "two steps, every node kept", CHECKPOINT, tree_of(2, 2, 7), PLAIN),
    ("widest-tree", "eight candidates a step, 16 nodes", CHECKPOINT, tree_of(2, 8, 16), PLAIN),
    ("deep-tree", "five steps, ten nodes", CHECKPOINT, tree_of(5, 2, 10), PLAIN),
    (
        "tree-apart",
        "three candidates a step, two steps, a pair of which no two tensors are alike, a pool that is outgrown",
        *("eagle-apart", tree_of(2, 3, 8), TIGHT),
    ),
    (
        "deep-apart",
        "five steps, three candidates a step, the same pair and pool",
        "eagle-apart",
        tree_of(5, 3, 12),
        TIGHT,
    ),
    since=V2,
)

PAGES = _boots(
    ("pages-16", "pages of 16 tokens", CHECKPOINT, CHAIN, _paged(16)),
    ("pages-64", "pages of 64 tokens", CHECKPOINT, CHAIN, _paged(64)),
    (
        "pages-apart",
        "pages of four tokens, five steps, a pair of which no two tensors are alike, a pool that is outgrown",
        *("eagle-apart", _chain(5), _paged(4, **OUTGROWN)),
    ),
    (
        "pages-4-tree",
        "pages of four tokens, two candidates a step: branches begin on pages of their own",
        *(CHECKPOINT, TWO_BY_TWO, _paged(4), V2),
    ),
    ("pages-16-tree", "pages of 16 tokens, two candidates a step", CHECKPOINT, TWO_BY_TWO, _paged(16), V2),
)

EAGLE3_BOOTS = _boots(
    ("eagle3", "three features by default, 432 of 512 tokens", "eagle3-tiny", HEADS, PLAIN, "0"),
    (
        "eagle3-two",
        "two features by name, the whole vocabulary, pages of four tokens",
        *("eagle3-two", HEADS, _paged(4)),
    ),
    ("eagle3-wide", "one feature, a draft wider than the target, five steps", "eagle3-wide", HEADS_OF_FIVE, PLAIN),
    (
        "eagle3-apart",
        "three features by name, a head of its own for all tokens, five steps, a pool that is outgrown",
        *("eagle3-apart", HEADS_OF_FIVE, TIGHT),
    ),
    (
        "eagle3-tree",
        "trees of two candidates a step over a smaller vocabulary",
        *("eagle3-tiny", tree_of(2, 2, 6, "EAGLE3"), PLAIN, V2),
    ),
    since="0.5.12",
)

#: Latent attention, with the NextN layer as the draft.
LATENT = _boots(
    ("latent", "latents in the cache, a chain of three steps", "mla-tiny", CHAIN, PLAIN),
    ("latent-pages", "latents over pages of four tokens", "mla-tiny", CHAIN, _paged(4)),
    ("latent-tree", "latents, two candidates a step, two steps", "mla-tiny", TWO_BY_TWO, PLAIN, V2),
    ("latent-apart", "latents of other sizes, five steps, a pool that is outgrown", "mla-apart", _chain(5), TIGHT),
)

#: Trained weights, of which one tree is enough: from three steps on every release deviates.
TRAINED = {
    name: replace(one, text=True)
    for name, one in _boots(
        ("trained", "an EAGLE-3 chain of three steps", "trained-eagle3", HEADS, PLAIN),
        ("trained-long", "an EAGLE-3 chain of five steps", "trained-eagle3", HEADS_OF_FIVE, PLAIN),
        ("trained-tree", "four candidates a step, two steps", "trained-eagle3", tree_of(2, 4, 8, "EAGLE3"), PLAIN, V2),
        ("trained-eagle1", "an EAGLE-1 chain of three steps", "trained-eagle1", CHAIN, PLAIN, "0"),
        (
            "trained-tight",
            "an EAGLE-3 chain of five steps, a pool that a few requests outgrow",
            *("trained-eagle3", HEADS_OF_FIVE, _but(TIGHT, max_total_tokens=320)),
        ),
        why="trained weights, ",
        since="0.5.12",
    ).items()
}

#: Layers with sliding windows have a KV pool of their own.
WINDOWS = EngineConfig(disable_hybrid_swa_memory=False)
WINDOWED = _boots(
    ("window", "gpt-oss style, an EAGLE-3 chain of three steps", "oss-tiny", HEADS, WINDOWS),
    (
        "window-narrow",
        "windows of three rows, no prefix cache, five steps",
        *("oss-narrow", HEADS_OF_FIVE, _but(WINDOWS, radix_cache=False), "0.5.17"),
    ),
    (
        "window-pages",
        "pages of four tokens, three candidates a step",
        *("oss-tiny", tree_of(2, 3, 8, "EAGLE3"), _but(WINDOWS, page_size=4)),
    ),
    ("window-pool", "a pool that a few requests outgrow", "oss-tiny", HEADS, _but(WINDOWS, **OUTGROWN)),
    (
        "window-layers",
        "MiMo-V2 style, three MTP layers, no prefix cache",
        *("mtp-window", MTP, _but(WINDOWS, radix_cache=False), "0.5.17"),
    ),
    ("window-layers-cache", "MiMo-V2 style, windows of three rows", "mtp-narrow", MTP, WINDOWS, "0.5.17"),
    why="a pool for sliding windows: ",
    since=V2,
)

#: The prefix cache keeps states where texts and chunks end; under overlap scheduling, every so many tokens.
UNBUFFERED = EngineConfig(overlap_schedule=False)
#: Else SGLang tunes kernels of flashinfer's for the experts of Nemotron-H, which not every machine has.
OF_NEMOTRON = {"server_args": {"moe_runner_backend": "triton"}}
#: Targets with recurrent states.
RECURRENT = _boots(
    ("hybrid", "a chain of three steps, no prefix cache", "hybrid-tiny", CHAIN, UNCACHED),
    ("hybrid-cache", "the same with the prefix cache", "hybrid-tiny", CHAIN, UNBUFFERED),
    ("hybrid-long", "five steps", "hybrid-tiny", _chain(5), UNCACHED),
    ("hybrid-tree", "two candidates a step, two steps", "hybrid-tiny", TWO_BY_TWO, UNCACHED),
    ("hybrid-pool", "a pool that a few requests outgrow", "hybrid-tiny", CHAIN, _but(UNBUFFERED, **OUTGROWN)),
    ("hybrid-dense", "Qwen3.5 style, the prefix cache", "hybrid-dense", CHAIN, UNBUFFERED),
    ("hybrid-mamba", "Nemotron-H style, no prefix cache", "hybrid-mamba", CHAIN, _but(UNCACHED, **OF_NEMOTRON)),
    ("hybrid-mamba-cache", "the same with the prefix cache", *("hybrid-mamba", CHAIN, _but(UNBUFFERED, **OF_NEMOTRON))),
    (
        "hybrid-mamba-next",
        "Nemotron-H style with experts and a next-token layer, no prefix cache",
        *("hybrid-mamba-next", CHAIN, _but(UNCACHED, **OF_NEMOTRON)),
    ),
    why="recurrent states: ",
    since="0.5.23",
)


def _hosted(
    policy: str, *, page: int = 1, unified: bool = False, windows: bool = False, slots: int = 0, **more: Any
) -> EngineConfig:
    """A device pool that two requests fill, and twice as much on the host; "direct" copies, as a CPU has them.

    windows: have a pool of their own; more: further arguments of SGLang's.
    """
    return EngineConfig(
        page_size=page,
        disable_hybrid_swa_memory=not windows,
        max_total_tokens=slots or (176 if page == 1 else 208),
        enable_unified_radix_tree=unified,
        server_args={
            "enable_hierarchical_cache": True,
            "hicache_ratio": 2.0,
            "hicache_write_policy": policy,
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "layer_first" if page == 1 else "page_first_direct",
            **more,
        },
    )


#: Storage in a folder of the engine's own; requests of a few dozen tokens are worth a look there.
STORED: dict[str, Any] = {
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend_extra_config": '{"prefetch_threshold": 16}',
}
HOSTED = _boots(
    ("hicache", "EAGLE, write_through", CHECKPOINT, CHAIN, _hosted("write_through")),
    ("hicache-pages", "EAGLE-3, pages of 16 tokens, write_back", "eagle3-tiny", HEADS, _hosted("write_back", page=16)),
    ("hicache-selective", "EAGLE-3, write_through_selective", "eagle3-tiny", HEADS, _hosted("write_through_selective")),
    (
        "hicache-unified",
        "EAGLE, pages of 16 tokens, the unified tree",
        *(CHECKPOINT, CHAIN, _hosted("write_through", page=16, unified=True)),
    ),
    ("hicache-layers", "three MTP layers, write_back", "mtp-tiny", MTP, _hosted("write_back", unified=True)),
    (
        "hicache-latent",
        "latent attention with a NextN layer, write_through",
        *("mla-tiny", CHAIN, _hosted("write_through")),
    ),
    ("hicache-tree", "a tree of two candidates, write_through", CHECKPOINT, TWO_BY_TWO, _hosted("write_through")),
    (
        "hicache-tree-pages",
        "an EAGLE-3 tree over pages of four tokens, write_back",
        *("eagle3-tiny", tree_of(2, 3, 8, "EAGLE3"), _hosted("write_back", page=4, slots=240)),
    ),
    (
        "hicache-window",
        "gpt-oss style with EAGLE-3, a pool of its own for windows, write_through",
        *("oss-tiny", HEADS, _hosted("write_through", windows=True)),
    ),
    (
        "hicache-window-layers",
        "MiMo-V2 style, the same with three MTP layers, pages of 16 tokens",
        *("mtp-window", MTP, _hosted("write_through", page=16, windows=True, unified=True)),
    ),
    (
        "hicache-five",
        "five steps, on a pool that is outgrown, write_through",
        *("eagle-apart", _chain(5), _but(_hosted("write_through"), **OUTGROWN)),
    ),
    (
        "hicache-storage",
        "EAGLE, write_through, storage behind the host",
        *(CHECKPOINT, CHAIN, _hosted("write_through", **STORED)),
    ),
    (
        "hicache-storage-pages",
        "EAGLE-3, pages of 16 tokens, write_back, storage behind the host",
        *("eagle3-tiny", HEADS, _hosted("write_back", page=16, **STORED)),
    ),
    why="a hierarchical cache: ",
    since="0.5.17",
)

SPELLED = EngineConfig(skip_tokenizer_init=False, grammar_backend="xgrammar")
SPELLED_BOOTS = _boots(
    ("texts", "grammars and stop strings, a chain of three steps", CHECKPOINT, CHAIN, SPELLED),
    ("texts-tree", "the same, two candidates a step, two steps", CHECKPOINT, TWO_BY_TWO, SPELLED),
    ("texts-five", "five steps, on a pool that is outgrown", CHECKPOINT, _chain(5), _but(SPELLED, **OUTGROWN)),
    (
        "texts-thoughts",
        "grammars behind thoughts, a chain of three steps",
        *(CHECKPOINT, CHAIN, _but(SPELLED, reasoning_parser="qwen3")),
    ),
    since=V2,
)

TWO_RANKS = EngineConfig(dp_size=2, tp_size=2, max_running_requests=4)
DP_BOOTS = _boots(
    ("dp", "DP attention over two ranks", "qwen3-tiny", HEADS, TWO_RANKS),
    ("dp-wide", "two ranks, a draft wider than its target", "qwen3-wide", HEADS, TWO_RANKS),
    (
        "dp-apart",
        "two ranks, a head of its own, five steps, a pool that is outgrown",
        *("qwen3-apart", HEADS_OF_FIVE, _but(TWO_RANKS, **OUTGROWN)),
    ),
    (
        "dp-lm-head",
        "two ranks, each with logits of its own requests alone",
        *("qwen3-tiny", HEADS, _but(TWO_RANKS, enable_dp_lm_head=True)),
    ),
    ("dp-layers", "two ranks, three MTP layers", "mtp-tiny", MTP, _but(TWO_RANKS, radix_cache=False), "0.5.17"),
    (
        "dp-layers-head",
        "the same, each with logits of its own requests alone",
        *("mtp-tiny", MTP, _but(TWO_RANKS, radix_cache=False, enable_dp_lm_head=True), "0.5.17"),
    ),
    (
        "dp-coordinated",
        "two ranks, one of which may verify beside the other's prefill",
        *("qwen3-tiny", HEADS, _but(TWO_RANKS, dp_spec_prefill_coordination=True), "0.5.23"),
    ),
    since=V2,
)

#: Every round decides anew by what the one before accepted; candidates leave out a number, so that it jumps.
ADAPTIVE = SpecConfig(
    num_steps=3,
    num_draft_tokens=4,
    adaptive={
        "1": {"candidate_steps": [0, 1, 3]},
        "3": {"candidate_steps": [2, 5]},
        "warmup_batches": 0,
        "update_interval": 1,
        "ema_alpha": 0.8,
        "down_hysteresis": 0.0,
    },
)
ADAPTIVE_BOOTS = _boots(
    (
        "adaptive",
        "between none, one and three steps, or two and five from three requests on",
        *(CHECKPOINT, ADAPTIVE, PLAIN),
    ),
    (
        "adaptive-eagle3",
        "the same with an EAGLE-3 head, over pages of four tokens",
        *("eagle3-tiny", ADAPTIVE.model_copy(update={"algorithm": "EAGLE3"}), _paged(4)),
    ),
    ("adaptive-pool", "the first on a pool that a few requests outgrow", "eagle-apart", ADAPTIVE, TIGHT),
    since="0.5.23",
)

MIXED = EngineConfig(enable_mixed_chunk=True)
MIXED_BOOTS = _boots(
    ("mixed", "prompt chunks and running requests in one batch", CHECKPOINT, CHAIN, MIXED),
    (
        "mixed-eagle3",
        "the same with an EAGLE-3 head, over pages of four tokens",
        *("eagle3-tiny", HEADS, _but(MIXED, page_size=4)),
    ),
    ("mixed-tree", "the same with two candidates a step", CHECKPOINT, TWO_BY_TWO, MIXED),
    (
        "mixed-five",
        "the same with five steps, on a pool that is outgrown",
        *("eagle-apart", _chain(5), _but(MIXED, **OUTGROWN)),
    ),
    since=FIRST_MIXED,
)

TP = EngineConfig(tp_size=2, max_running_requests=4)
TP_BOOTS = _boots(
    ("tp", "two TP ranks, a chain of three steps", CHECKPOINT, CHAIN, TP),
    ("tp-eagle3", "two TP ranks, 432 of 512 tokens in the draft's head", "eagle3-tiny", HEADS, TP),
    ("tp-tree", "two TP ranks, two candidates a step", CHECKPOINT, TWO_BY_TWO, TP),
    (
        "tp-pages",
        "two TP ranks, pages of four tokens, a pool that a few requests fill",
        *(CHECKPOINT, CHAIN, _but(TP, page_size=4, max_total_tokens=160)),
    ),
    ("tp-latent", "two TP ranks, latent attention that every rank holds whole", "mla-tiny", CHAIN, TP),
    ("tp-layers", "two TP ranks, three MTP layers", "mtp-tiny", MTP, _but(TP, radix_cache=False), "0.5.17"),
    ("tp-four", "four TP ranks, a KV head each", "qwen3-four", HEADS, _but(TP, tp_size=4)),
    ("tp-below-dp", "two DP ranks of two TP ranks each", "qwen3-four", HEADS, _but(TP, tp_size=4, dp_size=2)),
    ("tp-five", "two TP ranks, five steps, a pool that is outgrown", "eagle-apart", _chain(5), _but(TP, **OUTGROWN)),
    since=V2,
)

#: Two of three tokens, in an order of their own.
HOT = tuple(token * 2 for token in range(171)) + tuple(511 - token * 2 for token in range(170))


def _hot(spec: SpecConfig) -> SpecConfig:
    return spec.model_copy(update={"token_map": HOT})


HOT_BOOTS = _boots(
    ("hot-tokens", "a chain that proposes two of three tokens (FR-Spec)", CHECKPOINT, _hot(CHAIN), PLAIN),
    ("hot-tree", "the same with two candidates a step, two steps", CHECKPOINT, _hot(TWO_BY_TWO), PLAIN),
    ("hot-five", "the first with five steps, on a pool that is outgrown", "eagle-apart", _hot(_chain(5)), TIGHT),
)

ADAPTED = EngineConfig(lora_paths=("first", "second"))
ADAPTER_BOOTS = _boots(
    ("lora", "a chain of three steps", CHECKPOINT, CHAIN, ADAPTED),
    ("lora-tree", "two candidates a step", CHECKPOINT, TWO_BY_TWO, ADAPTED),
    ("lora-eagle3", "an EAGLE-3 head over pages", "eagle3-tiny", HEADS, _but(ADAPTED, page_size=4)),
    (
        "lora-five",
        "an EAGLE-3 head of five steps, on a pool that is outgrown",
        *("eagle3-apart", HEADS_OF_FIVE, _but(ADAPTED, **OUTGROWN)),
    ),
    why="two LoRA adapters: ",
    since=FIRST_MIXED,
)

#: An update of the draft alone is one that opens a session.
FIRST_SESSIONS = "0.5.23"
DISK: Take = ("disk", "target")
WHOLE: Take = ("disk", "all")
TENSORS: tuple[Take, ...] = (("tensor", "target"), ("tensor", "draft"))
WEIGHT_BOOTS = _boots(
    ("weights", "an EAGLE-1 chain", CHECKPOINT, CHAIN, PLAIN, "eagle-next", (DISK, *TENSORS)),
    ("weights-eagle3", "an EAGLE-3 chain over pages", "eagle3-tiny", HEADS, _paged(4), "eagle3-next", TENSORS),
    ("weights-layers", "three MTP layers", "mtp-tiny", MTP, UNCACHED, "mtp-next", (WHOLE, ("tensor", "all"))),
    ("weights-latent", "a NextN layer", "mla-tiny", CHAIN, PLAIN, "mla-next", (WHOLE, *TENSORS)),
    ("weights-tp", "two TP ranks", CHECKPOINT, CHAIN, TP, "eagle-next", (DISK, *TENSORS)),
    ("weights-five", "five steps, on a pool that is outgrown", CHECKPOINT, _chain(5), TIGHT, "eagle-next", (DISK,)),
    fields=(*OF_A_ROW, "successor", "takes"),
    why="new weights while it serves: ",
    since=FIRST_SESSIONS,
)

#: Prefill and decode as two engines, with a pool that a few requests fill.
PAIR = EngineConfig(disaggregation=True, max_running_requests=4, max_total_tokens=160)
PD_BOOTS = _boots(
    ("pd", "a chain of three steps", CHECKPOINT, CHAIN, PAIR),
    ("pd-wide", "a draft wider than the target", "eagle3-wide", HEADS, PAIR),
    ("pd-tree", "two candidates a step", CHECKPOINT, TWO_BY_TWO, PAIR),
    ("pd-pages", "pages of four tokens", CHECKPOINT, CHAIN, _but(PAIR, page_size=4)),
    ("pd-five", "five steps, a pair of which no two tensors are alike", "eagle-apart", _chain(5), PAIR),
    why="two engines, ",
    since=V2,
)
_RANKED = _but(PAIR, dp_size=2, tp_size=2)
RANKED_PAIR, RANKED_FIVE = _boots(
    ("pd-ranks", "two engines, the decode side with DP attention over two ranks", *("qwen3-tiny", HEADS, _RANKED)),
    ("pd-ranks-five", "the same with a head of its own, and five steps", "qwen3-apart", HEADS_OF_FIVE, _RANKED),
    since=V2,
).values()

#: family -> the boot configurations that generation takes turns on.
OF_FAMILY: dict[str, tuple[Boot, ...]] = {
    "eagle": (*BOOTS.values(), STATES, DRAWN),
    "eagle3": tuple(EAGLE3_BOOTS.values()),
    "tree": tuple(TREES.values()),
    "paged": (BOOTS["pages"], *PAGES.values()),
    "mla": tuple(LATENT.values()),
    "mtp": tuple(LAYERED.values()),
    "window": tuple(WINDOWED.values()),
    "recurrent": tuple(RECURRENT.values()),
    "hicache": tuple(HOSTED.values()),
    "trained": tuple(TRAINED.values()),
    "texts": tuple(SPELLED_BOOTS.values()),
    "dp": tuple(DP_BOOTS.values()),
    "tp": tuple(TP_BOOTS.values()),
    "adaptive": tuple(ADAPTIVE_BOOTS.values()),
    "mixed": tuple(MIXED_BOOTS.values()),
    "weights": tuple(WEIGHT_BOOTS.values()),
    "lora": tuple(ADAPTER_BOOTS.values()),
    "token-map": tuple(HOT_BOOTS.values()),
    "disagg": tuple(PD_BOOTS.values()),
    "disagg-dp": (RANKED_PAIR, RANKED_FIVE),
}
BY_NAME: dict[str, Boot] = {boot.name: boot for boots in OF_FAMILY.values() for boot in boots}
