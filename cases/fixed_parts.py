"""Fixed scenarios of any boot configuration: common shapes by its name, and what happens to a part of a batch only.

A part is taken back, aborted, or held; on a small pool, it runs out in one of them. To add one: a `program` in `parts`.
Pure data; it must not know which bugs exist, and must not import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from cases.boots import OUTGROWN, Boot
from cases.fixed import never, of_table, ops_of, requests_of
from harness.contract.scenario import Scenario
from harness.contract.script import Op

#: Whom SGLang's own switch for testing takes back.
SWITCH = Op(kind="retract", name="test")


def on_boot(boot: Boot, *, only: Sequence[str] = ()) -> list[Scenario]:
    """Every common batch shape on a boot, and a retraction; each named after the boot."""
    return of_table("shapes", "retracted", **boot.given, prefix=f"{boot.name}-", only=only)


def joining(boot: Boot) -> Scenario:
    """Two requests run while the prompt of a third arrives in chunks."""
    return of_table("mixed", **boot.given, prefix=f"{boot.name}-")[0]


def parts(boot: Boot, *, prefix: str = "", only: Sequence[str] = ()) -> list[Scenario]:
    """Each once; those for which the boot configuration has no pool or no prompts of its own are left out.

    Requests have each adapter in turn, and none, where there are any. Of several ranks the last has one more request.
    """
    made = boot.program(prefix)
    last = boot.engine.dp_size - 1
    more, also = (f", z 17@397 new=26 rank={last}", " z") if last else ("", "")

    def program(name: str, requests: str, *script: str | Op, **asked: Any) -> Scenario:
        turns = cycle((*boot.engine.lora_paths, None))
        each = [one.model_copy(update={"lora_path": next(turns)}) for one in requests_of(requests)]
        ops = [op for part in script for op in ([part] if isinstance(part, Op) else ops_of(part))]
        return made(name, each, ops, **asked)

    three = f"a 19@301 new=20, b 12@302 new=21, c 5@303 new=22{more}"
    back = "partial_retraction retract_resume"
    switched = (f"submit a b{also}; step 2; submit c; step 4", SWITCH, "step 4", SWITCH)
    every = [
        program("some-taken-back", three, f"submit a b c{also}; step 4; retract b", wants=back),
        program("switch-takes-back", three, *switched, wants=back),
        program("some-aborted", three, f"submit a b c{also}; step 4; abort b", wants="abort_of_some"),
    ]
    if not boot.engine.disaggregation:
        script = "submit b; step 2; submit a; step 2; pause; step 2; resume"
        every.append(
            program("held-in-chunk", "b 6@312 new=23, a 50@311 new=9", script, wants="pause_in_chunk", chunk=16)
        )
    if boot.engine.max_total_tokens == OUTGROWN["max_total_tokens"]:
        # Room for all that it may generate is kept for a request that nothing can stop, and for one that is let in. So
        # two prompts leave little more than that: both are in before the first decode, and outgrow the pool even if one
        # of them accepts six tokens a verify while the other accepts one. A third comes in as soon as the release lets.
        stop = f"stop={never(boot.checkpoint)}"
        long = f"a 36@321 new=70 {stop}, b 31@322 new=71 {stop}, c 9@323 new=40 {stop}{more}"
        out = "pool_exhausted partial_retraction"
        every.append(program("pool-runs-out", long, f"submit a b c{also}", wants=out))
    by_name = {scenario.name.removeprefix(prefix): scenario for scenario in every}
    return [by_name[name] for name in only] if only else every
