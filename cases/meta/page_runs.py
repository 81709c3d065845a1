"""Stored runs to make pages of: wrong positions, a tree with a wrong node, an idle rank, and a long one. No engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cases.meta import handmade, results
from harness.archive.writer import RunWriter, write_reproducer
from harness.checks import judge
from harness.contract.merge import merge
from harness.contract.scenario import Scenario
from harness.contract.trace import Event, RoundRecord, Trace
from harness.contract.types import Divergence, Key, Kind, Outcome, Phase, Policy, Verdict

MANIFEST = {
    "engine": {"release": "0.5.23", "device": "cpu", "revert": None},
    "argv": ["/somewhere/eaglecheck", "run", "--engine", "0.5.23"],
    "eaglecheck": "0.1.0",
}
#: Tokens that a page must not take for markup.
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> {{ 7*7 }} | `x` @someone #1"


def tree(name: str = "tree") -> tuple[Scenario, Trace, Trace]:
    """A tree of two beams in which one node of one verify holds another token than it should."""
    scenario = results.named(name, k=3, t=2, n=7)
    engine, reference = results.traces(scenario)
    node = handmade.find(engine, phase=Phase.VERIFY, rid="r1", slot=4, nth=1)
    engine.rows.ints["input_id"][node] = (engine.rows.ints["input_id"][node] + 1) % handmade.VOCAB
    return scenario, engine, reference


def idle(name: str = "idle-rank") -> tuple[Scenario, Trace, Trace]:
    """Two ranks: the second has no request and idles along, once with an empty batch, once not at all."""
    scenario = results.named(name)
    engine, reference = results.traces(scenario)
    beside = [_idle(record, mode="DECODE" if record.index == 4 else "IDLE") for record in engine.rounds]
    rounds = [*engine.rounds, *(record for record in beside if record.scheduler_step != 2)]
    later = [
        replace(record, scheduler_step=record.scheduler_step + (record.scheduler_step > 5)) for record in rounds
    ]  # scheduler step 6 has no batch
    return scenario, replace(engine, rounds=tuple(later)), reference


def crashed(name: str = "crashed") -> tuple[Scenario, Trace, Trace]:
    """The engine dies in the verify of its sixth batch, of which nothing was kept."""
    scenario = results.named(name)
    engine, reference = results.traces(scenario)
    kept = np.flatnonzero(engine.rows.ints["round"] < 5)
    rows, seen = handmade.take_rows(engine.rows, kept), handmade.take_rows(reference.rows, kept)
    data = {"site": "srt/worker.py:verify", "error": "RuntimeError: no", "phase": "VERIFY", "round": 5}
    events = (*engine.events[:1], Event(name="crash", scheduler_step=5, data=data))
    dead = replace(engine, rows=rows, rounds=engine.rounds[:5], events=events, ends=())
    return scenario, dead, replace(reference, rows=seen)


def leaking(name: str = "leaking") -> tuple[Scenario, Trace, Trace]:
    """All is well, but the pool holds three slots less at the end than at the start."""
    scenario = results.named(name)
    engine, reference = results.traces(scenario)
    start, end = engine.events
    short = replace(end, data={**end.data, "free": end.data["free"] - 3})
    return scenario, replace(engine, events=(start, short)), reference


def _idle(record: RoundRecord, *, mode: str) -> RoundRecord:
    nobody: dict[str, Any] = dict.fromkeys(("rids", "attempts", "starts", "lens", "final"), ())
    return replace(record, dp_rank=1, tp_rank=1, mode=mode, **nobody)


def store(root: Path, *, finish: bool = True) -> Path:
    """A run folder with one scenario of each sort, judged."""
    writer = RunWriter.create(root, manifest=MANIFEST)
    cases = [tree(), idle(), crashed(), leaking()]
    for name, break_it in (("single", results.sound), ("pr25015", results.one_ahead)):
        scenario = results.named(name)
        cases.append((scenario, *results.traces(scenario, break_it)))
    verdicts = [_keep(writer, *case) for case in cases]
    if finish:
        writer.finish(merge(verdicts))
    writer.close()
    return writer.folder


def _keep(writer: RunWriter, scenario: Scenario, engine: Trace, reference: Trace) -> Verdict:
    verdict, found = judge(scenario, engine, reference)
    writer.save_scenario(scenario, engine=engine, reference=reference, verdict=verdict, divergences=found)
    if found:
        folder = writer.folder / "reproducers" / f"{scenario.name}-{scenario.id}"
        first = next(one for one in found if one.first)
        replay = f"eaglecheck replay {folder}"
        kept = {"engine": engine, "reference": reference, "divergences": found}
        write_reproducer(folder, scenario, **kept, signature=first.signature, replay=replay)
    return verdict


def hostile(root: Path) -> Path:
    """A run whose engine died with words that would be markup, a table cell or a mention elsewhere."""
    key = Key(dp_rank=0, rid="r1", attempt=0, committed=5, phase=Phase.VERIFY, step=0, slot=0)
    found = Divergence(
        kind=Kind.CRASH, check="ledger", key=key, round=4, expected="no crash", observed=HOSTILE, hint="x", first=True
    )
    return by_hand(root, found, reasons=(HOSTILE,))


def by_hand(root: Path, found: Divergence, *, reasons: tuple[str, ...] = ("made by hand",)) -> Path:
    """A run of one sound scenario that is said to have this divergence."""
    writer = RunWriter.create(root, manifest=MANIFEST)
    scenario = results.named("by-hand")
    engine, reference = results.traces(scenario)
    kinds = (str(found.kind),)
    verdict = Verdict(outcome=Outcome.FAIL, reasons=reasons, root_kinds=kinds, kinds=kinds)
    writer.save_scenario(scenario, engine=engine, reference=reference, verdict=verdict, divergences=[found])
    writer.finish(verdict)
    writer.close()
    return writer.folder


def long(root: Path, *, rows: int = 100_000) -> Path:
    """A run of at least that many rows in one scenario, eight requests at a time, with one wrong row near its end."""
    scenario = handmade.scenario(prompts=[16] * 8, max_new_tokens=40, chunk=64).model_copy(update={"name": "long"})
    short, _ = results.traces(scenario)
    engine = _again_and_again(short, -(-rows // len(short.rows)))
    reference = handmade.copy_trace(replace(engine, side="reference"))
    row = int(np.flatnonzero(engine.rows.strings["phase"] == Phase.DRAFT)[-40])
    engine.rows.ints["position"][row] += 1
    found = Divergence(
        kind=Kind.POSITION,
        check="positions",
        key=engine.rows.key(row),
        round=int(engine.rows.ints["round"][row]),
        expected=int(engine.rows.ints["position"][row]) - 1,
        observed=int(engine.rows.ints["position"][row]),
        policy=Policy.EXACT,
        hint="one-ahead",
        first=True,
    )
    counts = {"positions": len(engine.rows)}
    verdict = Verdict(outcome=Outcome.FAIL, reasons=("made by hand",), compared=counts, root_kinds=("POSITION",))
    writer = RunWriter.create(root, manifest=MANIFEST)
    writer.save_scenario(scenario, engine=engine, reference=reference, verdict=verdict, divergences=[found])
    writer.finish(verdict)
    writer.close()
    return writer.folder


def _again_and_again(trace: Trace, times: int) -> Trace:
    """The trace `times` times behind itself, each copy at later rounds, steps and positions, so that no key repeats."""
    length, rounds, far = len(trace.rows), len(trace.rounds), 1000
    rows, copies = handmade.take_rows(trace.rows, list(range(length)) * times), np.repeat(np.arange(times), length)
    for name, step in (("round", rounds), ("scheduler_step", rounds), ("committed", far)):
        rows.ints[name] = rows.ints[name] + copies * step
    rows.ints["position"] = np.where(rows.ints["position"] < 0, -1, rows.ints["position"] + copies * far)
    records = [
        replace(
            record,
            index=record.index + copy * rounds,
            scheduler_step=record.scheduler_step + copy * rounds,
            starts=tuple(start + copy * far for start in record.starts),
        )
        for copy in range(times)
        for record in trace.rounds
    ]
    return replace(trace, rows=rows, rounds=tuple(records))
