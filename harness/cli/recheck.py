"""`eaglecheck recheck`: judge a stored run again, without an engine and without SGLang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from harness.archive.again import run_again, short
from harness.archive.digests import SUMS
from harness.archive.faults import TraceError, UnreadableError
from harness.archive.run_folders import is_case, is_ours, judgeable, unfinished, whole
from harness.archive.store import MANIFEST, SCENARIO, VERDICT, RunReader, StoredScenario, read_case, reproducer_of
from harness.archive.trace_io import header_of, read_trace, trace_files
from harness.checks.findings import by_signature
from harness.cli import options, prepare
from harness.cli.documents import RUN_SCHEMA, run_document
from harness.cli.outcome import BY_OUTCOME, Exit, guarded
from harness.contract.finding_pages import issues
from harness.contract.known_issues import assumed_by, assumed_in, without_effect
from harness.contract.outputs import check_target, write_json
from harness.contract.providers import AUTO, WITNESS, is_witness
from harness.contract.types import Outcome, Verdict
from harness.contract.usage import UsageError, UserError
from harness.contract.words import counted
from harness.driving.judging import judge_scenario, judge_with
from harness.driving.own_pair import own_pair
from harness.driving.pairs import checkpoint_pairs
from harness.driving.plan import Setup
from harness.driving.results import Cost, RunResult, ScenarioResult, verdict_of
from reports.live import STYLE
from reports.prose import say
from reports.terminal import render_run

if TYPE_CHECKING:
    from harness.driving.oracle import Oracle


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """What a folder holds. before: the verdict it ended with; missing: why it is not whole, or empty.

    live: it is not whole because it still runs. beside: what is wrong around it, and nothing that is judged.
    """

    folder: Path
    scenarios: Sequence[StoredScenario]
    engine: dict[str, Any]
    before: Outcome | None
    pair: dict[str, Any] | None = None
    missing: str = ""
    live: bool = False
    beside: str = ""


@guarded
def command(
    run: options.Run,
    fresh_reference: Annotated[
        bool, typer.Option(help="Compute the reference anew instead of using the stored one.")
    ] = False,
    assume: options.Assume = None,
    json: options.Json = None,
) -> Exit:
    """Judge a stored run again, without an engine; of a folder of them, all.

    The traces of RUN are judged with this version's checks; nothing in the folder is changed.

    A run that was cut off is never a PASS: what it holds is judged, and what it lacks makes it UNKNOWN.
    """
    console = Console(stderr=json == "-")
    check_target(json, runs=[whole(run)])
    wanted = prepare.check_assumed(assume or ())
    if wanted and not fresh_reference:
        raise UsageError(
            "--assume needs a new reference: the stored one is computed already\n"
            f"  recompute it:  eaglecheck recheck {run} --fresh-reference --assume {wanted[0]}"
        )
    if not is_ours(run) and (folders := judgeable(run)):
        return _all_of(folders, fresh_reference=fresh_reference, assume=wanted, console=console, json=json)
    stored, result = _judged(run, fresh_reference=fresh_reference, assume=wanted)
    changed = stored.before is not None and stored.before is not result.verdict.outcome
    notes = [f"it was {stored.before} when the run ended"] if changed else []
    notes += _without_effect(stored, wanted)
    again = _next(stored, fresh_reference=fresh_reference)
    notes += filter(None, [stored.missing, stored.beside])
    if not (stored.folder / SUMS).exists():
        notes.append(f"{stored.folder} has no {SUMS}: nothing shows that its files are as written")
    render_run(console, result, notes=notes, again=again)
    write_json(run_document(result), json)
    return BY_OUTCOME[result.verdict.outcome]


def _all_of(
    folders: Sequence[Path], *, fresh_reference: bool, assume: tuple[str, ...], console: Console, json: str | None
) -> Exit:
    """Every one of them, a line each with its root signatures; one that cannot be read is UNKNOWN."""
    documents, outcomes = [], list[Outcome]()
    for folder in folders:
        try:
            _, result = _judged(folder, fresh_reference=fresh_reference, assume=assume)
        except UserError as error:
            outcomes.append(Outcome.UNKNOWN)
            say(
                console,
                f"UNKNOWN  {folder}: {str(error).removeprefix('verdict UNKNOWN: ')}",
                style=STYLE[Outcome.UNKNOWN],
            )
            continue
        outcomes.append(result.verdict.outcome)
        documents.append(run_document(result))
        say(console, f"{result.verdict.outcome:<8} {folder}", style=STYLE[result.verdict.outcome])
        for shared in by_signature(one.findings for one in result.results):
            known = sorted({each.id for one in result.results for each in one.known.get(shared.signature, ())})
            if shared.roots:
                say(console, f"  {shared.count} × {' '.join([shared.signature, *known])}")
    outcome = Verdict.merge(outcomes)
    counts = ", ".join(f"{outcomes.count(each)} {each}" for each in Outcome if each in outcomes)
    worst = next(folder for folder, one in zip(folders, outcomes, strict=True) if one is outcome)
    say(console, f"\nlook at one:  eaglecheck recheck {worst}")
    say(console, f"verdict {outcome}: {counted(len(folders), 'folder')}, {counts}", style=STYLE[outcome])
    write_json({"schema": RUN_SCHEMA, "verdict": str(outcome), "runs": documents}, json)
    return BY_OUTCOME[outcome]


def _judged(run: Path, *, fresh_reference: bool, assume: tuple[str, ...]) -> tuple[_Stored, RunResult]:
    kept = not fresh_reference
    try:
        stored = _open_case(run, reference=kept) if is_case(run) else _open_run(run, reference=kept)
    except TraceError as error:
        if error.file.name.startswith("reference"):
            error.add_note(f"or recompute the reference:  eaglecheck recheck {run} --fresh-reference")
        raise
    _check_replacements(stored, assume)
    judged = [_rejudge(one, stored, fresh_reference=fresh_reference, assume=assume) for one in stored.scenarios]
    return stored, _result(stored, judged)


def _check_replacements(stored: _Stored, wanted: Sequence[str]) -> None:
    """UsageError for a finding that only a replacement kernel in the engine gets past, where the engine had none.

    Where it cannot show, it is without effect instead.
    """
    release, device = _engine_of(stored)
    kernels = [issues()[name] for name in wanted if issues()[name].assume == "replacement kernel"]
    missing = [
        one.id
        for one in kernels
        if any(
            one.id not in _assumed(each, stored.engine)
            and one.shows_in(each.scenario.spec, each.scenario.engine, release=release, device=device)
            for each in stored.scenarios
        )
    ]
    if missing:
        raise UsageError(
            f"--assume {missing[0]}: a replacement kernel in the engine works past it, and {stored.folder} was run "
            f"without one: it cannot be assumed afterwards\n  run it again:  {_run_assuming(stored.folder, missing)}"
        )


def _run_assuming(folder: Path, ids: Sequence[str]) -> str:
    """The command of the run with more findings assumed; a replay cannot be told to, and takes what it is given."""
    more = "".join(f" --assume {name}" for name in ids)
    return f"{run_again(folder, replay=False)}{more}"


def _without_effect(stored: _Stored, wanted: Sequence[str]) -> list[str]:
    """What `run` says of them too."""
    release, device = _engine_of(stored)
    engines = [(one.scenario.spec, one.scenario.engine) for one in stored.scenarios]
    return without_effect(wanted, engines, release=release, device=device)


def _next(stored: _Stored, *, fresh_reference: bool) -> str:
    """What to type after a recheck, which is not the same command once more unless the run goes on."""
    if stored.live:
        return f"recheck it when it has ended:  eaglecheck recheck {stored.folder}"
    if not any(one.engine.header for one in stored.scenarios):
        return f"no engine came up, so nothing can be judged again; run it again:  {run_again(stored.folder)}"
    if any(one.engine.scenario_id != one.scenario.id for one in stored.scenarios):
        return (
            "its scenario was changed since, or an older eaglecheck computed its id differently; "
            f"run it again:  {run_again(stored.folder)}"
        )
    if fresh_reference and not all(_has_reference(one.folder) for one in stored.scenarios):
        return f"run it again, to have a stored reference too:  {run_again(stored.folder)}"
    if fresh_reference:
        return f"with the stored reference:  eaglecheck recheck {stored.folder}"
    return f"recompute the reference:  eaglecheck recheck {stored.folder} --fresh-reference"


def _has_reference(folder: Path) -> bool:
    """Whether the stored reference can be read."""
    try:
        read_trace(folder, "reference")
    except TraceError:
        return False
    return True


def _open_case(path: Path, *, reference: bool) -> _Stored:
    """One scenario's folder, or a reproducer. reference False: the stored one is not asked for."""
    case = read_case(path, reference=reference)
    engine, beside = dict(case.engine.header), ""
    if is_ours(path.parent) and not (path / MANIFEST).exists():  # of the run it lies in
        run = RunReader.open(path.parent, allow_incomplete=True)
        engine |= run.manifest.engine.known()
        beside = f"run {path.parent} is {run.unfinished}" if run.unfinished else ""
    before = None if case.verdict is None else case.verdict.outcome
    return _Stored(folder=path, scenarios=[case], engine=engine, before=before, missing=_cut_off([case]), beside=beside)


def _cut_off(cases: Sequence[StoredScenario]) -> str:
    """Which of them lack what is written last, in words; a reproducer's is its manifest.

    Traces alone, without digests and in no run, were never to have more.
    """
    gone = [one.folder for one in cases if one.verdict is None and not (one.folder / MANIFEST).exists()]
    gone = [one for one in gone if is_ours(one.parent) or any((one / name).exists() for name in (SUMS, VERDICT))]
    return "; ".join(f"{short(folder)} is {unfinished(folder)}" for folder in gone)


def _open_run(path: Path, *, reference: bool) -> _Stored:
    reader = RunReader.open(path, allow_incomplete=True)
    if gone := reader.gone(reader.scenario_folders()):
        raise UnreadableError(
            f"run {path} is incomplete: {gone} was judged in it, and is gone or has no {SCENARIO}\n"
            f"  copy the whole run folder again, or run again:  {run_again(path)}"
        )
    if reader.verdict is not None:
        cases = list(reader.scenarios(reference=reference))
        missing = _cut_off(cases)
    else:
        cases = [read_case(folder, reference=reference) for folder in reader.some_judged()]
        missing = f"run {path} is {reader.unfinished}; {counted(len(cases), 'scenario')} of it can be judged"
    return _Stored(
        folder=short(reader.folder),
        scenarios=cases,
        engine=reader.manifest.engine.known(),
        pair=reader.manifest.known_pair(),
        before=None if reader.verdict is None else reader.verdict.outcome,
        missing=missing,
        live=reader.live,
    )


def _header(stored: _Stored) -> Mapping[str, Any]:
    return next((one.engine.header for one in stored.scenarios if one.engine.header), {})


def _engine_of(stored: _Stored) -> tuple[str, str]:
    """(release, device) of what was run."""
    known = {**_header(stored), **{name: value for name, value in stored.engine.items() if value}}
    return str(known.get("release", "unknown")), str(known.get("device", "unknown"))


def _result(stored: _Stored, results: list[ScenarioResult]) -> RunResult:
    missing = [Verdict(outcome=Outcome.UNKNOWN, reasons=(stored.missing,))] if stored.missing else []
    release, device = _engine_of(stored)
    return RunResult(
        folder=stored.folder,
        engine=release,
        device=device,
        revert=stored.engine.get("revert"),
        header=dict(_header(stored)),
        results=tuple(results),
        verdict=verdict_of(results, *missing),
        cost=Cost(),
        pair=stored.pair,
    )


def _rejudge(
    stored: StoredScenario, run: _Stored, *, fresh_reference: bool, assume: tuple[str, ...] = ()
) -> ScenarioResult:
    if not fresh_reference and stored.reference is None and stored.engine.header:
        # without one only the engine's own rows are looked at, which is no agreement with anything
        raise UnreadableError(
            f"{stored.folder} has no reference: its reference.json is gone, or was not copied\n"
            f"  recompute the reference:  eaglecheck recheck {short(run.folder)} --fresh-reference"
        )
    told = {**stored.engine.header, **{name: value for name, value in run.engine.items() if value}}
    setup = Setup.told(told)
    places: dict[str, Any] = {"folder": short(stored.folder), "reproducer": reproducer_of(stored.folder)}
    if not stored.engine.header and stored.verdict is not None:  # the engine never came up: the reason still stands
        verdict = stored.verdict.verdict()
        return ScenarioResult.of(stored.scenario, stored.engine, stored.reference, verdict, (), setup=setup, **places)
    if fresh_reference:
        return judge_with(_oracle(stored, run.engine, assume), stored.scenario, stored.engine, setup=setup, **places)
    return judge_scenario(stored.scenario, stored.engine, stored.reference, setup=setup, **places)


def _oracle(stored: StoredScenario, engine: Mapping[str, Any], assume: tuple[str, ...]) -> Oracle:
    from harness.driving.oracle import Oracle

    _check_provider(stored, engine)
    pair = engine.get("pair")
    own = own_pair(*map(Path, pair)) if pair else None
    device = str(stored.engine.header.get("device", "cpu"))
    pairs = checkpoint_pairs([stored.scenario], device=device, own=own)
    target, draft = pairs[stored.scenario.checkpoint]
    assumed = tuple(dict.fromkeys((*_assumed(stored, engine), *assume)))
    provider = str(engine.get("reference") or AUTO)
    return Oracle(target=target, draft=draft, assumed=assumed, provider=provider).load()


def _check_provider(stored: StoredScenario, engine: Mapping[str, Any]) -> None:
    """UsageError where a witness judged: that takes an engine."""
    header = header_of(trace_files(stored.folder, "reference")["json"])
    if is_witness(header or {}) or engine.get("reference") == WITNESS:
        again = run_again(stored.folder if (stored.folder / MANIFEST).is_file() else stored.folder.parent)
        raise UsageError(
            f"--fresh-reference: {stored.folder} was judged by the witness, which is an engine and not computed here\n"
            f"  judge it with the stored one:  eaglecheck recheck {short(stored.folder)}\n  ask it anew:  {again}"
        )


def _assumed(stored: StoredScenario, engine: Mapping[str, Any]) -> tuple[str, ...]:
    """What the stored reference took for granted; where it is unfit, what the run or the verdict says of it."""
    header = header_of(trace_files(stored.folder, "reference")["json"])
    if header is not None:
        return assumed_in(header)
    said = () if stored.verdict is None else tuple(assumed_by(stored.verdict.reasons))
    return assumed_in(engine) or assumed_in(stored.engine.header) or said
