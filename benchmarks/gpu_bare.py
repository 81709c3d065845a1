"""A scenario's requests on SGLang with nothing of ours in it: is it the harness that makes an engine crash?

    python -m benchmarks.gpu_bare --engines 0.5.12.post1,0.5.13 --scenario-file FILE --out FOLDER [--jobs 2]

All requests at once, or those between two `flush` of its script, without gate and probe. Logs go to --out; one line a
release comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._bench import launch_of
from harness.contract.types import Scenario
from harness.engines.process import Launch
from harness.engines.processes import end_group

#: What a log is searched for where nothing came back.
TROUBLE = ("illegal memory access", "device-side assert", "CUDA error", "Error:", "Killed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """How SGLang alone fared: texts by request, or None and the lines of its log that say why.

    verifies: how many verify rounds SGLang counted for each request; wrong drafts show there, not in texts.
    """

    release: str
    seconds: float
    booted: bool
    texts: list[list[int]] | None
    why: tuple[str, ...] = ()
    verifies: list[int | None] | None = None

    def __str__(self) -> str:
        came = f"all texts came back, verifies {self.verifies}"
        what = came if self.texts is not None else f"ENDED {'after' if self.booted else 'in'} its boot"
        return f"{self.release:14} {what} ({self.seconds:.0f} s)" + "".join(f"\n    {line[:170]}" for line in self.why)


def waves(scenario: Scenario) -> list[int]:
    """How many of its requests come between two flushes of the script."""
    found = [0]
    for op in scenario.script:
        found[-1] += len(op.rids) if op.kind == "submit" else 0
        if op.kind == "flush":
            found.append(0)
    return [count for count in found if count]


def run(launch: Launch, scenario: Scenario, *, out: Path, seconds: float) -> Bare:
    """Start it, wait at most `seconds`, and end what it started."""
    release = str(launch.boot["release"])
    given = {
        "environment": launch.boot["environment"],
        "arguments": launch.boot["arguments"],
        "optional": launch.boot["optional_arguments"],
        "waves": waves(scenario),
        "prompts": [list(request.prompt) for request in scenario.requests],
        "tokens": [request.max_new_tokens for request in scenario.requests],
    }
    file, log = out / f"{release}.json", out / f"{release}.log"
    file.write_text(json.dumps(given))
    path = os.pathsep.join(str(part) for part in launch.pythonpath)
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(launch.python), "-P", str(Path(__file__).with_name("bare_engine.py")), str(file)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **({"PYTHONPATH": path} if path else {})},
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            output.write(f"\nstopped after {seconds:.0f} s\n")
        finally:
            end_group(process.pid)
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    told: dict[str, Any] | None = next(
        (json.loads(one) for one in reversed(lines) if one.startswith('{"release"')), None
    )
    texts = None if told is None else [list(text) for text in told["texts"]]
    verifies = None if told is None else told["verifies"]
    why = (
        () if texts is not None else (*[one for one in lines if any(word in one for word in TROUBLE)][:3], *lines[-1:])
    )
    seconds = time.monotonic() - start
    booted = "booted" in lines
    return Bare(release=release, seconds=seconds, booted=booted, texts=texts, why=why, verifies=verifies)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", required=True)
    parser.add_argument("--scenario-file", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--device", default="cuda", help="cpu only rehearses")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    scenario = Scenario.model_validate_json(options.scenario_file.read_text())
    releases = options.engines.split(",")
    launches = [launch_of(scenario, version=release, device=options.device) for release in releases]

    def one(launch: Launch) -> Bare:
        found = run(launch, scenario, out=options.out, seconds=options.seconds)
        print(found, flush=True)
        return found

    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(one, launches))
    texts = [each.texts for each in found if each.texts is not None]
    print(f"the same texts: {all(text == texts[0] for text in texts)}" if len(texts) > 1 else "nothing to compare")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
