"""Leases on a real card: what an engine uses of its share, who is foreign, how soon a killed engine's share is free.

    python -m benchmarks.gpu_leases --engine 0.5.13 [--scenario single] [--share 4]

Prints one line a step and ends with 1 if any step is not as it should be. It starts at most two engines and one process
that holds a gigabyte of the card, and ends them all.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from harness.both_sides import gpus, leases
from harness.cli.programs import choose_scenarios
from harness.driving.live import LiveEngines
from harness.engines import envs

FOREIGN = "import torch, time; x = torch.zeros(2**28, device='cuda'); print('there', flush=True); time.sleep(600)"


class Steps:
    """Prints each step with the time it took; remembers whether all were as they should be."""

    def __init__(self) -> None:
        self.right = True
        self._last = time.monotonic()

    def __call__(self, what: str, right: bool, detail: object = "") -> None:
        now = time.monotonic()
        self.right &= right
        print(f"{'ok   ' if right else 'WRONG'} {now - self._last:6.1f} s  {what}: {detail}", flush=True)
        self._last = now


@contextmanager
def foreign_process() -> Iterator[int]:
    """A process of nobody's engine that computes on the card, once it is there."""
    with subprocess.Popen(
        [sys.executable, "-c", FOREIGN], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def refused(asked: leases.Request) -> str:
    """What is said when there is no lease; empty if there was one."""
    try:
        os.close(leases.take(asked, say=lambda _text: None).lock)
    except gpus.CardError as error:
        return str(error)
    return ""


def until(true: Callable[[], bool], *, within: float) -> float:
    """Seconds until it was true; infinite if it was not in time."""
    start = time.monotonic()
    while not true():
        if time.monotonic() - start > within:
            return float("inf")
        time.sleep(0.05)
    return time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default=envs.NEWEST)
    parser.add_argument("--scenario", default="single")
    parser.add_argument("--share", type=float)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    (scenario,) = choose_scenarios([given.scenario], [])
    asked = leases.request(given.share)
    once = replace(asked, wait=0.0)
    step, logs = Steps(), Path(tempfile.mkdtemp(prefix="eaglecheck-leases-"))

    def engines(name: str) -> LiveEngines:
        environment = envs.ensure(envs.resolve(given.engine), print)
        return LiveEngines(
            environment=lambda _version: environment,
            default=environment.version,
            device=given.device,
            logs=logs / name,
            lease=asked,
        )

    first, second = engines("first"), engines("second")
    try:
        step("cards", leases.open_count(asked) > 0, "; ".join(leases.describe(asked)))
        one = first.use(first.launch(scenario))
        step("an engine says what it has", one.lease.get("used_mib") is not None, one.lease)
        used = one.lease.get("used_mib") or 0
        step("and keeps to its share", 0 < used <= asked.share, f"{used} of {asked.share} MiB")
        two = second.use(second.launch(scenario))
        step("a second one shares the card", two.lease["slot"] != one.lease["slot"], "; ".join(leases.describe(asked)))
        verdict = second.judge(
            scenario, second.drive(second.launch(scenario), scenario), release=given.engine, revert=None
        )
        step("and is judged there", True, verdict)
        with foreign_process() as pid:
            said = refused(once)
            step("a foreign process is named", f"process {pid} " in said, said.splitlines()[:1])
        gone = until(lambda: pid not in {app.pid for app in gpus.read_apps()}, within=30)
        step("it is off the card after its end", gone < leases.ENDING_SECONDS, f"{gone:.2f} s")
        assert one.process is not None
        host = one.process.pid
        os.kill(host, signal.SIGKILL)
        freed = until(
            lambda: all(holder.pid != host for state in leases.states(asked) for holder in state.holders), within=30
        )
        step("a killed engine's lease is free", freed < leases.ENDING_SECONDS, f"{freed:.2f} s")
        again = first.use(first.launch(scenario))
        step("and the next engine gets one", bool(again.lease), again.lease)
    finally:
        first.close()
        second.close()
    left = until(lambda: not any(state.holders for state in leases.states(asked)), within=30)
    step("nothing is left", left < leases.ENDING_SECONDS, "; ".join(leases.describe(asked)))
    print(f"{'as it should be' if step.right else 'NOT as it should be'}; engine logs: {logs}")
    return 0 if step.right else 1


if __name__ == "__main__":
    sys.exit(main())
