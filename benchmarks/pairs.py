"""Drives and judges shrunken copies of published pairs, and writes what came of them as a table.

    python -m benchmarks.pairs FOLDER --engine 0.5.23 --engine 0.5.13      every pair of FOLDER on both releases
    python -m benchmarks.pairs FOLDER --table docs/evidence/pairs.md       the table of that page, of what ran by now

FOLDER holds a folder for each pair: `target`, `draft` (the same folder where the target's own MTP layers draft),
`pair.json` ({"real": what it is a copy of}) and `scenario.json`. Results stay in `results/` below it, a file a pair and
release, so that it can be run in parts. It judges as `eaglecheck run` does.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._bench import ended, machine
from cases import catalogue
from cases.boots import Boot
from cases.generation import generate, greedy
from harness.cli import prepare
from harness.cli.documents import run_document
from harness.cli.programs import past_eos
from harness.contract.known_issues import ASSUMED
from harness.contract.outputs import check_target
from harness.contract.providers import WITNESS
from harness.contract.scenario import Scenario
from harness.contract.types import Outcome
from harness.contract.usage import UsageError
from harness.driving.adapt import Wanted
from harness.driving.judging import judge_with, load_oracle, unjudged
from harness.driving.own_pair import own_pair
from harness.driving.plan import Plan
from harness.driving.pool import EnginePool
from harness.driving.results import Cost, RunResult, verdict_of
from harness.driving.runner import run
from harness.engines.errors import EngineError

#: Generated scenarios a pair, and their seed.
EXAMPLES, SEED = 4, 17
#: Where the table of a page begins; what stands above it is written by hand.
HEAD = "| pair | architectures | provider: target, draft | release | verdict | rows compared | accept length | why |"


def cell(folder: Path, engines: EnginePool, *, release: str) -> dict[str, Any]:
    """One pair on one release: its scenario and generated ones of the same boot configuration."""
    target, draft = folder / "target", (folder / "draft").resolve()
    trusting = any("auto_map" in json.loads((one / "config.json").read_text()) for one in (target, draft))
    said: list[str] = []
    found = {"pair": folder.name, "engine": release}
    try:
        plan = prepare.make_plan(
            list(_scenarios(folder)),
            say=said.append,
            engine=release,
            device="cpu",
            own=own_pair(target, draft),
            wanted=Wanted(trust_remote_code=trusting or None),
            runs=folder.parent / "runs",
        )
    except UsageError as error:
        return {**found, "refused": str(error)}
    if plan.setup.reference == WITNESS:
        result = run(replace(plan, scenarios=tuple(greedy(plan.scenarios))))
    else:
        result = _driven(plan, engines)
        found |= _assuming(plan, result)
    return {**found, "said": said, "document": run_document(result)}


def _assuming(plan: Plan, result: RunResult) -> dict[str, Any]:
    """The same traces where the findings that the reference can follow are assumed: which, and what is left."""
    known = {known for one in result.results for each in one.known.values() for known in each}
    ids = tuple(sorted(one.id for one in known if one.predicted))
    if not ids:
        return {}
    oracle = load_oracle(*next(iter(plan.pairs.values())), ids)
    again = [judge_with(oracle, one.scenario, one.trace, setup=plan.setup) for one in result.results]
    left = {finding.signature for one in again for finding in one.findings if finding.is_root}
    verdict = verdict_of(again)
    why = _open(verdict.outcome, verdict.reasons)
    return {"assumed": ids, "assuming": verdict.outcome, "left": sorted(left), "why": why}


def _open(outcome: str, reasons: Sequence[str]) -> list[str]:
    """Why there is no verdict, where there is none."""
    said = [one for one in reasons if not one.startswith(("not ", ASSUMED))]
    return said[:2] if outcome == Outcome.UNKNOWN else []


def _driven(plan: Plan, engines: EnginePool) -> RunResult:
    """As a run does it, on engines that are forked from one that has imported SGLang, and without a run folder."""
    oracle = load_oracle(*next(iter(plan.pairs.values())), plan.setup.assumed)
    results = []
    for scenario in plan.scenarios:
        try:
            trace = engines.drive(plan.launch(scenario, lease=None), scenario)
        except EngineError as error:
            results.append(unjudged(scenario, str(error), setup=plan.setup))
        else:
            results.append(judge_with(oracle, scenario, trace, setup=plan.setup))
    return RunResult(
        folder=Path(),
        engine=plan.setup.release,
        device="cpu",
        revert=None,
        header=dict(results[0].trace.header),
        results=tuple(results),
        verdict=verdict_of(results),
        cost=Cost(),
        pair=plan.own.facts() if plan.own else None,
    )


def _scenarios(folder: Path) -> Iterator[Scenario]:
    given = catalogue.read_scenario(folder / "scenario.json")
    yield given
    engine = given.engine.model_copy(update={"chunked_prefill_size": None})
    boot = Boot(name=folder.name[:40], why="the pair's own", spec=given.spec, engine=engine)
    yield from map(past_eos, generate(boot, count=EXAMPLES, seed=SEED))


def table(folder: Path) -> Iterator[str]:
    """The results below a folder in Markdown, by pair and release."""
    files = sorted((folder / "results").glob("*.json"), key=lambda one: one.stem.rsplit("@", 1))
    yield HEAD
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for file in files:
        yield _row(folder, json.loads(file.read_text()))


def _row(folder: Path, found: dict[str, Any]) -> str:
    document = found.get("document") or {}
    configs = [json.loads((folder / found["pair"] / name / "config.json").read_text()) for name in ("target", "draft")]
    names = dict.fromkeys(config["architectures"][0] for config in configs)
    said, length = document.get("providers"), document.get("accept_length")
    columns = [
        found["pair"],
        " + ".join(names),
        f"{said['target']}, {said['draft']}" if said else "",
        found["engine"],
        f"{document['verdict']} of {len(document['scenarios'])}" if document else "refused",
        str(document.get("compared", {}).get("hidden_rows", "")),
        f"{length:.2f}" if length else "",
        _why(found, document).replace("|", "\\|").replace("\n", " "),
    ]
    return f"| {' | '.join(columns)} |"


def _why(found: dict[str, Any], document: dict[str, Any]) -> str:
    """The refusal, or why a witness judged; the signatures of a FAIL and what they may be; an UNKNOWN's reasons."""
    place = re.compile(r"(?:/[^ /:]+)+/(target|draft)")  # whose folder it was says nothing
    if not document:
        return place.sub(r"\1", found["refused"].splitlines()[0].partition(": ")[2])
    refusals = [one.splitlines()[0].partition(": ")[2] for one in found["said"] if "judged by the witness" in one]
    pages: dict[str, set[str]] = {}
    for one in document["findings"]:
        if not one["consequence_of"]:
            pages.setdefault(one["signature"], set()).update(known["id"] for known in one["known"])
    said = [", ".join([f"`{root}`", *map(_linked, sorted(ids))]) for root, ids in sorted(pages.items())]
    if "assumed" in found:
        left = f", `{'`, `'.join(found['left'])}` left" if found["left"] else ""
        why = f" ({'; '.join(found['why'])})" if found["why"] else ""
        said.append(f"{found['assuming']} with {', '.join(found['assumed'])} assumed{left}{why}")
    return "; ".join(
        [place.sub(r"\1", one) for one in refusals] + said + _open(document["verdict"], document["reasons"])
    )


def _linked(issue: str) -> str:
    return f"[{issue}](../findings/{issue}.md)"


def _check(folder: Path, names: Sequence[str]) -> None:
    """UsageError for pairs that are not there."""
    there = sorted(one.parent.name for one in folder.glob("*/pair.json"))
    for name in names or [""]:
        if not there or (name and name not in there):
            raise UsageError(
                f"{folder / name}: {'no pair.json' if name else 'no pairs'} there\n"
                f"  allowed: {', '.join(there) or 'a folder that holds a folder for each pair'}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="only these pairs")
    parser.add_argument("--engine", action="append", default=[])
    parser.add_argument("--table", type=Path)
    asked = parser.parse_args()
    _check(asked.folder, asked.names)
    if asked.table:
        check_target(asked.table, option="table")
    kept = asked.folder / "results"
    kept.mkdir(exist_ok=True)
    every = [one.parent.name for one in sorted(asked.folder.glob("*/pair.json"))]
    for release in asked.engine:
        engines = EnginePool(logs=kept, copies=True)
        try:
            for name in asked.names or every:
                found = cell(asked.folder / name, engines, release=release)
                (kept / f"{name}@{release}.json").write_text(json.dumps(found, indent=1))
                print(_row(asked.folder, found), flush=True)
        finally:
            engines.end()
    if asked.table:
        above = asked.table.read_text().partition(HEAD)[0] if asked.table.exists() else ""
        asked.table.write_text(above + "\n".join(table(asked.folder)) + "\n")
    print(machine())


if __name__ == "__main__":
    ended(main)
