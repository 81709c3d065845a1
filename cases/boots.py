"""Boot configurations that generated scenarios run on: a short fixed list, since a reboot is what costs.

Pure data; it must not draw anything and must not import Hypothesis or torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from packaging.version import Version

from cases.fixed import CHECKPOINT
from harness.contract.known_issues import assumable
from harness.contract.types import EngineConfig, Op, RequestSpec, Scenario, SpecConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """One boot configuration, what it is for, and the oldest release it works on."""

    name: str
    why: str
    checkpoint: str = CHECKPOINT
    spec: SpecConfig = field(default_factory=SpecConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    since: str = "0"

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
            requests=(RequestSpec(rid="x", prompt=(1,)),),
            script=(Op(kind="submit", rids=("x",)), Op(kind="drain")),
        ).boot_key()


def _by_name(*boots: Boot) -> dict[str, Boot]:
    return {boot.name: boot for boot in boots}


BOOTS = _by_name(
    Boot(name="plain", why="the default chain: three steps, pages of one token, prefix cache"),
    Boot(name="pages", why="pages of four tokens", engine=EngineConfig(page=4)),
    Boot(name="small-pool", why="a pool that a few requests fill", engine=EngineConfig(pool_tokens=160)),
    Boot(
        name="no-cache",
        why="no prefix cache, two steps",
        spec=SpecConfig(k=2, n=3),
        engine=EngineConfig(prefix_cache=False),
    ),
    Boot(
        name="long-draft",
        why="five steps, two requests at a time",
        spec=SpecConfig(k=5, n=6),
        engine=EngineConfig(max_running=2),
    ),
    Boot(name="one-step", why="a draft of one token", spec=SpecConfig(k=1, n=2)),
)
MTP = SpecConfig(algorithm="MTP", k=3, n=4)
#: Multi-layer MTP: before 0.5.17 the worker runs neither eagerly nor in CUDA graphs without a known issue.
LAYERED = _by_name(
    Boot(
        name="layers",
        why="three MTP layers, no prefix cache",
        checkpoint="mtp-tiny",
        spec=MTP,
        engine=EngineConfig(prefix_cache=False),
        since="0.5.17",
    ),
    Boot(
        name="layers-cache",
        why="three MTP layers with the prefix cache",
        checkpoint="mtp-tiny",
        spec=MTP,
        since="0.5.17",
    ),
    Boot(
        name="layers-pages",
        why="two MTP layers, pages of four tokens",
        checkpoint="mtp-tiny",
        spec=SpecConfig(algorithm="MTP", k=2, n=3),
        engine=EngineConfig(page=4, prefix_cache=False),
        since="0.5.17",
    ),
    # No prefix cache: what it hands out is predicted only in part where layers read each other's output
    # (docs/evidence/families.md).
    Boot(
        name="layers-chained",
        why="three MTP layers, each of which reads the output of the one before, behind 45 target layers",
        checkpoint="mtp-chained",
        spec=MTP,
        engine=EngineConfig(prefix_cache=False),
        since="0.5.17",
    ),
)
#: Trees are apart: until 0.5.12.post1 they need the v1 worker, and from three steps on every release deviates.
TREES = _by_name(
    Boot(
        name="tree",
        why="two candidates a step, three steps, six nodes",
        spec=SpecConfig(k=3, t=2, n=6),
        since="0.5.13",
    ),
    Boot(
        name="wide-tree",
        why="four candidates a step, three steps",
        spec=SpecConfig(k=3, t=4, n=8),
        since="0.5.13",
    ),
    Boot(
        name="small-tree",
        why="two steps, all but a few nodes left out",
        spec=SpecConfig(k=2, t=2, n=3),
        since="0.5.13",
    ),
    Boot(name="full-tree", why="two steps, every node kept", spec=SpecConfig(k=2, t=2, n=7), since="0.5.13"),
    Boot(name="widest-tree", why="eight candidates a step, 16 nodes", spec=SpecConfig(k=2, t=8, n=16), since="0.5.13"),
    Boot(
        name="deep-tree",
        why="five steps, ten nodes",
        spec=SpecConfig(k=5, t=2, n=10),
        since="0.5.13",
    ),
)
_PAGED_TREE = SpecConfig(k=2, t=2, n=6)
PAGES = _by_name(
    Boot(name="pages-16", why="pages of 16 tokens", engine=EngineConfig(page=16)),
    Boot(name="pages-64", why="pages of 64 tokens", engine=EngineConfig(page=64)),
    Boot(
        name="pages-4-tree",
        why="pages of four tokens, two candidates a step: branches begin on pages of their own",
        spec=_PAGED_TREE,
        engine=EngineConfig(page=4),
        since="0.5.13",
    ),
    Boot(
        name="pages-16-tree",
        why="pages of 16 tokens, two candidates a step",
        spec=_PAGED_TREE,
        engine=EngineConfig(page=16),
        since="0.5.13",
    ),
)
_EAGLE3 = SpecConfig(algorithm="EAGLE3", k=3, t=1, n=4)
EAGLE3_BOOTS = _by_name(
    Boot(name="eagle3", why="three features by default, 432 of 512 tokens", checkpoint="eagle3-tiny", spec=_EAGLE3),
    Boot(
        name="eagle3-two",
        why="two features by name, the whole vocabulary, pages of four tokens",
        checkpoint="eagle3-two",
        spec=_EAGLE3,
        engine=EngineConfig(page=4),
        since="0.5.12",
    ),
    Boot(
        name="eagle3-wide",
        why="one feature, a draft wider than the target, five steps",
        checkpoint="eagle3-wide",
        spec=SpecConfig(algorithm="EAGLE3", k=5, t=1, n=6),
        since="0.5.12",
    ),
    Boot(
        name="eagle3-tree",
        why="trees of two candidates a step over a smaller vocabulary",
        checkpoint="eagle3-tiny",
        spec=SpecConfig(algorithm="EAGLE3", k=2, t=2, n=6),
        since="0.5.13",
    ),
)
#: Latent attention, with the NextN layer as the draft.
LATENT = _by_name(
    Boot(name="latent", why="latents in the cache, a chain of three steps", checkpoint="mla-tiny"),
    Boot(
        name="latent-pages",
        why="latents over pages of four tokens",
        checkpoint="mla-tiny",
        engine=EngineConfig(page=4),
    ),
    Boot(
        name="latent-tree",
        why="latents, two candidates a step, two steps",
        checkpoint="mla-tiny",
        spec=SpecConfig(k=2, t=2, n=6),
        since="0.5.13",
    ),
)

_TWO_RANKS = EngineConfig(dp=2, tp=2, max_running=4)
DP_BOOTS = _by_name(
    Boot(
        name="dp",
        why="DP attention over two ranks",
        checkpoint="qwen3-tiny",
        spec=_EAGLE3,
        engine=_TWO_RANKS,
        since="0.5.13",
    ),
    Boot(
        name="dp-wide",
        why="two ranks, a draft wider than its target",
        checkpoint="qwen3-wide",
        spec=_EAGLE3,
        engine=_TWO_RANKS,
        since="0.5.13",
    ),
)

#: Prefill and decode as two engines, with a pool that a few requests fill.
PAIR = EngineConfig(pd=True, max_running=4, pool_tokens=160)
PD_BOOTS = _by_name(
    Boot(name="pd", why="two engines, a chain of three steps", engine=PAIR, since="0.5.13"),
    Boot(
        name="pd-wide",
        why="two engines, a draft wider than its target",
        checkpoint="eagle3-wide",
        spec=_EAGLE3,
        engine=PAIR,
        since="0.5.13",
    ),
    Boot(
        name="pd-tree",
        why="two engines, two candidates a step",
        spec=SpecConfig(k=2, t=2, n=6),
        engine=PAIR,
        since="0.5.13",
    ),
    Boot(
        name="pd-pages",
        why="two engines, pages of four tokens",
        engine=PAIR.model_copy(update={"page": 4}),
        since="0.5.13",
    ),
)
RANKED_PAIR = Boot(
    name="pd-ranks",
    why="two engines, the decode side with DP attention over two ranks",
    checkpoint="qwen3-tiny",
    spec=_EAGLE3,
    engine=PAIR.model_copy(update={"dp": 2, "tp": 2}),
    since="0.5.13",
)
