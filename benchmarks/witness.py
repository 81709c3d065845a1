"""The witness against the paper provider: the same runs judged by both, on pairs that both know.

    .venv/bin/python -m benchmarks.witness [--engine 0.5.23] [--pair eagle-tiny] [--folder PAIRS/NAME] [--json FILE]

Each case is driven once, then judged twice: a clean run of every batch shape, F-003 (a tree of four steps), #26329 put
back by SGLang's own switch, and six mutants of batching, cache and chunking. --pair, --folder: as often as wanted; a
folder holds `target` and `draft`, or a target with MTP layers alone. Prints a Markdown table; exits 1 if a verdict
differs, or where a mutant or defect is not found by both.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks._bench import ended, machine
from cases import catalogue, checkpoints, fixed, pairs
from cases.programs import EXERCISES
from harness.both_sides.mutants import MUTANTS
from harness.contract.outputs import check_target
from harness.contract.scenario import Scenario
from harness.contract.settings import SpecConfig
from harness.contract.trace import Trace
from harness.contract.types import Outcome, Verdict
from harness.driving.judging import judge_scenario, load_oracle
from harness.driving.own_pair import own_pair
from harness.driving.plan import Setup
from harness.driving.pool import EnginePool
from harness.driving.witness_trace import ask
from harness.engines import envs
from harness.engines.errors import EngineError
from harness.engines.launch import build_launch
from harness.search.mutants import with_mutant
from reference.checkpoint import CheckpointError

#: Our own pairs, which need no files; with five of published shape they make ten.
PAIRS = ("eagle-tiny", "qwen3-eagle", "eagle3-tiny", "mla-tiny", "trained-eagle3")
#: Mutants of batching, of what is kept, and of chunking; the need of each names its exercises.
CHOSEN = (
    "hidden-neighbour",
    "hidden-neighbour-extend",
    "hidden-previous-round",
    "slot-of-neighbour-draft",
    "tail-chunk-border",
    "chunk-position-restarts",
)
REVERT, TREE = 26329, {"num_steps": 4, "eagle_topk": 4, "num_draft_tokens": 16}
#: New tokens of a request in the tree: so many rounds that a beam on the greedy path moves to another slot.
TOKENS = 48
#: What a clean run drives: a batch, chunks, a prefix that is cached, and an abort.
CLEAN, SHAPES = "clean", ("four-together", "chunk-borders", "shared-prefix", "abort-midway")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFolders:
    """A pair under its name, with how it drafts and how many tokens it knows."""

    name: str
    target: Path
    draft: Path
    spec: SpecConfig
    vocab: int


@dataclass(slots=True, kw_only=True)
class Case:
    """One scenario of a pair. judged: provider -> verdict, once it is there; error: why it was not driven."""

    pair: PairFolders
    name: str
    scenario: Scenario
    revert: int | None = None
    trace: Trace | None = None
    judged: dict[str, Verdict] = field(default_factory=dict)
    error: str = ""


def pairs_of(names: Sequence[str], folders: Sequence[Path]) -> Iterator[PairFolders]:
    """Our own pairs by name, others by folder."""
    chain = SpecConfig(num_steps=3, num_draft_tokens=4)
    made = [checkpoints.make(name, envs.home() / "checkpoints") for name in names]
    places = [(name, one.target, one.draft) for name, one in zip(names, made, strict=True)]
    places += [(one.name, one / "target", one / "draft") for one in folders]
    for name, target, draft in places:
        own = own_pair(target, draft if draft.is_dir() else None)
        assert own is not None
        spec = chain.model_copy(update={"algorithm": own.algorithm})
        yield PairFolders(name=name, target=own.folders[0], draft=own.folders[1], spec=spec, vocab=own.vocab)


def cases_of(pair: PairFolders) -> Iterator[Case]:
    """Everything that is asked of a pair."""
    for one in fixed.shapes(spec=pair.spec, only=SHAPES):
        yield Case(pair=pair, name=CLEAN, scenario=_fitted(one, pair))
    tree = pair.spec.model_copy(update=TREE)
    together = EXERCISES["chain"][0]
    longer = tuple(one.model_copy(update={"max_new_tokens": TOKENS}) for one in together.requests)
    together = together.model_copy(update={"spec": tree, "name": "tree", "requests": longer})
    yield Case(pair=pair, name="F-003", scenario=_fitted(together, pair))
    case = catalogue.load("pr26329").scenario.model_copy(update={"spec": pair.spec})
    yield Case(pair=pair, name=f"#{REVERT} put back", scenario=_fitted(case, pair), revert=REVERT)
    for name in CHOSEN:
        exercise = EXERCISES[MUTANTS[name].needs][0].model_copy(update={"spec": pair.spec})
        yield Case(pair=pair, name=name, scenario=with_mutant(_fitted(exercise, pair), MUTANTS[name]))


def _fitted(scenario: Scenario, pair: PairFolders) -> Scenario:
    """With tokens that the pair knows; without wishes, whose accept lengths are another pair's."""
    requests = tuple(
        one.model_copy(update={"input_ids": tuple(token % pair.vocab for token in one.input_ids), "stop_token_ids": ()})
        for one in scenario.requests
    )
    return scenario.model_copy(update={"requests": requests, "wants": ()})


class Drives:
    """One engine at a time, forked where that is possible."""

    def __init__(self, version: str, logs: Path) -> None:
        self.env = envs.ensure(version, print)
        self.pool = EnginePool(logs=logs, copies=True)

    def __call__(self, scenario: Scenario, pair: PairFolders, revert: int | None) -> Trace:
        launch = build_launch(
            env=self.env,
            spec=scenario.spec,
            engine=scenario.engine,
            target=pair.target,
            draft=pair.draft,
            revert=revert,
        )
        return self.pool.drive(launch, scenario)


def run(cases: Sequence[Case], drives: Drives, *, release: str) -> None:
    """Drive and judge them, those of one boot configuration behind each other, their witnesses last."""
    setup = Setup(release=release)
    for case in sorted(cases, key=lambda one: one.scenario.boot_key()):
        try:
            case.trace = drives(case.scenario, case.pair, case.revert)
        except EngineError as error:
            case.error = str(error).splitlines()[0]
    oracle = load_oracle(cases[0].pair.target, cases[0].pair.draft, ())
    for case in cases:
        if case.trace is None:
            continue
        case.judged["paper"] = judge_scenario(
            case.scenario, case.trace, oracle.answer(case.scenario, case.trace), setup=setup
        ).verdict
        reference = ask(case.scenario, case.trace, partial(drives, pair=case.pair, revert=case.revert))
        case.judged["witness"] = judge_scenario(case.scenario, case.trace, reference, setup=setup).verdict
        case.trace = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the table. wanted: what both should say."""

    pair: str
    case: str
    verdicts: dict[str, str]
    rows: dict[str, int]
    wanted: Outcome
    error: str

    @property
    def good(self) -> bool:
        """Whether both give the verdict that is wanted. A defect may show as more kinds to one of them."""
        return self.outcomes == {str(self.wanted)}

    @property
    def outcomes(self) -> set[str]:
        """What either says, without the kinds."""
        return {self.verdicts.get(provider, "nothing").split()[0] for provider in ("paper", "witness")}


def lines_of(cases: Sequence[Case]) -> Iterator[Line]:
    """A line a case; the clean scenarios of a pair are one."""
    for name in dict.fromkeys(case.name for case in cases):
        own = [case for case in cases if case.name == name]
        found: dict[str, list[Verdict]] = {}
        for case in own:
            for provider, verdict in case.judged.items():
                found.setdefault(provider, []).append(verdict)
        yield Line(
            pair=own[0].pair.name,
            case=f"{name} ({len(own)} scenarios)" if len(own) > 1 else name,
            verdicts={provider: _said(verdicts) for provider, verdicts in found.items()},
            rows={
                provider: sum(one.compared.get(name, 0) for one in verdicts for name in ("hidden_rows", "logits"))
                for provider, verdicts in found.items()
            },
            wanted=Outcome.PASS if name == CLEAN else Outcome.FAIL,
            error="; ".join(dict.fromkeys(case.error for case in own if case.error)),
        )


def _said(verdicts: Sequence[Verdict]) -> str:
    kinds = sorted({kind for one in verdicts for kind in one.root_kinds})
    return f"{Verdict.merge([one.outcome for one in verdicts])} {', '.join(kinds)}".strip()


def table(lines: Sequence[Line]) -> Iterator[str]:
    """A line a pair, a column a case: what both said, else what the paper provider and the witness said."""
    cases = list(dict.fromkeys(line.case for line in lines))
    yield f"| pair | {' | '.join(cases)} | rows by paper, witness |"
    yield "| --- " * (len(cases) + 2) + "|"
    for pair in dict.fromkeys(line.pair for line in lines):
        own = {line.case: line for line in lines if line.pair == pair}
        cells = [_cell(own[case]) if case in own else "-" for case in cases]
        rows = [sum(line.rows.get(provider, 0) for line in own.values()) for provider in ("paper", "witness")]
        yield f"| {pair} | {' | '.join(cells)} | {rows[0]}, {rows[1]} |"


def _cell(line: Line) -> str:
    said = list(dict.fromkeys(line.verdicts.get(provider, line.error or "-") for provider in ("paper", "witness")))
    return " / ".join(said) if line.good else f"**{' / '.join(said)}**"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engine", default=envs.NEWEST)
    parser.add_argument("--pair", action="append", default=[], choices=list(pairs.RECIPES))
    parser.add_argument("--folder", action="append", default=[], type=Path)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    check_target(chosen.json)
    names = chosen.pair or ([] if chosen.folder else list(PAIRS))
    found: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="eaglecheck-witness-") as folder:
        drives = Drives(chosen.engine, Path(folder))
        try:
            for revert in (None, REVERT):  # a process that engines are forked from has read the switch
                for pair in pairs_of(names, chosen.folder):
                    cases = [case for case in cases_of(pair) if case.revert == revert]
                    try:
                        run(cases, drives, release=chosen.engine)
                    except CheckpointError as error:
                        print(f"{pair.name} is left out: {error}")
                        continue
                    found += lines_of(cases)
                    print(f"{pair.name}: {len(found)} lines", file=sys.stderr, flush=True)
        finally:
            drives.pool.end()
    print("\n".join(table(found)))
    good = sum(line.good for line in found)
    print(f"\nSGLang {chosen.engine}: {good} of {len(found)} lines as wanted by both; {machine()}")
    if chosen.json:
        rows = [{"pair": one.pair, "case": one.case, "verdicts": one.verdicts, "rows": one.rows} for one in found]
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if good == len(found) else 1


if __name__ == "__main__":
    ended(main)
