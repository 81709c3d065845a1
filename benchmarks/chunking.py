"""What chunking costs on this device: the prefill of one 100-token prompt, whole and in chunks of 32.

    .venv/bin/python -m benchmarks.chunking [--engine 0.5.23] [--repeats 20]

Takes the turns until the first decode round as the prefill. Prints the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

from benchmarks._bench import booted, machine
from cases.fixed import DRAIN, request, submit
from harness.contract.types import EngineConfig, Scenario
from harness.driving.drive import drive
from harness.engines.engine import Engine
from harness.engines.envs import NEWEST

LIMIT = 1.5  # what the project promises


def prefill_seconds(engine: Engine, *, chunk: int | None) -> float:
    """Time until every chunk was prefilled, for a prompt that no earlier run has left in the cache."""
    scenario = Scenario(
        name="prefill",
        engine=EngineConfig(chunk=chunk),
        requests=(request("a", 100, seed=31, new=1),),
        script=(submit("a"), DRAIN),
    )
    times: list[float] = []
    start = time.perf_counter()
    drive(engine, scenario, record=False, on_turn=lambda _tick, _state: times.append(time.perf_counter()))
    turns = 1 if chunk is None else -(-100 // chunk)
    return times[turns - 1] - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default=NEWEST)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    sample = Scenario(name="boot", requests=(request("a", 4, seed=1),), script=(submit("a"), DRAIN))
    whole: list[float] = []
    chunked: list[float] = []
    with booted(sample, version=options.engine, probe=False) as engine:
        for _ in range(options.repeats + 2):
            whole.append(prefill_seconds(engine, chunk=None))
            chunked.append(prefill_seconds(engine, chunk=32))
    middle_whole, middle_chunked = statistics.median(whole[2:]), statistics.median(chunked[2:])
    print(f"\nSGLang {options.engine}, 100-token prompt, {options.repeats} repeats; {machine()}")
    print(f"whole            {middle_whole * 1000:8.1f} ms")
    ratio = middle_chunked / middle_whole
    print(f"in chunks of 32  {middle_chunked * 1000:8.1f} ms   ratio {ratio:.2f} (limit {LIMIT})")


if __name__ == "__main__":
    main()
