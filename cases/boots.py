"""Boot configurations that generated scenarios run on: a short fixed list, since a reboot is what costs.

To add one: a `Boot` in the list of its family below; `cases/families` says which lists a family has. Pure data; it must
not draw anything and must not import Hypothesis or torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from packaging.version import Version

from cases.fixed import CHECKPOINT, PLAIN, VOCAB
from harness.contract.known_issues import assumable
from harness.contract.requests import RequestSpec
from harness.contract.scenario import EngineConfig, Op, Scenario, SpecConfig

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

    def works_on(self, release: str) -> bool:
        return Version(release) >= Version(self.since)

    def boot_key(self) -> str:
        return Scenario(
            name="x",
            checkpoint=self.checkpoint,
            spec=self.spec,
            engine=self.engine,
            requests=(RequestSpec(rid="x", input_ids=(1,)),),
            script=(Op(kind="submit", rids=("x",)), Op(kind="drain")),
        ).boot_key()


def _named(boots: Iterable[Boot]) -> dict[str, Boot]:
    return {boot.name: boot for boot in boots}


def _chain(k: int) -> SpecConfig:
    return SpecConfig(num_steps=k, num_draft_tokens=k + 1)


def _tree(k: int, t: int, n: int) -> SpecConfig:
    return SpecConfig(num_steps=k, eagle_topk=t, num_draft_tokens=n)


def _paged(page: int) -> EngineConfig:
    return EngineConfig(page_size=page)


BYTES = 256
MOST_WAITING = 5
UNCACHED = EngineConfig(radix_cache=False)
#: A pool that a few requests outgrow, and more of them admitted than it can hold to their ends.
OUTGROWN: dict[str, Any] = {"max_total_tokens": 160, "schedule_conservativeness": 0.1}
TIGHT = EngineConfig(**OUTGROWN)
HEADS_OF_FIVE = SpecConfig(algorithm="EAGLE3", num_steps=5, eagle_topk=1, num_draft_tokens=6)
HEADS = SpecConfig(algorithm="EAGLE3", num_steps=3, eagle_topk=1, num_draft_tokens=4)
MTP = SpecConfig(algorithm="MTP", num_steps=3, num_draft_tokens=4)
FIRST_MIXED = "0.5.19"
#: Until 0.5.12.post1 trees need the v1 worker; from then on also DP attention and hand-overs are driven.
V2 = "0.5.13"

BOOTS = _named(
    (
        Boot(name="plain", why="the default chain: three steps, pages of one token, prefix cache"),
        Boot(name="pages", why="pages of four tokens", engine=_paged(4)),
        Boot(name="small-pool", why="a pool that a few requests outgrow", engine=TIGHT),
        Boot(
            name="apart",
            why="a pair of which no two tensors are alike, five steps, a pool that a few requests outgrow",
            checkpoint="eagle-apart",
            spec=_chain(5),
            engine=TIGHT,
        ),
        Boot(
            name="no-cache",
            why="no prefix cache, two steps, custom logit processors",
            spec=_chain(2),
            engine=EngineConfig(radix_cache=False, enable_custom_logit_processor=True),
        ),
        Boot(
            name="long-draft",
            why="five steps, two requests at a time, and five that wait",
            spec=_chain(5),
            engine=EngineConfig(max_running_requests=2, max_queued_requests=MOST_WAITING),
        ),
        Boot(name="one-step", why="a draft of one token", spec=_chain(1)),
    )
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
LAYERED = _named(
    Boot(name=name, why=why, checkpoint=checkpoint, spec=spec, engine=engine, since="0.5.17")
    for name, why, checkpoint, spec, engine in (
        ("layers", "three MTP layers, no prefix cache", "mtp-tiny", MTP, UNCACHED),
        ("layers-cache", "three MTP layers with the prefix cache", "mtp-tiny", MTP, PLAIN),
        (
            "layers-pages",
            "two MTP layers, pages of four tokens",
            "mtp-tiny",
            SpecConfig(algorithm="MTP", num_steps=2, num_draft_tokens=3),
            EngineConfig(page_size=4, radix_cache=False),
        ),
        # No prefix cache: what it hands out is predicted only in part where layers read each other's output
        # (docs/evidence/families.md).
        (
            "layers-chained",
            "three MTP layers, each of which reads the output of the one before, behind 45 target layers",
            "mtp-chained",
            MTP,
            UNCACHED,
        ),
        (
            "layers-apart",
            "five MTP layers of which no two tensors are alike, a pool that a few requests outgrow",
            "mtp-apart",
            SpecConfig(algorithm="MTP", num_steps=5, num_draft_tokens=6),
            EngineConfig(radix_cache=False, **OUTGROWN),
        ),
        (
            "chained-apart",
            "five MTP layers that read each other's output, of which no two tensors are alike",
            "mtp-chained-apart",
            SpecConfig(algorithm="MTP", num_steps=5, num_draft_tokens=6),
            UNCACHED,
        ),
    )
)

#: From three steps on every release deviates.
TREES = _named(
    Boot(name=name, why=why, checkpoint=checkpoint, spec=spec, engine=engine, since=V2)
    for name, why, spec, checkpoint, engine in (
        ("tree", "two candidates a step, three steps, six nodes", _tree(3, 2, 6), CHECKPOINT, PLAIN),
        ("wide-tree", "four candidates a step, three steps", _tree(3, 4, 8), CHECKPOINT, PLAIN),
        ("small-tree", "two steps, all but a few nodes left out", _tree(2, 2, 3), CHECKPOINT, PLAIN),
        ("full-tree", "two steps, every node kept", _tree(2, 2, 7), CHECKPOINT, PLAIN),
        ("widest-tree", "eight candidates a step, 16 nodes", _tree(2, 8, 16), CHECKPOINT, PLAIN),
        ("deep-tree", "five steps, ten nodes", _tree(5, 2, 10), CHECKPOINT, PLAIN),
        (
            "tree-apart",
            "three candidates a step, two steps, a pair of which no two tensors are alike, a pool that is outgrown",
            _tree(2, 3, 8),
            "eagle-apart",
            TIGHT,
        ),
        (
            "deep-apart",
            "five steps, three candidates a step, the same pair and pool",
            _tree(5, 3, 12),
            "eagle-apart",
            TIGHT,
        ),
    )
)

PAGES = _named(
    (
        Boot(name="pages-16", why="pages of 16 tokens", engine=_paged(16)),
        Boot(name="pages-64", why="pages of 64 tokens", engine=_paged(64)),
        Boot(
            name="pages-apart",
            why="pages of four tokens, five steps, a pair of which no two tensors are alike, a pool that is outgrown",
            checkpoint="eagle-apart",
            spec=_chain(5),
            engine=EngineConfig(page_size=4, **OUTGROWN),
        ),
        Boot(
            name="pages-4-tree",
            why="pages of four tokens, two candidates a step: branches begin on pages of their own",
            spec=_tree(2, 2, 6),
            engine=_paged(4),
            since=V2,
        ),
        Boot(
            name="pages-16-tree",
            why="pages of 16 tokens, two candidates a step",
            spec=_tree(2, 2, 6),
            engine=_paged(16),
            since=V2,
        ),
    )
)

EAGLE3_BOOTS = _named(
    (
        Boot(name="eagle3", why="three features by default, 432 of 512 tokens", checkpoint="eagle3-tiny", spec=HEADS),
        Boot(
            name="eagle3-two",
            why="two features by name, the whole vocabulary, pages of four tokens",
            checkpoint="eagle3-two",
            spec=HEADS,
            engine=_paged(4),
            since="0.5.12",
        ),
        Boot(
            name="eagle3-wide",
            why="one feature, a draft wider than the target, five steps",
            checkpoint="eagle3-wide",
            spec=HEADS_OF_FIVE,
            since="0.5.12",
        ),
        Boot(
            name="eagle3-apart",
            why="three features by name, a head of its own for all tokens, five steps, a pool that is outgrown",
            checkpoint="eagle3-apart",
            spec=HEADS_OF_FIVE,
            engine=TIGHT,
            since="0.5.12",
        ),
        Boot(
            name="eagle3-tree",
            why="trees of two candidates a step over a smaller vocabulary",
            checkpoint="eagle3-tiny",
            spec=SpecConfig(algorithm="EAGLE3", num_steps=2, eagle_topk=2, num_draft_tokens=6),
            since=V2,
        ),
    )
)

#: Latent attention, with the NextN layer as the draft.
LATENT = _named(
    Boot(name=name, why=why, checkpoint=checkpoint, spec=spec, engine=engine, since=since)
    for name, why, checkpoint, spec, engine, since in (
        ("latent", "latents in the cache, a chain of three steps", "mla-tiny", SpecConfig(), EngineConfig(), "0"),
        ("latent-pages", "latents over pages of four tokens", "mla-tiny", SpecConfig(), _paged(4), "0"),
        ("latent-tree", "latents, two candidates a step, two steps", "mla-tiny", _tree(2, 2, 6), EngineConfig(), V2),
        (
            "latent-apart",
            "latents of other sizes, five steps, a pool that is outgrown",
            "mla-apart",
            _chain(5),
            TIGHT,
            "0",
        ),
    )
)

#: Trained weights, of which one tree is enough: from three steps on every release deviates.
TRAINED = _named(
    Boot(name=name, why=why, checkpoint=f"trained-{head}", spec=spec, engine=engine, since=since, text=True)
    for name, why, head, spec, since, engine in (
        ("trained", "trained weights, an EAGLE-3 chain of three steps", "eagle3", HEADS, "0.5.12", PLAIN),
        (
            "trained-long",
            "trained weights, an EAGLE-3 chain of five steps",
            "eagle3",
            HEADS_OF_FIVE,
            "0.5.12",
            PLAIN,
        ),
        (
            "trained-tree",
            "trained weights, four candidates a step, two steps",
            "eagle3",
            SpecConfig(algorithm="EAGLE3", num_steps=2, eagle_topk=4, num_draft_tokens=8),
            V2,
            PLAIN,
        ),
        (
            "trained-eagle1",
            "trained weights, an EAGLE-1 chain of three steps",
            "eagle1",
            SpecConfig(),
            "0",
            PLAIN,
        ),
        (
            "trained-tight",
            "trained weights, an EAGLE-3 chain of five steps, a pool that a few requests outgrow",
            "eagle3",
            HEADS_OF_FIVE,
            "0.5.12",
            EngineConfig(max_total_tokens=320, schedule_conservativeness=0.1),
        ),
    )
)

#: Layers with sliding windows have a KV pool of their own.
WINDOWS = EngineConfig(disable_hybrid_swa_memory=False)
WINDOWED = _named(
    Boot(name=name, why=f"a pool for sliding windows: {why}", checkpoint=pair, spec=spec, engine=engine, since=since)
    for name, why, pair, spec, engine, since in (
        ("window", "gpt-oss style, an EAGLE-3 chain of three steps", "oss-tiny", HEADS, WINDOWS, V2),
        (
            "window-narrow",
            "windows of three rows, no prefix cache, five steps",
            "oss-narrow",
            HEADS_OF_FIVE,
            WINDOWS.model_copy(update={"radix_cache": False}),
            "0.5.17",
        ),
        (
            "window-pages",
            "pages of four tokens, three candidates a step",
            "oss-tiny",
            SpecConfig(algorithm="EAGLE3", num_steps=2, eagle_topk=3, num_draft_tokens=8),
            WINDOWS.model_copy(update={"page_size": 4}),
            V2,
        ),
        (
            "window-pool",
            "a pool that a few requests outgrow",
            "oss-tiny",
            HEADS,
            WINDOWS.model_copy(update=OUTGROWN),
            V2,
        ),
        (
            "window-layers",
            "MiMo-V2 style, three MTP layers, no prefix cache",
            "mtp-window",
            MTP,
            WINDOWS.model_copy(update={"radix_cache": False}),
            "0.5.17",
        ),
        ("window-layers-cache", "MiMo-V2 style, windows of three rows", "mtp-narrow", MTP, WINDOWS, "0.5.17"),
    )
)

#: The prefix cache keeps states where texts and chunks end; under overlap scheduling, every so many tokens.
UNBUFFERED = EngineConfig(overlap_schedule=False)
#: Targets with recurrent states; 0.5.17's pool of them names the device "cuda", and ends an engine on a CPU.
RECURRENT = _named(
    Boot(name=name, why=f"recurrent states: {why}", checkpoint=pair, spec=spec, engine=engine, since="0.5.23")
    for name, why, pair, spec, engine in (
        ("hybrid", "a chain of three steps, no prefix cache", "hybrid-tiny", SpecConfig(), UNCACHED),
        ("hybrid-cache", "the same with the prefix cache", "hybrid-tiny", SpecConfig(), UNBUFFERED),
        ("hybrid-long", "five steps", "hybrid-tiny", _chain(5), UNCACHED),
        ("hybrid-tree", "two candidates a step, two steps", "hybrid-tiny", _tree(2, 2, 6), UNCACHED),
        (
            "hybrid-pool",
            "a pool that a few requests outgrow",
            "hybrid-tiny",
            SpecConfig(),
            UNBUFFERED.model_copy(update=OUTGROWN),
        ),
        ("hybrid-dense", "Qwen3.5 style, the prefix cache", "hybrid-dense", SpecConfig(), UNBUFFERED),
        ("hybrid-mamba", "Nemotron-H style, no prefix cache", "hybrid-mamba", SpecConfig(), UNCACHED),
        ("hybrid-mamba-cache", "the same with the prefix cache", "hybrid-mamba", SpecConfig(), UNBUFFERED),
    )
)


def _hosted(
    policy: str, *, page: int = 1, unified: bool = False, slots: int | None = None, **more: Any
) -> EngineConfig:
    """A device pool that two requests fill, and twice as much on the host; "direct" copies, as a CPU has them.

    more: further arguments of SGLang's.
    """
    return EngineConfig(
        page_size=page,
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
HOSTED = _named(
    Boot(name=name, why=f"a hierarchical cache: {why}", checkpoint=pair, spec=spec, engine=engine, since="0.5.17")
    for name, why, pair, spec, engine in (
        ("hicache", "EAGLE, write_through", CHECKPOINT, SpecConfig(), _hosted("write_through")),
        (
            "hicache-pages",
            "EAGLE-3, pages of 16 tokens, write_back",
            "eagle3-tiny",
            HEADS,
            _hosted("write_back", page=16),
        ),
        (
            "hicache-selective",
            "EAGLE-3, write_through_selective",
            "eagle3-tiny",
            HEADS,
            _hosted("write_through_selective"),
        ),
        (
            "hicache-unified",
            "EAGLE, pages of 16 tokens, the unified tree",
            CHECKPOINT,
            SpecConfig(),
            _hosted("write_through", page=16, unified=True),
        ),
        ("hicache-layers", "three MTP layers, write_back", "mtp-tiny", MTP, _hosted("write_back", unified=True)),
        (
            "hicache-latent",
            "latent attention with a NextN layer, write_through",
            "mla-tiny",
            SpecConfig(),
            _hosted("write_through"),
        ),
        (
            "hicache-tree",
            "a tree of two candidates, write_through",
            CHECKPOINT,
            _tree(2, 2, 6),
            _hosted("write_through"),
        ),
        (
            "hicache-tree-pages",
            "an EAGLE-3 tree over pages of four tokens, write_back",
            "eagle3-tiny",
            SpecConfig(algorithm="EAGLE3", num_steps=2, eagle_topk=3, num_draft_tokens=8),
            _hosted("write_back", page=4, slots=240),
        ),
        (
            "hicache-window",
            "gpt-oss style with EAGLE-3, a pool of its own for windows, write_through",
            "oss-tiny",
            HEADS,
            _hosted("write_through", windows=True),
        ),
        # In pages: whoever shares a page here agrees in the tokens behind it that MTP layers read (F-012).
        (
            "hicache-window-layers",
            "MiMo-V2 style, the same with three MTP layers, pages of 16 tokens",
            "mtp-window",
            MTP,
            _hosted("write_through", page=16, windows=True),
        ),
        (
            "hicache-storage",
            "EAGLE, write_through, storage behind the host",
            CHECKPOINT,
            SpecConfig(),
            _hosted("write_through", **STORED),
        ),
        (
            "hicache-storage-pages",
            "EAGLE-3, pages of 16 tokens, write_back, storage behind the host",
            "eagle3-tiny",
            HEADS,
            _hosted("write_back", page=16, **STORED),
        ),
    )
)

SPELLED = EngineConfig(skip_tokenizer_init=False, grammar_backend="xgrammar")
SPELLED_BOOTS = _named(
    Boot(name=name, why=why, checkpoint=checkpoint, spec=spec, engine=engine, since=V2)
    for name, why, checkpoint, spec, engine in (
        ("texts", "grammars and stop strings, a chain of three steps", CHECKPOINT, SpecConfig(), SPELLED),
        ("texts-tree", "the same, two candidates a step, two steps", CHECKPOINT, _tree(2, 2, 6), SPELLED),
        (
            "texts-thoughts",
            "grammars behind thoughts, a chain of three steps",
            CHECKPOINT,
            SpecConfig(),
            SPELLED.model_copy(update={"reasoning_parser": "qwen3"}),
        ),
    )
)

TWO_RANKS = EngineConfig(dp_size=2, tp_size=2, max_running_requests=4)
DP_BOOTS = _named(
    Boot(name=name, why=why, checkpoint=checkpoint, spec=spec, engine=engine, since=since)
    for name, why, checkpoint, spec, engine, since in (
        ("dp", "DP attention over two ranks", "qwen3-tiny", HEADS, TWO_RANKS, V2),
        ("dp-wide", "two ranks, a draft wider than its target", "qwen3-wide", HEADS, TWO_RANKS, V2),
        (
            "dp-apart",
            "two ranks, a head of its own, five steps, a pool that is outgrown",
            "qwen3-apart",
            HEADS_OF_FIVE,
            TWO_RANKS.model_copy(update=OUTGROWN),
            V2,
        ),
        (
            "dp-lm-head",
            "two ranks, each with logits of its own requests alone",
            "qwen3-tiny",
            HEADS,
            TWO_RANKS.model_copy(update={"enable_dp_lm_head": True}),
            V2,
        ),
        (
            "dp-layers",
            "two ranks, three MTP layers",
            "mtp-tiny",
            MTP,
            TWO_RANKS.model_copy(update={"radix_cache": False}),
            "0.5.17",
        ),
        (
            "dp-coordinated",
            "two ranks, one of which may verify beside the other's prefill",
            "qwen3-tiny",
            HEADS,
            TWO_RANKS.model_copy(update={"dp_spec_prefill_coordination": True}),
            "0.5.23",
        ),
    )
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
ADAPTIVE_BOOTS = _named(
    Boot(name=name, why=why, checkpoint=checkpoint, spec=spec, engine=engine, since="0.5.23")
    for name, why, checkpoint, spec, engine in (
        (
            "adaptive",
            "between none, one and three steps, or two and five from three requests on",
            CHECKPOINT,
            ADAPTIVE,
            PLAIN,
        ),
        (
            "adaptive-eagle3",
            "the same with an EAGLE-3 head, over pages of four tokens",
            "eagle3-tiny",
            ADAPTIVE.model_copy(update={"algorithm": "EAGLE3"}),
            _paged(4),
        ),
        ("adaptive-pool", "the first on a pool that a few requests outgrow", CHECKPOINT, ADAPTIVE, TIGHT),
    )
)

MIXED_ENGINE = EngineConfig(enable_mixed_chunk=True)
MIXED_BOOTS = _named(
    Boot(
        name=name,
        why=why,
        checkpoint=checkpoint,
        spec=spec,
        engine=MIXED_ENGINE.model_copy(update=engine),
        since=FIRST_MIXED,
    )
    for name, why, checkpoint, spec, engine in (
        ("mixed", "prompt chunks and running requests in one batch", CHECKPOINT, SpecConfig(), {}),
        (
            "mixed-eagle3",
            "the same with an EAGLE-3 head, over pages of four tokens",
            "eagle3-tiny",
            HEADS,
            {"page_size": 4},
        ),
        ("mixed-tree", "the same with two candidates a step", CHECKPOINT, _tree(2, 2, 6), {}),
        ("mixed-five", "the same with five steps, on a pool that is outgrown", "eagle-apart", _chain(5), OUTGROWN),
    )
)

TP = EngineConfig(tp_size=2, max_running_requests=4)
TP_BOOTS = _named(
    Boot(name=name, why=why, checkpoint=checkpoint, spec=spec, engine=TP.model_copy(update=engine), since=since)
    for name, why, checkpoint, spec, engine, since in (
        ("tp", "two TP ranks, a chain of three steps", CHECKPOINT, SpecConfig(), {}, V2),
        ("tp-eagle3", "two TP ranks, 432 of 512 tokens in the draft's head", "eagle3-tiny", HEADS, {}, V2),
        ("tp-tree", "two TP ranks, two candidates a step", CHECKPOINT, _tree(2, 2, 6), {}, V2),
        (
            "tp-pages",
            "two TP ranks, pages of four tokens, a pool that a few requests fill",
            CHECKPOINT,
            SpecConfig(),
            {"page_size": 4, "max_total_tokens": 160},
            V2,
        ),
        ("tp-latent", "two TP ranks, latent attention that every rank holds whole", "mla-tiny", SpecConfig(), {}, V2),
        ("tp-layers", "two TP ranks, three MTP layers", "mtp-tiny", MTP, {"radix_cache": False}, "0.5.17"),
        ("tp-four", "four TP ranks, a KV head each", "qwen3-four", HEADS, {"tp_size": 4}, V2),
        ("tp-below-dp", "two DP ranks of two TP ranks each", "qwen3-four", HEADS, {"tp_size": 4, "dp_size": 2}, V2),
        ("tp-five", "two TP ranks, five steps, a pool that is outgrown", CHECKPOINT, _chain(5), OUTGROWN, V2),
    )
)

#: Two of three tokens, in an order of their own.
HOT = tuple(token * 2 for token in range(171)) + tuple(511 - token * 2 for token in range(170))
HOT_BOOTS = _named(
    Boot(name=name, why=why, spec=spec.model_copy(update={"token_map": HOT}), engine=engine)
    for name, why, spec, engine in (
        ("hot-tokens", "a chain that proposes two of three tokens (FR-Spec)", SpecConfig(), PLAIN),
        ("hot-tree", "the same with two candidates a step, two steps", _tree(2, 2, 6), PLAIN),
        ("hot-five", "the first with five steps, on a pool that is outgrown", _chain(5), TIGHT),
    )
)

ADAPTED = EngineConfig(lora_paths=("first", "second"))
ADAPTER_BOOTS = _named(
    Boot(name=name, why=f"two LoRA adapters: {why}", checkpoint=checkpoint, spec=spec, engine=engine, since=FIRST_MIXED)
    for name, why, checkpoint, spec, engine in (
        ("lora", "a chain of three steps", CHECKPOINT, SpecConfig(), ADAPTED),
        ("lora-tree", "two candidates a step", CHECKPOINT, _tree(2, 2, 6), ADAPTED),
        (
            "lora-eagle3",
            "an EAGLE-3 head over pages",
            "eagle3-tiny",
            HEADS,
            ADAPTED.model_copy(update={"page_size": 4}),
        ),
        (
            "lora-five",
            "five steps, on a pool that is outgrown",
            CHECKPOINT,
            _chain(5),
            ADAPTED.model_copy(update=OUTGROWN),
        ),
    )
)

#: An update of the draft alone is one that opens a session.
FIRST_SESSIONS = "0.5.23"
DISK: Take = ("disk", "target")
WHOLE: Take = ("disk", "all")
TENSORS: tuple[Take, ...] = (("tensor", "target"), ("tensor", "draft"))
WEIGHT_BOOTS = _named(
    Boot(
        name=name,
        why=f"new weights while it serves: {why}",
        checkpoint=checkpoint,
        spec=spec,
        engine=engine,
        since=FIRST_SESSIONS,
        successor=successor,
        takes=takes,
    )
    for name, why, checkpoint, spec, engine, successor, takes in (
        ("weights", "an EAGLE-1 chain", CHECKPOINT, SpecConfig(), PLAIN, "eagle-next", (DISK, *TENSORS)),
        ("weights-eagle3", "an EAGLE-3 chain over pages", "eagle3-tiny", HEADS, _paged(4), "eagle3-next", TENSORS),
        ("weights-layers", "three MTP layers", "mtp-tiny", MTP, UNCACHED, "mtp-next", (WHOLE, ("tensor", "all"))),
        ("weights-latent", "a NextN layer", "mla-tiny", SpecConfig(), PLAIN, "mla-next", (WHOLE, *TENSORS)),
        ("weights-tp", "two TP ranks", CHECKPOINT, SpecConfig(), TP, "eagle-next", (DISK, *TENSORS)),
        ("weights-five", "five steps, on a pool that is outgrown", CHECKPOINT, _chain(5), TIGHT, "eagle-next", (DISK,)),
    )
)

#: Prefill and decode as two engines, with a pool that a few requests fill.
PAIR = EngineConfig(disaggregation=True, max_running_requests=4, max_total_tokens=160)
PD_BOOTS = _named(
    Boot(name=name, why=f"two engines, {why}", checkpoint=checkpoint, spec=spec, engine=engine, since=V2)
    for name, why, checkpoint, spec, engine in (
        ("pd", "a chain of three steps", CHECKPOINT, SpecConfig(), PAIR),
        ("pd-wide", "a draft wider than the target", "eagle3-wide", HEADS, PAIR),
        ("pd-tree", "two candidates a step", CHECKPOINT, _tree(2, 2, 6), PAIR),
        ("pd-pages", "pages of four tokens", CHECKPOINT, SpecConfig(), PAIR.model_copy(update={"page_size": 4})),
        ("pd-five", "five steps, a pair of which no two tensors are alike", "eagle-apart", _chain(5), PAIR),
    )
)
RANKED_FIVE = Boot(
    name="pd-ranks-five",
    why="the same with a head of its own, and five steps",
    checkpoint="qwen3-apart",
    spec=HEADS_OF_FIVE,
    engine=PAIR.model_copy(update={"dp_size": 2, "tp_size": 2}),
    since=V2,
)
RANKED_PAIR = Boot(
    name="pd-ranks",
    why="two engines, the decode side with DP attention over two ranks",
    checkpoint="qwen3-tiny",
    spec=HEADS,
    engine=PAIR.model_copy(update={"dp_size": 2, "tp_size": 2}),
    since=V2,
)
