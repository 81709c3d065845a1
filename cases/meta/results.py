"""Hand-made results of runs, for tests of everything that is printed or written about one. No engine, no clock."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cases.meta import handmade
from harness.archive import digests
from harness.archive.writer import RunWriter, write_reproducer
from harness.checks import judge
from harness.contract.merge import merge
from harness.contract.rows import RowBuilder
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.contract.types import Divergence, Kind, Outcome, Phase, Policy, Verdict
from harness.contract.types import Key as RowKey
from harness.driving.plan import Setup
from harness.driving.results import Cost, RunResult, ScenarioResult
from harness.search.mutant_results import Asked, Campaign

RUN = Path("runs/20261128-0036-dbc5")
ID = "0123456789ab"  # a new field of Scenario changes every id, and no text that is kept here
HEADER: dict[str, Any] = {
    "release": "0.5.23",
    "device": "cpu",
    "worker": "EAGLEWorkerV2",
    "overlap": False,
    "backend": "triton",
    "dtype": "float32",
    "torch": "2.13.0+cpu",
    "revert": None,
    "hooks_missing": [],
    "replaced": [],
}
REPLACED = [
    {"operation": f"sglang.srt.speculative.eagle_utils.{name}", "subject": subject, "by": "stand-in"}
    for name, subject in (
        ("sgl_build_tree_kernel_efficient", "tree"),
        ("verify_tree_greedy_func", "verify"),
        ("decode_attention_fwd", "attention"),
        ("extend_attention_fwd", "attention"),
    )
]
#: Enough to look at; the list of coverage points grows, and the texts kept here need not.
POINTS_SHOWN = (
    *(f"accept_len_{length}" for length in range(1, 5)),
    *("accept_len_1_and_full_in_one_batch", "batch_shrinks", "idle_tick", "non_final_chunk", "one_token_left"),
)
COST = Cost(
    boots=1,
    boot_seconds=23.2,
    waited_seconds=24.1,
    engine_seconds=13.7,
    reference_seconds=1.4,
    judge_seconds=0.1,
    store_seconds=0.6,
    total_seconds=39.1,
)

Break = Callable[[Trace], None]


def sound(_engine: Trace) -> None:
    """Leave the trace as it is."""


def one_ahead(engine: Trace) -> None:
    """Every draft step one position ahead, as in SGLang #25015."""
    engine.rows.ints["position"][engine.rows.strings["phase"] == Phase.DRAFT] += 1


def chunk_tail(engine: Trace) -> None:
    """A non-final chunk's last draft row holds another token than the prompt's, as in SGLang #26329."""
    tail = handmade.find(engine, phase=Phase.DRAFT_PREFILL, rid="r2", slot=7)
    engine.rows.ints["input_id"][tail] = 60


#: Of `store`: a run of one scenario that passes and one that fails, of which a reproducer is kept.
FAILING = (("single", sound), ("pr25015", one_ahead))
#: Of a run: everything that is kept of it and read again.
OF_A_RUN = ("manifest.json", "verdict.json", "SHA256SUMS")
OF_A_SCENARIO = (
    "scenario.json",
    "engine.json",
    "engine.parquet",
    "tensors/engine.safetensors",
    "reference.json",
    "reference.parquet",
    "tensors/reference.safetensors",
    "findings.jsonl",
    "verdict.json",
    "SHA256SUMS",
)


def traces(scenario: Scenario, break_it: Break = sound, header: dict[str, Any] | None = None) -> tuple[Trace, Trace]:
    """(engine, reference) of a scenario, the engine's broken in one way."""
    engine, reference = handmade.build(scenario)
    engine = replace(handmade.copy_trace(engine), header=HEADER if header is None else header)
    break_it(engine)
    return engine, reference


def named(name: str, **options: Any) -> Scenario:
    """A hand-made scenario of that name: three requests, the third in three chunks. name: as in a run."""
    return handmade.scenario(prompts=(7, 5, 19), **options).model_copy(update={"name": name})


def judged(
    name: str, break_it: Break = sound, *, identical: bool | None = True, header: dict[str, Any] | None = None, **o: Any
) -> ScenarioResult:
    """One scenario driven by the toy engine and really judged."""
    scenario = named(name, **o)
    engine, reference = traces(scenario, break_it, header)
    verdict, divergences = judge(scenario, engine, reference)
    coverage = {point: verdict.coverage[point] for point in POINTS_SHOWN}
    return result(scenario, replace(verdict, coverage=coverage), divergences, identical=identical, trace=engine)


def without_engine(name: str, why: str) -> ScenarioResult:
    """A scenario whose engine never came up."""
    return result(named(name), Verdict(outcome=Outcome.UNKNOWN, reasons=(why,)), [], identical=None)


def with_divergences(name: str, *divergences: Divergence, identical: bool | None = True) -> ScenarioResult:
    """A failing scenario with these divergences and nothing else."""
    kinds = tuple(sorted({str(found.kind) for found in divergences}))
    roots = tuple(sorted({str(found.kind) for found in divergences if not found.cause}))
    verdict = Verdict(outcome=Outcome.FAIL, reasons=("made by hand",), kinds=kinds, root_kinds=roots)
    return result(named(name), verdict, divergences, identical=identical)


def result(
    scenario: Scenario,
    verdict: Verdict,
    divergences: Sequence[Divergence],
    *,
    identical: bool | None,
    trace: Trace | None = None,
) -> ScenarioResult:
    place = f"{scenario.name}-{ID}"
    nothing = Trace(side="engine", scenario_id=scenario.id, header={}, rows=RowBuilder().build())
    reproducer = RUN / "reproducers" / place if divergences else None
    found = ScenarioResult.of(
        scenario,
        trace or nothing,
        None,
        verdict,
        divergences,
        setup=Setup(release="0.5.23"),
        folder=RUN / place,
        reproducer=reproducer,
    )
    return replace(found, text_identical=identical, known={})


def run_of(*results: ScenarioResult, revert: int | None = None, cost: Cost = COST, **header: Any) -> RunResult:
    """A finished run of these."""
    full = {**HEADER, "revert": revert, **header}
    return RunResult(
        folder=RUN,
        engine=full["release"],
        device="cpu",
        revert=revert,
        header=full,
        results=results,
        verdict=merge([one.verdict for one in results]),
        cost=cost,
    )


def store(
    root: Path,
    *cases: tuple[str, Break],
    finish: bool = True,
    scenario: dict[str, Any] | None = None,
    manifest: dict[str, Any] | None = None,
) -> Path:
    """A run folder on disk with these scenarios, reproducers included; cut off before its verdict unless `finish`.

    scenario: what handmade.scenario is to make, instead of three requests; manifest: what is known of the run.
    """
    options = {"prompts": (7, 5, 19), **(scenario or {})}
    known = {"engine": {"release": "0.5.23", "device": "cpu", "revert": None}}
    writer = RunWriter.create(root, manifest=manifest or known)
    writer.append_event({"event": "boot"})
    verdicts = []
    for name, break_it in cases:
        program = handmade.scenario(**options).model_copy(update={"name": name})
        writer.append_event({"event": "scenario", "name": name, "id": program.id})
        engine, reference = traces(program, break_it)
        verdict, divergences = judge(program, engine, reference)
        verdicts.append(verdict)
        writer.save_scenario(program, engine=engine, reference=reference, verdict=verdict, divergences=divergences)
        if divergences:
            folder = writer.folder / "reproducers" / f"{name}-{program.id}"
            first = next(found for found in divergences if found.first)
            write_reproducer(
                folder,
                program,
                engine=engine,
                reference=reference,
                divergences=divergences,
                signature=first.signature,
                replay=f"eaglecheck replay {folder}",
            )
    if finish:
        writer.finish(merge(verdicts))
    writer.close()
    return writer.folder


def stable(text: str) -> str:
    """Without what differs from run to run and from version to version: its time, ids, the list of coverage points."""
    text = re.sub(r"\d{8}-\d{4}-[0-9a-f]{4}", RUN.name, text)
    text = re.sub(r"-[0-9a-f]{12}\b", f"-{ID}", text)
    text = re.sub(r"began [\d-]{10} \d\d:\d\d UTC", "began …", text)
    return re.sub(r"(coverage points seen\n)(  .*\n)+", r"\1  …\n", text)


def reseal(run: Path) -> None:
    """Digests as if what now lies in the run had been written so; of the innermost folders first."""
    for sums in sorted(run.rglob(digests.SUMS), key=lambda path: -len(path.parts)):
        inner = [sums.parent / name for name in digests.read_sums(sums.parent)]
        sums.write_bytes(digests.sums_of(sums.parent, [path for path in inner if path.is_file()], also={}))


def store_without_engine(root: Path, name: str, why: str) -> Path:
    """A run folder whose one scenario had no engine."""
    writer = RunWriter.create(root, manifest={"engine": {"release": "0.5.23", "device": "cpu", "revert": None}})
    scenario, verdict = named(name), Verdict(outcome=Outcome.UNKNOWN, reasons=(why,))
    empty = Trace(side="engine", scenario_id=scenario.id, header={}, rows=RowBuilder().build())
    writer.save_scenario(scenario, engine=empty, reference=None, verdict=verdict, divergences=[])
    writer.finish(verdict)
    return writer.folder


def _found(kind: Kind, check: str, phase: str, expected: Any, observed: Any, **more: Any) -> Divergence:
    place = {"dp_rank": 0, "rid": "r1", "attempt": 0, "committed": 57, "step": 0, "slot": 0}
    place |= {name: more.pop(name) for name in tuple(more) if name in place}
    return Divergence(
        kind=kind,
        check=check,
        key=RowKey(phase=phase, **place),
        round=more.pop("round", 12),
        expected=expected,
        observed=observed,
        **more,
    )


_NUMERIC = {"mismatched": 60, "of": 64, "greatest_abs": 1.25, "greatest_rel": 0.31, "at": 17}

#: One divergence of every kind, as the checks make them.
EVERY_KIND: dict[Kind, Divergence] = {
    found.kind: found
    for found in (
        _found(
            Kind.TOKEN, "chain", Phase.DRAFT, 17, 203, step=1, policy=Policy.TIE, margin=0.75, hint="choice-runner-up"
        ),
        _found(Kind.POSITION, "positions", Phase.DRAFT, 58, 59, step=1, dp_rank=1, hint="one-ahead"),
        _found(Kind.PARENT, "positions", Phase.VERIFY, 0, 1, slot=2),
        _found(Kind.ACCEPT, "verify", Phase.ACCEPT, 3, 2, slot=1),
        _found(Kind.EXTEND_INPUT, "inputs", Phase.DRAFT_PREFILL, 10, 213, slot=31, hint="chunk-tail-target-guess"),
        _found(Kind.CACHE_SLOT, "slots", Phase.VERIFY, "a slot of its own", 44, hint="owned-by-another"),
        _found(
            Kind.NUMERIC,
            "extend",
            Phase.EXTEND,
            {"limit_abs": 1e-4},
            _NUMERIC,
            policy=Policy.BUDGET,
            hint="hidden_in-previous-row",
        ),
        _found(Kind.STATE, "recurrent", Phase.VERIFY, "that of its 57 tokens", "that of 56 (state)", hint="token-late"),
        _found(Kind.SHAPE, "rounds", Phase.IDLE, 64, 192, rid="", committed=-1, hint="idle-width"),
        _found(Kind.MISSING_ROW, "align", Phase.EXTEND, "present", "missing", slot=2),
        _found(Kind.EXTRA_ROW, "align", Phase.ACCEPT, "missing", "present", slot=3, hint="too-many"),
        _found(Kind.LOCKSTEP, "rounds", Phase.DRAFT, 2, 0, rid="", committed=-1, dp_rank=1),
        _found(Kind.LEAK, "ledger", Phase.IDLE, 4096, 4090, rid="", committed=-1, round=-1, hint="lost"),
        _found(
            Kind.CRASH,
            "ledger",
            Phase.VERIFY,
            "no crash",
            "RuntimeError: shape mismatch at srt/speculative/eagle_utils.py:verify",
            attempt=1,
        ),
        _found(Kind.HANG, "ledger", Phase.IDLE, "an answer within 120 s", "none", rid="", committed=-1, dp_rank=1),
        _found(Kind.NONDETERMINISM, "repeat", Phase.DRAFT, 17, 203),
    )
}


def asked(name: str, operator: str = "slice", file: str = "srt/speculative/one.py") -> Asked:
    """A mutant of SGLang's source."""
    return Asked(id=name, file=file, line=3, function="f", operator=operator, what="a -> b", start=0, end=1, after="b")


def campaign(*mutants: Asked) -> Campaign:
    """What `eaglecheck mutate` was asked for."""
    return Campaign(
        engine="0.5.23", device="cpu", families=("eagle",), seed=1, examples=0, left_out=(), mutants=mutants
    )
