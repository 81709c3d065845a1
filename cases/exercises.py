"""Short scenarios that give a mutant something to break, by what it needs; the first that shows it is enough.

Pure data; it must not know which mutants there are, and must not import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cases.fixed import CHECKPOINT, DRAIN, request, submit, tick
from harness.contract.types import EngineConfig, Op, RequestSpec, Scenario, SpecConfig

CHAIN = SpecConfig(k=3, t=1, n=4)
EAGLE3 = SpecConfig(algorithm="EAGLE3", k=3, t=1, n=4)
#: Without a prefix cache, whose last rows were written for another text (F-012).
MTP = SpecConfig(algorithm="MTP", k=3, n=4)
#: Two steps and not more: with three, SGLang's draft steps attend to their own branch instead of their parent's, which
#: is a finding of its own in every release.
TREE = SpecConfig(k=2, t=2, n=5)


def _exercise(
    name: str,
    requests: Sequence[RequestSpec],
    script: Sequence[Op],
    *,
    spec: SpecConfig = CHAIN,
    wants: Sequence[str] = (),
    checkpoint: str = CHECKPOINT,
    **engine: Any,
) -> Scenario:
    return Scenario(
        name=name,
        checkpoint=checkpoint,
        spec=spec,
        engine=EngineConfig(**engine),
        requests=tuple(requests),
        script=tuple(script),
        wants=tuple(wants),
    )


#: Prompts of 7 and 12 tokens.
_FIRST, _SECOND = request("a", 7, seed=11, new=7), request("b", 12, seed=21, new=11)


def _together(name: str, *, spec: SpecConfig = CHAIN, **engine: Any) -> Scenario:
    """Three requests of different lengths in one batch, which end one after another."""
    return _exercise(
        name,
        [_FIRST, _SECOND, request("c", 5, seed=22, new=14)],
        [submit("a", "b", "c"), DRAIN],
        spec=spec,
        wants=["batch_shrinks"],
        **engine,
    )


def _joined(name: str, *, spec: SpecConfig = CHAIN, **engine: Any) -> Scenario:
    """A fourth request that arrives while others run, takes over freed slots, and outlives them."""
    return _exercise(
        name,
        [_FIRST, _SECOND, request("d", 19, seed=23, new=12), request("e", 3, seed=24, new=16)],
        [submit("a", "b"), tick(3), submit("d"), tick(2), submit("e"), DRAIN],
        spec=spec,
        wants=["batch_grows"],
        **engine,
    )


_CHUNK = _exercise(
    "chunked",
    [request("a", 40, seed=31, new=8), request("b", 9, seed=32, new=8)],
    [submit("a", "b"), DRAIN],
    wants=["non_final_chunk"],
    chunk=16,
)

_RETRACTION = _exercise(
    "retracted",
    [request("a", 12, seed=33, new=14), request("b", 6, seed=34, new=14)],
    [submit("a", "b"), tick(4), Op(kind="retract"), DRAIN],
    wants=["retract_resume"],
)

_STOP = _exercise(
    "stopped",
    [request("a", 7, seed=11, new=16, stop_ids=(160,)), request("b", 12, seed=21, new=12)],  # 160: a's seventh token
    [submit("a", "b"), DRAIN],
    wants=["stop_inside_accepted_run"],
)

_SAMPLED = _exercise(
    "sampled",
    [
        request(rid, 5 + 2 * i, seed=41 + i, new=16).model_copy(update={"temperature": 1.0 - 0.2 * i})
        for i, rid in enumerate("abc")
    ],
    [submit("a", "b", "c"), DRAIN],
)

#: Rank 1 has a request, then none while rank 0 goes on.
_IDLE_BESIDE = _exercise(
    "idle-beside",
    [request("a", 7, seed=11, new=20), request("b", 12, seed=21, new=4, dp_rank=1)],
    [submit("a", "b"), DRAIN],
    spec=EAGLE3,
    wants=["idle_rank"],
    checkpoint="qwen3-tiny",
    dp=2,
    tp=2,
)

#: Need of a mutant -> what to drive, in this order.
EXERCISES: dict[str, tuple[Scenario, ...]] = {
    "chain": (_together("together"), _joined("joined")),
    "eagle3": (_together("together-eagle3", spec=EAGLE3, checkpoint="eagle3-tiny"),),
    "layers": (_together("together-layers", spec=MTP, checkpoint="mtp-tiny", prefix_cache=False),),
    "chained": (_together("together-chained", spec=MTP, checkpoint="mtp-chained", prefix_cache=False),),
    "chunk": (_CHUNK,),
    "retraction": (_RETRACTION,),
    "stop": (_STOP,),
    "pages": (_together("together-paged", page=16), _joined("joined-paged", page=16)),
    "paged-tree": (_together("together-paged-tree", spec=TREE, page=4),),
    "dp": (_IDLE_BESIDE,),
    "handoff": (_together("together-handed-over", pd=True, max_running=4, pool_tokens=160),),
    "sampled": (_SAMPLED,),
    "tree": (_together("together-tree", spec=TREE), _joined("joined-tree", spec=TREE)),
}
