"""The fixed scenarios in which something happens to a part of a batch only: taken back, aborted, or held.

On a small pool, it runs out in one of them. To add one: a `program` in `parts`. Pure data; it must not know which bugs
exist, and must not import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from cases.boots import OUTGROWN, Boot
from cases.fixed import DRAIN, abort, chosen, never, request, steps, submit
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op


def retract(*rids: str) -> Op:
    """Some of those that run; none named: whom SGLang's own switch for testing takes."""
    return Op(kind="retract", rids=rids, name=None if rids else "test")


def parts(boot: Boot, *, prefix: str = "", only: Sequence[str] = ()) -> list[Scenario]:
    """Each once; those for which the boot configuration has no pool or no prompts of its own are left out."""
    made = boot.program(prefix)

    def program(name: str, requests: Sequence[RequestSpec], *rest: Any, **more: Any) -> Scenario:
        """Requests with each adapter in turn, and with none, where there are any."""
        turns = cycle((*boot.engine.lora_paths, None))
        return made(name, [one.model_copy(update={"lora_path": next(turns)}) for one in requests], *rest, **more)

    last = boot.engine.dp_size - 1
    beside = [request("z", 17, seed=397, new=26, dp_rank=last)] * (last > 0)
    also = [one.rid for one in beside]
    three = [request(rid, 19 - 7 * i, seed=301 + i, new=20 + i) for i, rid in enumerate("abc")]
    every = [
        program(
            "some-taken-back",
            [*three, *beside],
            [submit(*"abc", *also), steps(4), retract("b"), DRAIN],
            wants=["partial_retraction", "retract_resume"],
        ),
        program(
            "switch-takes-back",
            [*three, *beside],
            [submit("a", "b", *also), steps(2), submit("c"), steps(4), retract(), steps(4), retract(), DRAIN],
            wants=["partial_retraction", "retract_resume"],
        ),
        program(
            "some-aborted",
            [*three, *beside],
            [submit(*"abc", *also), steps(4), abort("b"), DRAIN],
            wants=["abort_of_some"],
        ),
    ]
    if not boot.engine.disaggregation:
        half_read, busy = request("a", 50, seed=311, new=9), request("b", 6, seed=312, new=23)
        every.append(
            program(
                "held-in-chunk",
                [busy, half_read],
                [submit("b"), steps(2), submit("a"), steps(2), Op(kind="pause"), steps(2), Op(kind="resume"), DRAIN],
                wants=["pause_in_chunk"],
                chunk=16,
            )
        )
    if boot.engine.max_total_tokens == OUTGROWN["max_total_tokens"]:
        # Room for all that it may generate is kept for a request that nothing can stop, and for one that is let in. So
        # two prompts leave little more than that: both are in before the first decode, and outgrow the pool even if one
        # of them accepts six tokens a verify while the other accepts one. A third comes in as soon as the release lets.
        long = [
            request(rid, length, seed=321 + i, new=new, stop_ids=(never(boot.checkpoint),))
            for i, (rid, length, new) in enumerate((("a", 36, 70), ("b", 31, 71), ("c", 9, 40)))
        ]
        every.append(
            program(
                "pool-runs-out",
                [*long, *beside],
                [submit(*"abc", *also), DRAIN],
                wants=["pool_exhausted", "partial_retraction"],
            )
        )
    return chosen(every, prefix=prefix, only=only)
