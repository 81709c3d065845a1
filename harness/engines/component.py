"""What a release's own code does with inputs that no engine gives it: component level, and labelled so.

Control side. It starts `component_handoff` in each release's environment; it must never count as an engine's run.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.engines.envs import EngineEnv

SCRIPT = Path(__file__).parents[1] / "engine_side" / "host" / "component_handoff.py"
MARK = "component:"
#: What may be asked about: `component_handoff` and `component_mla`.
PARTS = ("handoff", "mla")
SECONDS = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentAnswer:
    """answers: case -> what the release's code did. error: why it could not be asked, or empty."""

    release: str
    answers: dict[str, dict[str, Any]]
    error: str = ""


def ask(env: EngineEnv, *, part: str = "handoff") -> ComponentAnswer:
    """Run the script in this environment; an environment that cannot run it is an answer too.

    part: one of PARTS.
    """
    environment = {
        **os.environ,
        **dict(env.environ),
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(str(part) for part in env.pythonpath),
    }
    try:
        run = subprocess.run(
            [str(env.python), "-P", str(SCRIPT), part],
            capture_output=True,
            text=True,
            env=environment,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return ComponentAnswer(release=env.version, answers={}, error=str(error))
    line = next((line for line in run.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        tail = run.stderr.strip().splitlines()
        return ComponentAnswer(release=env.version, answers={}, error=tail[-1] if tail else f"code {run.returncode}")
    return ComponentAnswer(release=env.version, answers=json.loads(line.removeprefix(MARK))["answers"])


def of_run(env: EngineEnv, folder: Path) -> ComponentAnswer:
    """As `ask`, kept as `component.json` in the folder of the run that it belongs to."""
    found = ask(env)
    (folder / "component.json").write_text(json.dumps(document(found), indent=1) + "\n")
    return found


def document(found: ComponentAnswer) -> dict[str, Any]:
    """JSON-ready, labelled: whoever reads one of these must not take it for an engine's run."""
    return {"level": "component", "release": found.release, "answers": found.answers, "error": found.error}


def notes(found: ComponentAnswer) -> list[str]:
    """What to say of it beside a verdict, which it is no part of."""
    if found.error:
        return [f"component level (no engine, no part of the verdict): cannot be asked: {found.error}"]
    lines = ["component level (the release's builder called directly; no engine, no part of the verdict):"]
    width = max(len(case) for case in found.answers)
    for case, answer in found.answers.items():
        detail = f": {answer['error']} ({answer['site']})" if answer["outcome"] == "raises" else ""
        lines.append(f"  {case:<{width}}  {_cell(answer).split(' ')[0] if detail else _cell(answer)}{detail}")
    return lines


def table(found: Sequence[ComponentAnswer]) -> str:
    """Markdown: a row a case, a column a release."""
    cases = list(dict.fromkeys(case for one in found for case in one.answers))
    lines = [
        "| component level | " + " | ".join(one.release for one in found) + " |",
        "| --- " * (len(found) + 1) + "|",
    ]
    for case in cases:
        cells = [_cell(one.answers.get(case, {"outcome": one.error or "not asked"})) for one in found]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(answer: dict[str, Any]) -> str:
    match answer["outcome"]:
        case "raises":
            return f"raises {str(answer['error']).split(':')[0]}"
        case "built":
            return f"built {answer['what']}"
        case outcome:
            return str(outcome)
