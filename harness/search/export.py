"""A stored failure as one Python file that needs SGLang only: checkpoint, flags, requests, expected and observed.

What a file cannot show is refused. It must not judge, and must not import sglang.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from cases import checkpoints, recipes
from harness.both_sides import compat
from harness.checks.describe import describe
from harness.checks.evidence import tabulate
from harness.checks.findings import Finding
from harness.contract.types import Kind, Phase
from harness.contract.usage import UsageError
from harness.driving.progress import ScenarioResult
from harness.engines.process import Launch
from reports.blame import as_served, flags, made_by
from reports.findings import roots_of

TEMPLATE = Path(__file__).with_name("repro.py.txt")
#: Patches that a single file carries; what others replace is not reached, or runs as SGLang's own interpreted kernel.
CARRIED = ("flag", "cuda_noop", "device_name")
#: Kernels without a CPU build that no flag replaces, and what of a script can be driven from inside SGLang's loop.
NEEDED, OPS = ("tree", "verify"), ("submit", "step", "abort", "drain")
DRAFTS = (Phase.DRAFT, Phase.DRAFT_PREFILL, Phase.EXTEND)
#: Seconds that an engine may take in all, and is left idle behind its answers.
SECONDS, IDLE = 900, 5
ENDINGS = {
    "script": '\nif __name__ == "__main__":\n    if len(sys.argv) > 1:\n        serve(Path(sys.argv[1]))\n    else:\n'
    "        sys.exit(main())\n",
    "sglang-test": "\nimport unittest\n\nfrom sglang.test.test_utils import CustomTestCase\n\n\n"
    "class TestRepro(CustomTestCase):\n    def test_it_is_not_there(self) -> None:\n"
    "        self.assertEqual(main(), 0)\n\n\n"
    'if __name__ == "__main__":\n    if len(sys.argv) > 1:\n        serve(Path(sys.argv[1]))\n    else:\n'
    "        unittest.main()\n",
}


def exported(one: ScenarioResult, launch: Launch, *, name: str, form: str) -> str:
    """The file; UsageError for a failure that it could not show. one: with both traces whole."""
    roots = roots_of(one)
    if not roots:
        raise UsageError(f"{one.folder} shows no failure: there is nothing to export")
    device, release = str(launch.boot["device"]), str(launch.boot["release"])
    patches = _patches(launch, device)
    _check(one, launch)
    finding, show = _shown(one, roots, release)
    known = one.known.get(finding.signature, ())
    title = f"{known[0].id}: {known[0].title}" if known else finding.signature
    arguments = as_served(launch.boot["arguments"], one.scenario)
    given = {
        "device": device,
        "environment": launch.boot["environment"],
        "arguments": {key: value for key, value in arguments.items() if not key.endswith("model_path")},
        "optional": launch.boot["optional_arguments"],
        "cpu_patches": patches,
        "gate": compat.lookup(release, overlap=bool(launch.boot["overlap"])).gate,
        "requests": [
            {
                "rid": each.rid,
                "input_ids": list(each.input_ids),
                "max_new_tokens": each.max_new_tokens,
                "stops": sorted(each.stop_token_ids),
            }
            for each in one.scenario.requests
        ],
        "script": [{"kind": op.kind, "rids": list(op.rids), "count": op.count} for op in one.scenario.script],
        "show": show,
        "seconds": SECONDS,
        "idle_seconds": IDLE,
    }
    recipe = checkpoints.RECIPES[checkpoints.on_device(one.scenario.checkpoint, device)]
    make = checkpoints.KINDS[type(recipe)]
    parts = {
        "TITLE": title,
        "WHAT": describe(finding.first, one.scenario, finding=finding),
        "RELEASE": release,
        "DEVICE": device,
        "FLAGS": "\n".join(f"    {line}" for line in flags(arguments)),
        "NAME": name,
        "GIVEN": _lines(given),
        "WEIGHTS": _sources(recipe),
        "RECIPE": f'("repro_{_short(inspect.getmodule(make) or recipes)}", "{make.__name__}", {repr(recipe)!r})',
        "END": ENDINGS[form],
    }
    return re.sub(r"@([A-Z]+)@", lambda found: parts[found[1]], TEMPLATE.read_text(encoding="utf-8"))


def _lines(given: Mapping[str, Any]) -> str:
    """One line a key."""
    return "{\n" + ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in given.items()) + "\n}"


def _patches(launch: Launch, device: str) -> list[Sequence[str]]:
    if device != "cpu":
        return []
    release = compat.lookup(str(launch.boot["release"]), overlap=bool(launch.boot["overlap"]))
    row = compat.multi_layer(release) if launch.boot["layered"] else release
    if needed := {what for _, what, _ in row.patches} & {*NEEDED}:
        raise UsageError(
            f"on a CPU {row.first} needs replacement kernels of ours ({', '.join(sorted(needed))})\n"
            "  export a specimen of a release from 0.5.15 on, or of a GPU"
        )
    return [patch for patch in row.patches if patch[1] in CARRIED]


def _check(one: ScenarioResult, launch: Launch) -> None:
    ops = {op.kind for op in one.scenario.script} - {*OPS}
    drains = [at for at, op in enumerate(one.scenario.script) if op.kind == "drain"]
    ends = len(one.scenario.script) - 1
    why = (
        f"its script has {', '.join(sorted(ops))}"
        if ops
        else "its script goes on behind a drain"
        if any(at != ends for at in drains)
        else "it needs two engines"
        if launch.beside is not None
        else "it samples"
        if any(each.temperature for each in one.scenario.requests)
        else "it needs several ranks"
        if one.scenario.engine.tp_size > 1
        else "its pair is none of ours"
        if one.setup.pair
        else ""
    )
    if why:
        raise UsageError(f"{one.folder} cannot be one file: {why}\n  run it:  eaglecheck replay {one.reproducer}")


def _shown(one: ScenarioResult, roots: Sequence[Finding], release: str) -> tuple[Finding, dict[str, Any]]:
    """What of its findings shows from outside, or else in what the draft model is fed and says."""
    for finding in roots:
        if finding.first.kind in (Kind.CRASH, Kind.LEAK) and finding.first.check == "ledger":
            return finding, {"kind": "end", "error": _words(str(finding.first.observed))}
        if finding.first.check == "finish":
            return finding, {"kind": "limit"}
    if one.text_identical is False:
        return roots[0], {"kind": "text"}
    for finding in roots:
        if finding.first.key.phase in DRAFTS and (shown := _forward(one, finding, release)):
            return finding, shown
    raise UsageError(f"{one.folder}: {roots[0].signature} shows neither from outside nor in a draft forward")


def _words(error: str) -> str:
    """The part of an error that does not depend on numbers."""
    text = error.partition(": ")[2] or error
    return re.split(r"[\d(\[]", text)[0].strip()[:60] or text[:60]


def _forward(one: ScenarioResult, finding: Finding, release: str) -> dict[str, Any] | None:
    """The forward of the first row of a finding: everything that was fed beside it, and what was expected."""
    first, rows = finding.first, one.trace.rows
    key = first.key
    same = [
        row
        for row in range(len(rows))
        if rows.strings["phase"][row] == key.phase
        and rows.ints["round"][row] == first.round
        and rows.ints["dp_rank"][row] == key.dp_rank
        and (key.phase != Phase.DRAFT or rows.ints["step"][row] == key.step)
    ]
    at = next(place for place, row in enumerate(same) if rows.key(row) == key)
    fed = {name: [int(rows.ints[column][row]) for row in same] for name, column in FED}
    where = {
        "where": f"{key.phase}, round {first.round}, step {key.step}",
        "made_by": made_by(first, one.scenario, release),
    }
    if first.kind is Kind.NUMERIC and one.reference is not None and first.hint.startswith("hidden_out"):
        theirs = tabulate(one.reference.rows)
        answer = next((row for row in range(len(theirs.choices)) if one.reference.rows.key(row) == key), None)
        name = f"hidden_out.{key.phase}"
        if answer is None or name not in one.reference.tensors:
            return None
        sides = ((one.reference, answer, "expected"), (one.trace, same[at], "observed"))
        states = {side: trace.tensors[name][trace.rows.ints["hidden_out"][row]].tolist() for trace, row, side in sides}
        return {"kind": "values", **fed, "row": at, **states, **where}
    column = {Kind.POSITION: "positions", Kind.TOKEN: "ids", Kind.EXTEND_INPUT: "ids"}.get(first.kind)
    if column is None or first.hint.startswith("choice"):
        return None
    return {"kind": "inputs", "observed": fed, "expected": _corrected(one, finding, same, fed, column), **where}


FED = (("ids", "input_id"), ("positions", "position"))


def _corrected(
    one: ScenarioResult, finding: Finding, same: Sequence[int], fed: Mapping[str, list[int]], column: str
) -> dict[str, list[int]]:
    """What should have been fed to the whole forward."""
    wanted = {
        (found.key, found.round): int(found.expected)
        for found in one.divergences
        if found.signature == finding.signature
    }
    values = [
        wanted.get((one.trace.rows.key(row), finding.first.round), value)
        for row, value in zip(same, fed[column], strict=True)
    ]
    return {**fed, column: values}


def _sources(recipe: recipes.Recipe) -> str:
    """The modules that make a pair, as {name: source}, in the order in which they need one another."""
    modules = _needs(inspect.getmodule(checkpoints.KINDS[type(recipe)]) or recipes)
    return "\n".join(f"SOURCES[{_short(one)!r}] = r'''\n{_alone(one)}'''" for one in modules)


def _short(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _needs(module: ModuleType) -> list[ModuleType]:
    """A module of ours behind all that it imports of ours."""
    seen: dict[str, ModuleType] = {}

    def visit(one: ModuleType) -> None:
        for name in re.findall(r"^from cases(?:\.(\w+))? import (\w+)", inspect.getsource(one), flags=re.MULTILINE):
            other = importlib.import_module(f"cases.{name[0] or name[1]}")
            if other.__name__ not in seen:
                visit(other)
        seen.setdefault(one.__name__, one)

    visit(module)
    return list(seen.values())


def _alone(module: ModuleType) -> str:
    """Its source, importing from what stands beside it in the file."""
    source = inspect.getsource(module)
    source = re.sub(r"^from cases import (\w+)$", r"import repro_\1 as \1", source, flags=re.MULTILINE)
    return re.sub(r"^from cases\.(\w+) import", r"from repro_\1 import", source, flags=re.MULTILINE)
