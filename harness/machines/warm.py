"""Boots every release once on the card, side by side, so that the kernels it compiles at first use are there.

It is also the proof that a release runs: a few EAGLE tokens, unedited, before any harness is involved. This module must
not judge what was generated.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.both_sides.port_leases import Ports, take_ports
from harness.contract.scenario import EngineConfig, SpecConfig
from harness.engines import closure, envs
from harness.engines.closure import EnvError, Progress
from harness.engines.launch import build_launch

ENGINE = Path(__file__).parents[1] / "engine_side" / "host" / "warm_engine.py"
CHECKPOINT = "eagle-head64"
MARK = "eaglecheck-warm "
SECONDS = 400  # a boot takes about 60 s, and its kernels as long again where nothing is compiled yet
NEW_TOKENS = 24
PROMPTS = ([7, 11, 13, 17, 19, 23], list(range(40, 110)))
TAIL_LINES = 12
#: Kernels depend on the dtype; the rest so that a chain under graphs and an eager tree have run once.
VARIANTS = (("float16", 1, True), ("bfloat16", 4, False))


@dataclass(slots=True, kw_only=True)
class _Boot:
    version: str
    name: str
    log: Path
    process: subprocess.Popen[bytes]
    ports: Ports


def warm(versions: Sequence[str], *, progress: Progress) -> tuple[dict[str, Any], ...]:
    """Boot each release in each variant, all at once; what each said of itself. EnvError with the end of its log."""
    progress(
        f"booting {len(versions) * len(VARIANTS)} engines at once, so that their kernels are compiled (1 to 3 min)"
    )
    start = time.monotonic()
    boots: list[_Boot] = []
    try:
        for version in versions:
            for dtype, topk, graphs in VARIANTS:
                boots.append(_start(version, dtype=dtype, topk=topk, graphs=graphs))
        answers, failed = [], []
        for boot in boots:
            answer = _await(boot, deadline=start + SECONDS)
            progress(f"{boot.name}: {_summary(answer)}" if answer else f"{boot.name}: did not run, see {boot.log}")
            (answers.append(answer) if answer else failed.append(boot))
    finally:
        for boot in boots:
            _end(boot)
    progress(f"warm after {time.monotonic() - start:.0f} s")
    if failed:
        tail = "\n    ".join(failed[0].log.read_text(errors="replace").strip().splitlines()[-TAIL_LINES:])
        raise EnvError(
            f"{', '.join(boot.name for boot in failed)} did not run; the log of the first ends:\n    {tail}",
            next_step=f"read it:  less {failed[0].log}",
        )
    return tuple(answers)


def _start(version: str, *, dtype: Any, topk: int, graphs: bool) -> _Boot:
    from cases import checkpoints

    env = envs.state(version)
    pair = checkpoints.make(CHECKPOINT, closure.home() / "checkpoints")
    launch = build_launch(
        env=env,
        spec=SpecConfig(num_steps=3, eagle_topk=topk, num_draft_tokens=4 if topk == 1 else 8),
        engine=EngineConfig(dtype=dtype, cuda_graph=graphs),
        target=pair.target,
        draft=pair.draft,
        device="cuda",
        probe=False,
    )
    name = f"SGLang {version} {dtype} topk {topk} {'graphs' if graphs else 'eager'}"
    ports = take_ports()
    asked = {
        "arguments": launch.boot["arguments"],
        "optional_arguments": launch.boot["optional_arguments"] | ports.arguments,
        "prompts": PROMPTS,
        "new_tokens": NEW_TOKENS,
        "mark": MARK,
    }
    log = closure.home() / "logs" / f"warm-{version}-{dtype}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(str(part) for part in launch.pythonpath)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(launch.python), "-P", str(ENGINE), json.dumps(asked)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={
                **os.environ,
                **launch.boot["environment"],
                **ports.environment,
                "PYTHONPATH": path,
                "PYTHONUNBUFFERED": "1",
            },
            cwd=log.parent,
            start_new_session=True,
        )
    return _Boot(version=version, name=name, log=log, process=process, ports=ports)


def _await(boot: _Boot, *, deadline: float) -> dict[str, Any] | None:
    """What the engine said of itself once it has ended; None where it failed or took too long."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        boot.process.wait(timeout=max(0.0, deadline - time.monotonic()))
    lines = boot.log.read_text(errors="replace").splitlines()
    said = next((line.removeprefix(MARK) for line in lines if line.startswith(MARK)), None)
    return json.loads(said) if said else None


def _summary(answer: dict[str, Any]) -> str:
    return (
        f"imported in {answer['import_s']:.0f} s, booted in {answer['boot_s']:.0f} s, "
        f"{sum(answer['tokens'])} tokens in {sum(answer['rounds'])} rounds"
    )


def _end(boot: _Boot) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(boot.process.pid, signal.SIGKILL)
    boot.process.wait()
    os.close(boot.ports.lock)


def main(versions: Sequence[str]) -> int:
    """`python -m harness.machines.warm VERSION…`: 0, or 3 where an engine did not run."""
    try:
        answers = warm(versions, progress=lambda line: print(line, file=sys.stderr, flush=True))
    except EnvError as error:
        print(f"eaglecheck: {error}", file=sys.stderr)
        return 3
    print(json.dumps(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
