"""Pipeline parallel and speculation: SGLang alone with two stages, on two GPUs or a CPU, beside itself with one.

    .venv/bin/python -m benchmarks.pipeline [--engine 0.5.23] [--device cpu] [--graphs] [--seconds 250]

No gate and no probe, since stages are ranks that nothing here joins. Texts must be equal; a wrong draft shows as more
verifies of a request. With stages SGLang's first verify of a request has nothing drafted (`PPSpecRelayInput`), so what
it needs is one more than one stage needs for the text from its second token on. Exits 1 if any differs, 3 if SGLang
does not run. Requests alone, then all together: there the batches of stages are smaller than one engine's, so that a
near tie may be decided otherwise.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._bench import ended
from cases.families import FAMILIES
from cases.fixed import DRAIN, submit
from harness.both_sides import leases
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig
from harness.driving.pairs import checkpoint_pairs
from harness.engines import envs
from harness.engines.bare import Bare, run_bare
from harness.engines.launch import CORES, NO_MULTICAST, build_launch

#: SGLang's own switch; without it, it takes a pipeline on a prefill side alone.
SWITCH = {"SGLANG_ENABLE_PP_SPEC": "1", **NO_MULTICAST}
#: On a CPU each stage takes a core, and no NCCL of a CUDA build of torch is found.
ON_A_CPU = {CORES: "|".join(map(str, sorted(os.sched_getaffinity(0))[:2])), "SGLANG_NCCL_SO_PATH": os.devnull}
#: Prompts, each asked twice.
MOST = 4
#: Lines of the log of an engine that gave no answer, where its threads were among them.
SAID = 400


def asked(graphs: bool) -> Scenario:
    """The prompts of the trained EAGLE pair: each alone, then all at once."""
    own = [one for one in FAMILIES["trained"].scenarios if one.checkpoint == "trained-eagle1"]
    prompts = list({one.input_ids: one for scenario in own for one in scenario.requests}.values())[:MOST]
    alone = [one.model_copy(update={"rid": f"alone{place}"}) for place, one in enumerate(prompts)]
    together = [one.model_copy(update={"rid": f"together{place}"}) for place, one in enumerate(prompts)]
    ops = [op for one in alone for op in (submit(one.rid), Op(kind="flush"))]
    return own[0].model_copy(
        update={
            "requests": (*alone, *together),
            "script": (*ops, submit(*(one.rid for one in together)), DRAIN),
            "engine": EngineConfig(overlap_schedule=False, cuda_graph=graphs),
            "wants": (),
        }
    )


def begun(scenario: Scenario, texts: Sequence[Sequence[int]]) -> Scenario:
    """The same, each request with the first token of its text behind its prompt."""
    requests = (
        one.model_copy(update={"input_ids": (*one.input_ids, text[0]), "max_new_tokens": one.max_new_tokens - 1})
        for one, text in zip(scenario.requests, texts, strict=True)
    )
    return scenario.model_copy(update={"requests": tuple(requests)})


def fared(scenario: Scenario, *, version: str, device: str, stages: int, seconds: float) -> Bare:
    """How SGLang fares with so many stages; after so long it says where its threads are, and is ended."""
    target, draft = checkpoint_pairs([scenario], device=device)[scenario.checkpoint]
    env, engine = envs.ensure(version, print), scenario.engine
    launch = build_launch(
        env=env,
        spec=scenario.spec,
        engine=engine,
        target=target,
        draft=draft,
        device=device,
        lease=leases.request() if device == "cuda" else None,
    )
    own = {
        "environment": SWITCH | (ON_A_CPU if device == "cpu" and stages > 1 else {}),
        "arguments": {"pp_size": stages, "watchdog_timeout": 2 * seconds},
    }
    launch = replace(launch, boot=launch.boot | {name: launch.boot[name] | more for name, more in own.items()})
    with tempfile.TemporaryDirectory(prefix="eaglecheck-pipeline-") as folder:
        found = run_bare(launch, scenario, folder=Path(folder), seconds=seconds)
        if found.texts is None:
            print(*Path(folder, "bare.log").read_text(errors="replace").splitlines()[-SAID:], sep="\n")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="0.5.23")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--seconds", type=float, default=250.0, help="for each of two boots, one after the other")
    args = parser.parse_args()
    scenario = asked(args.graphs)
    common: dict[str, Any] = {"version": args.engine, "device": args.device, "seconds": args.seconds}
    with ThreadPoolExecutor() as side_by_side:
        two, one = side_by_side.map(lambda stages: fared(scenario, stages=stages, **common), (2, 1))
    later = one if one.texts is None else fared(begun(scenario, one.texts), stages=1, **common)
    if two.texts is None or one.texts is None or later.texts is None:
        print(f"no verdict: two stages {two.why or 'ran'} {two.sites}; one {one.why or later.why or 'ran'}")
        return 3
    expected = tuple(1 + (count or 0) for count in later.verifies)
    print(f"SGLang {args.engine}, {len(one.texts)} requests, {sum(map(len, one.texts))} tokens")
    print(f"texts equal: {sum(a == b for a, b in zip(one.texts, two.texts, strict=True))}")
    print(f"verifies, one stage: {one.verifies}\nexpected of two: {expected}\nverifies, two stages: {two.verifies}")
    return int(one.texts != two.texts or expected != two.verifies)


if __name__ == "__main__":
    ended(main)
