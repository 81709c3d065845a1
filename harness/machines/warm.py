"""Boots every release once on the card, side by side, so that the kernels it compiles at first use are there.

It is also the proof that a release runs: a few EAGLE tokens, unedited, before any harness is involved. This module must
not judge what was generated.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.archive.faults import home_room
from harness.both_sides import leases
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig, SpecConfig
from harness.driving.plan import Setup
from harness.engines import dependencies, envs
from harness.engines.bare import Bare, Running, started
from harness.engines.dependencies import EnvError, Progress
from harness.engines.log_excerpt import excerpt

CHECKPOINT = "eagle-head64"
SECONDS = 400  # a boot takes about 60 s, and its kernels as long again where nothing is compiled yet
NEW_TOKENS = 24
PROMPTS = {"short": (7, 11, 13, 17, 19, 23), "long": tuple(range(40, 110))}
TAIL_LINES = 12
#: Kernels depend on the dtype; the rest so that a chain under graphs and an eager tree have run once.
VARIANTS = (("float16", 1, True), ("bfloat16", 4, False))


def warm(versions: Sequence[str], *, progress: Progress) -> tuple[Bare, ...]:
    """Boot each release in each variant, all at once; how each fared. EnvError with the end of its log."""
    progress(
        f"booting {len(versions) * len(VARIANTS)} engines at once, so that their kernels are compiled (1 to 3 min)"
    )
    start, answers, failed = time.monotonic(), list[Bare](), dict[str, Running]()
    with contextlib.ExitStack() as stack:
        with home_room(logs := dependencies.home() / "logs"):
            boots = {
                f"SGLang {version} {dtype} topk {topk} {'graphs' if graphs else 'eager'}": stack.enter_context(
                    _started(version, logs / f"warm-{version}-{dtype}", dtype=dtype, topk=topk, graphs=graphs)
                )
                for version in versions
                for dtype, topk, graphs in VARIANTS
            }
        for name, boot in boots.items():
            answers.append(boot.result(max(0.0, start + SECONDS - time.monotonic())))
            failed |= {name: boot} if answers[-1].texts is None else {}
            progress(f"{name}: {f'did not run, see {boot.log}' if name in failed else _summary(answers[-1])}")
    progress(f"warm after {time.monotonic() - start:.0f} s")
    if failed:
        log = next(iter(failed.values())).log
        tail = "\n    ".join(excerpt(log, most=TAIL_LINES).lines)
        raise EnvError(
            f"{', '.join(failed)} did not run; the log of the first ends:\n    {tail}",
            next_step=f"read it:  less {shlex.quote(str(log))}",
        )
    return tuple(answers)


def _started(
    version: str, folder: Path, *, dtype: Any, topk: int, graphs: bool
) -> contextlib.AbstractContextManager[Running]:
    from cases import checkpoints

    requests = tuple(RequestSpec(rid=rid, input_ids=ids, max_new_tokens=NEW_TOKENS) for rid, ids in PROMPTS.items())
    scenario = Scenario(
        name="warm",
        checkpoint=CHECKPOINT,
        spec=SpecConfig(num_steps=3, eagle_topk=topk, num_draft_tokens=4 if topk == 1 else 8),
        engine=EngineConfig(dtype=dtype, cuda_graph=graphs),
        requests=requests,
        script=(Op(kind="submit", rids=tuple(PROMPTS)), Op(kind="drain")),
    )
    pair = checkpoints.make(CHECKPOINT, dependencies.home() / "checkpoints")
    launch = Setup(release=version, device="cuda").launch(
        scenario,
        env=envs.state(version),
        folders=(pair.target, pair.draft),
        own=None,
        lease=leases.request(),
        probe=False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    return started(launch, scenario, folder=folder)


def _summary(found: Bare) -> str:
    tokens, rounds = sum(map(len, found.texts or ())), sum(count or 0 for count in found.verifies)
    took = found.took
    return f"imported in {took['import']:.0f} s, booted in {took['boot']:.0f} s, {tokens} tokens in {rounds} rounds"
