"""A stored failure as one Python file that needs SGLang only: checkpoint, flags, requests, expected and observed.

What a file cannot show is refused. It must not judge, and must not import sglang.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from cases import pairs, recipes
from cases.hybrid_weights import HybridRecipe
from cases.mamba_weights import MambaRecipe
from harness.both_sides import plugin_algorithm
from harness.checks.describe import describe
from harness.checks.evidence import tabulate
from harness.checks.findings import Finding
from harness.contract.finding_pages import issues
from harness.contract.known_issues import Known
from harness.contract.one_file import no_file
from harness.contract.requests import RequestSpec
from harness.contract.trace import Trace
from harness.contract.types import Kind, Phase
from harness.contract.usage import UsageError
from harness.driving.requests import sampling_of
from harness.driving.results import ScenarioResult
from harness.engines.launch import CORES, dtype_on
from harness.engines.process import Launch
from harness.search import vendored
from reports.blame import as_served, flags
from reports.blame import where as where_made
from reports.findings import around_of, roots_of

TEMPLATE = Path(__file__).with_name("repro.py.txt")
RECURRENT = (HybridRecipe, MambaRecipe)
#: States of a request that was taken back, which nobody renewed (F-013).
RESUMED = ("hidden_out-previous-row", "hidden_out-as-handed-over")
DRAFTS = (Phase.DRAFT, Phase.DRAFT_PREFILL, Phase.EXTEND)
#: Seconds that an engine may take in all, and is left idle behind its answers.
SECONDS, IDLE = 900, 5
#: A state is off where it differs by more than this share of its greatest value.
LIMITS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
#: SGLang's own check of its pools ends it, with whatever it has not answered yet; a text can be seen where it warns.
OWN_CHECK, DEADLY = ":raise_error_or_warn", (Kind.CRASH, Kind.HANG)
WARN = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false"}
CPU_SAYS = """
On a CPU, what has no CPU build is stubbed or replaced by a few lines of torch (module `cpu` below). SGLang's own Triton
kernels run interpreted: slow, but they are SGLang's."""
MOVED_SAYS = """
A hand-over goes through a folder, behind SGLang's own transfer interfaces (module `classes` below)."""
ENDINGS = {
    "script": """
if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("serve", nargs="?", type=Path, help=argparse.SUPPRESS)  # an engine's own process
    if serving := words.parse_args().serve:
        serve(serving)
    else:
        sys.exit(main())
""",
    "sglang-test": """
if "REPRO" not in os.environ:  # SGLang's processes import this file too
    import unittest

    sys.meta_path.insert(0, stubs())
    from sglang.test.test_utils import CustomTestCase

    class TestRepro(CustomTestCase):
        def test_it_is_not_there(self) -> None:
            self.assertEqual(main(), 0)


if __name__ == "__main__":
    if Path(sys.argv[-1]).is_dir():  # an engine's own process
        serve(Path(sys.argv[-1]))
    else:
        unittest.main()
""",
}


def exported(one: ScenarioResult, launch: Launch, *, name: str, form: str) -> str:
    """The file; UsageError for a failure that it could not show. one: with both traces whole."""
    roots, refused = roots_of(one), [reason for reason in one.verdict.reasons if one.known.get(reason)]
    if not roots and not refused:
        raise UsageError(
            f"{one.folder} shows no failure: there is nothing to export\n"
            "  a failure is in reproducers/ of its run; make one:  eaglecheck run --engine 0.5.11 --scenario pr25015"
        )
    device, release = str(launch.boot["device"]), str(launch.boot["release"])
    _check(one)
    if roots:
        finding, show = _shown(one, roots, release)
        signature, what = finding.signature, describe(finding.first, one.scenario, finding=finding)
    else:  # it did not boot, and is known for it
        signature, error = refused[0], refused[0].rpartition("Error: ")[2].splitlines()[0]
        what, show = f"the engine does not start: {error}", {"kind": "end", "error": _words(error), "site": ""}
    dtype = dtype_on(device, one.scenario.engine.dtype)
    recipe = pairs.RECIPES[pairs.on_device(one.scenario.checkpoint, device, dtype)]
    sampled, recurrent = not all(each.greedy for each in one.scenario.requests), isinstance(recipe, RECURRENT)
    rows, row = vendored.rows(launch.boot, sampled=sampled, recurrent=recurrent), vendored.row_of(launch.boot)
    sides = [launch] if launch.beside is None else [launch, launch.beside]
    given = {
        "device": device,
        "show": show,
        "requests": [_asked(each) for each in one.scenario.requests],
        "script": [{"kind": op.kind, "rids": list(op.rids), "count": op.count} for op in one.scenario.script],
        "engines": {(each.boot.get("handoff") or {"side": ""})["side"]: _engine(each, one, show) for each in sides},
        "plugin": one.scenario.spec.plugin,
        "worker": [row.worker_module, row.worker],
        "releases": rows,
        "seconds": SECONDS,
        "idle_seconds": IDLE,
    }
    parts = {
        "TITLE": _title(one.known.get(signature, ()), signature),
        "WHAT": what,
        "RELEASE": release,
        "DEVICE": device,
        "FLAGS": "\n".join(f"    {line}" for line in flags(as_served(launch.boot["arguments"], one.scenario))),
        "NAME": name,
        "NEEDS": CPU_SAYS * (device == "cpu") + MOVED_SAYS * (len(sides) > 1),
        "GIVEN": _lines(given),
        "SOURCES": _sources(recipe, rows, moved=len(sides) > 1, plugin=bool(one.scenario.spec.plugin)),
        "RECIPE": ", ".join((*map(json.dumps, (*_maker(recipe), _home(type(recipe)))), repr(repr(recipe)))),
        "PERTURB": '    made = load("perturbed").perturbed(noise, made)\n' * (recipe.name in pairs.PERTURBED),
        "END": ENDINGS[form],
    }
    return re.sub(r"@([A-Z]+)@", lambda found: parts[found[1]], TEMPLATE.read_text(encoding="utf-8"))


def _title(known: Sequence[Known], signature: str) -> str:
    """Of two that look alike, what fewer algorithms can have."""
    named = min(known, key=lambda one: len(issues()[one.id].algorithms), default=None)
    return f"{named.id}: {named.title}" if named else signature


def _asked(request: RequestSpec) -> dict[str, Any]:
    own = {"rid": request.rid, "input_ids": list(request.input_ids), "dp_rank": request.dp_rank}
    return {**own, "sampling": sampling_of(request)}


def _engine(launch: Launch, one: ScenarioResult, show: Mapping[str, Any]) -> dict[str, Any]:
    """What one engine is started with, less the folders of the checkpoint."""
    arguments = as_served(launch.boot["arguments"], one.scenario)
    environment = launch.boot["environment"] | (WARN if show["kind"] == "text" else {})
    if CORES in environment:  # any two, whatever this machine has
        environment[CORES] = "|".join(str(rank % 2) for rank in range(one.scenario.engine.tp_size))
    return {
        "environment": environment,
        "arguments": {key: value for key, value in arguments.items() if not key.endswith("model_path")},
        "optional": launch.boot["optional_arguments"],
    }


def _lines(given: Mapping[str, Any]) -> str:
    """One line a key, and a release."""
    lines = {key: json.dumps(value) for key, value in given.items()}
    lines["releases"] = "[\n " + ",\n ".join(map(json.dumps, given["releases"])) + "]"
    return "{\n" + ",\n".join(f'"{key}": {value}' for key, value in lines.items()) + "\n}"


def _check(one: ScenarioResult) -> None:
    if why := no_file(one.scenario, own_pair=bool(one.setup.pair)):
        raise UsageError(f"{one.folder} cannot be one file: {why}\n  run it:  eaglecheck replay {one.reproducer}")


def _shown(one: ScenarioResult, roots: Sequence[Finding], release: str) -> tuple[Finding, dict[str, Any]]:
    """What of its findings shows from outside, or else in what the draft model is fed and says."""
    for finding in roots:
        if finding.first.check == "finish":
            return finding, {"kind": "limit"}
        if finding.first.kind is Kind.NONDETERMINISM and finding.first.check == "seeds":
            return finding, {"kind": "seeds", **_twins(one, finding)}
    deadly = [each for each in roots if each.first.kind in DEADLY and not each.signature.endswith(OWN_CHECK)]
    if one.text_identical is False and not deadly:
        return roots[0], {"kind": "text"}
    for finding in roots:
        if finding.first.kind in (Kind.CRASH, Kind.LEAK) and finding.first.check == "ledger":
            return finding, {"kind": "end", **_end(finding)}
        if finding.first.kind is Kind.HANG:
            return finding, {"kind": "hang"}
        if finding.first.key.phase == Phase.PREBUILT and finding.first.hint in RESUMED:
            return finding, {"kind": "resumed"}
    causes = {each.signature for each in roots}  # what attention reads shows in the values that follow from it
    for finding in (*roots, *(each for each in one.findings if each.consequence_of in causes)):
        if finding.first.key.phase in DRAFTS and (shown := _forward(one, finding, release)):
            return finding, shown
    raise UsageError(
        f"{one.folder}: {roots[0].signature} shows neither from outside nor in a draft forward\n"
        f"  show it with us:  eaglecheck replay {one.reproducer}"
    )


def _twins(one: ScenarioResult, finding: Finding) -> dict[str, Any]:
    """Two requests that ask for the same, and how many first tokens of theirs should be the same."""
    mine = one.scenario.request(finding.first.key.rid)
    drawn = {end.rid: end.output_ids for end in one.trace.ends}
    for other in one.scenario.requests:
        if other.model_copy(update={"rid": mine.rid}) == mine and drawn[other.rid] != drawn[mine.rid]:
            pairs = enumerate(zip(drawn[other.rid], drawn[mine.rid], strict=False), 1)
            return {"rids": [other.rid, mine.rid], "tokens": next(at for at, (left, right) in pairs if left != right)}
    raise UsageError(f"{one.folder}: nobody asks for the same as {mine.rid}\n  look:  eaglecheck recheck {one.folder}")


def _end(finding: Finding) -> dict[str, str]:
    """What the log of an engine that ends so holds: the error, or where it has no words the place, as a pattern.

    Of a signal it holds what Python's faulthandler says, which SGLang's schedulers enable. Any signal is the fault:
    memory that was written over ends a process by one or another.
    """
    if re.fullmatch(r"SIG[A-Z]+", str(finding.first.hint)):
        return {"error": "", "site": r"Fatal Python error: [\w ]+"}
    error = _words(re.sub(r" \(on TP rank \d+\)$", "", str(finding.first.observed)).partition(":")[2].strip())
    file, function = finding.signature.split(":")[-2:]
    site = rf'{re.escape(file)}", line \d+, in {re.escape(function)}\n'
    return {"error": error, "site": "" if error else site}


def _words(text: str) -> str:
    """The part of an error that does not depend on numbers."""
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
        and rows.ints["step"][row] == key.step
    ]
    at = next(place for place, row in enumerate(same) if rows.key(row) == key)
    fed = {name: [int(rows.ints[column][row]) for row in same] for name, column in FED}
    where = {
        "whole": key.phase == Phase.DRAFT,
        "where": f"{key.phase}, round {first.round}, step {key.step}",
        "made_by": where_made(first, one.scenario, release, around_of(one, finding.signature))[1],
    }
    if first.kind is Kind.NUMERIC and one.reference is not None and first.hint.startswith("hidden_out"):
        theirs = tabulate(one.reference.rows)
        answer = next((row for row in range(len(theirs.choices)) if one.reference.rows.key(row) == key), None)
        name = f"hidden_out.{key.phase}"
        if answer is None or name not in one.reference.tensors:
            return None
        sides = ((one.reference, answer, "expected"), (one.trace, same[at], "observed"))
        states = {side: _state(trace, row, name) for trace, row, side in sides}
        limit = LIMITS[one.scenario.engine.dtype] * max(map(abs, states["expected"]))
        return {"kind": "values", **fed, "row": at, **states, "limit": limit, **where}
    column = {Kind.POSITION: "positions", Kind.TOKEN: "ids", Kind.EXTEND_INPUT: "ids"}.get(first.kind)
    if column is None or first.hint.startswith("choice"):
        return None
    return {"kind": "inputs", "observed": fed, "expected": _corrected(one, finding, same, fed, column), **where}


def _state(trace: Trace, row: int, name: str) -> list[float]:
    return [float(f"{value:.6g}") for value in trace.tensors[name][trace.rows.ints["hidden_out"][row]]]


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


def _sources(recipe: recipes.Recipe, rows: Sequence[Mapping[str, Any]], *, moved: bool, plugin: bool) -> str:
    """The modules that a file brings along, as {name: source}, in the order in which they need one another."""
    kind = type(recipe)
    roots = [_maker(recipe), (_home(kind), kind.__name__), ("recipes", "Noise")]
    if recipe.name in pairs.PERTURBED:
        roots.append(("perturbed", "perturbed"))
    needed = {one.__name__: one for module, _ in roots for one in _needs(importlib.import_module(f"cases.{module}"))}
    modules = vendored.reachable({_short(one): _alone(one) for one in needed.values()}, roots)
    modules = {"stub_packages": vendored.stub_packages()} | modules
    if patches := [patch for row in rows for patch in row["patches"]]:
        modules |= vendored.cpu_modules(patches)
    if moved:
        modules |= vendored.moved_modules()
    if plugin:
        modules["plugin_algorithm"] = inspect.getsource(plugin_algorithm)
    return "\n".join(f"SOURCES[{name!r}] = r'''\n{source}'''" for name, source in modules.items())


def _maker(recipe: recipes.Recipe) -> tuple[str, str]:
    """Module and name of the function that makes its pair."""
    make = pairs.KINDS[type(recipe)]
    return _home(make), make.__name__


def _home(one: Callable[..., Any]) -> str:
    """Its module, as a file calls it."""
    return one.__module__.rpartition(".")[2]


def _short(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _needs(module: ModuleType) -> list[ModuleType]:
    """A module of ours behind all that it imports of ours."""
    seen: dict[str, ModuleType] = {}

    def visit(one: ModuleType) -> None:
        for name in re.findall(r"^from cases(?:\.(\w+))? import (\w+(?:, \w+)*)", inspect.getsource(one), re.MULTILINE):
            for other in [name[0]] if name[0] else name[1].split(", "):
                if f"cases.{other}" not in seen:
                    visit(importlib.import_module(f"cases.{other}"))
        seen.setdefault(one.__name__, one)

    visit(module)
    return list(seen.values())


def _alone(module: ModuleType) -> str:
    """Its source, importing from what stands beside it in the file."""
    source = inspect.getsource(module)
    whole = r"^from cases import (\w+(?:, \w+)*)$"
    source = re.sub(whole, lambda found: "\n".join(map(_imported, found[1].split(", "))), source, flags=re.MULTILINE)
    return re.sub(r"^from cases\.(\w+) import", r"from repro_\1 import", source, flags=re.MULTILINE)


def _imported(name: str) -> str:
    return f"import {vendored.PREFIX}{name} as {name}"
