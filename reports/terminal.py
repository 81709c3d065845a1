"""What a person sees in a terminal: a live line while running, then tables, findings and a verdict.

It must not judge, and must not import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table
from rich.text import Text

from harness.checks.describe import describe
from harness.progress import Booted, Judged, Preparing, Progress, RunResult, ScenarioResult, Started, Turned
from harness.types import Outcome, Verdict

STYLE = {Outcome.PASS: "bold green", Outcome.FAIL: "bold red", Outcome.UNKNOWN: "bold yellow"}

#: compared counter -> heading
COMPARED = {
    "positions": "positions",
    "tokens": "tokens",
    "proposals": "proposals",
    "accepts": "accepts",
    "extend_inputs": "extend inputs",
    "cache_slots": "cache slots",
    "parents": "parents",
    "hidden_rows": "hidden rows",
    "logits": "logit rows",
}


class LiveLine:
    """Observer: one live line on a terminal, one printed line a scenario elsewhere. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = Status("starting", console=console) if console.is_terminal else None
        self._now = ""
        self._said = ""

    def __enter__(self) -> LiveLine:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, event: Progress) -> None:
        match event:
            case Preparing(text=text):
                self._show(text, once=text.split("(")[0])
            case Booted(header=header, seconds=seconds):
                self._console.print(boot_line(header, seconds), highlight=False)
            case Started(scenario=scenario, index=index, total=total):
                self._now = f"scenario {index}/{total} {scenario.name}"
                self._show(self._now, once="")
            case Turned(tick=tick, state=state):
                waiting = len(state.get("waiting", ()))
                self._show(f"{self._now}: turn {tick}, {len(state.get('running', ()))} running, {waiting} waiting", once="")
            case Judged(result=result):
                self._console.print(scenario_line(self._now, result), highlight=False)

    def _show(self, text: str, *, once: str) -> None:
        """The live line; without a terminal only `once`, and only when it changes."""
        if self._status is not None:
            self._status.update(escape(text))
        elif once and once != self._said:
            self._said = once
            self._console.print(escape(once.strip()), highlight=False)


def boot_line(header: dict[str, Any], seconds: float) -> str:
    """Which engine answered, and how much of it is not its own."""
    ours = [item["operation"].split(".")[-1] for item in header.get("replaced", []) if item["by"] == "stand-in"]
    schedule = "overlap" if header.get("overlap") else "normal"
    stands = f"; our stand-ins: {', '.join(ours)}" if ours else ""
    return (
        f"SGLang {header.get('release')} on {header.get('device')}: {header.get('worker')}, {schedule} loop, "
        f"{header.get('backend')}, {header.get('dtype')}, torch {header.get('torch')}, booted in {seconds:.0f} s{stands}"
    )


def scenario_line(now: str, result: ScenarioResult) -> Text:
    line = Text(f"{now:<40} ")
    line.append(str(result.verdict.outcome), style=STYLE[result.verdict.outcome])
    roots = [finding for finding in result.findings if finding.is_root]
    if roots:
        line.append(f"  {', '.join(sorted({str(finding.first.kind) for finding in roots}))}")
    elif result.verdict.outcome is Outcome.UNKNOWN and result.verdict.reasons:
        line.append(f"  {result.verdict.reasons[0].splitlines()[0]}")
    return line


def render_run(console: Console, result: RunResult) -> None:
    """Counts, situations, findings, cost, verdict."""
    console.print()
    console.print(counts_table(result))
    console.print(situations_table(result.verdict))
    render_findings(console, result.results)
    render_cost(console, result)
    render_verdict(console, result)


def counts_table(result: RunResult) -> Table:
    """What was compared and how much of it differed."""
    table = Table(title=f"SGLang {result.engine} against the reference", title_justify="left")
    table.add_column("what")
    table.add_column("count", justify="right")
    table.add_row("scenarios", str(len(result.results)))
    table.add_row("rounds", str(sum(one.rounds for one in result.results)))
    table.add_row("draft steps", str(sum(one.draft_steps for one in result.results)))
    for name, heading in COMPARED.items():
        if name in result.verdict.compared:
            table.add_row(f"{heading} compared", str(result.verdict.compared[name]))
    mismatches = sum(finding.count for one in result.results for finding in one.findings)
    table.add_row("mismatches", str(mismatches), style="bold red" if mismatches else "")
    table.add_row("ties", str(result.verdict.ties))
    return table


def situations_table(verdict: Verdict) -> Table:
    """Situations that the traces prove, with counts."""
    table = Table(title="situations seen", title_justify="left")
    table.add_column("situation")
    table.add_column("count", justify="right")
    for name, count in sorted(verdict.coverage.items()):
        if count:
            table.add_row(name, str(count))
    return table


def render_findings(console: Console, results: Sequence[ScenarioResult], *, most: int = 8) -> None:
    """Every root finding of every failing scenario, the first `most` in full."""
    shown = 0
    for one in results:
        roots = [finding for finding in one.findings if finding.is_root]
        for finding in roots:
            shown += 1
            if shown > most:
                continue
            console.print()
            console.print(Text(describe(finding.first, one.scenario, finding=finding)), highlight=False)
        if roots and shown <= most:
            consequences = sum(finding.count for finding in one.findings if not finding.is_root)
            console.print(f"  {consequences} more divergences of this scenario follow from what is named above", highlight=False)
            console.print(f"  {text_fact(one.text_identical)}", highlight=False)
            if one.specimen is not None:
                console.print(f"  run it again:  eaglecheck replay {one.specimen}", highlight=False, soft_wrap=True)
    if shown > most:
        console.print(f"\n{shown - most} more findings; all of them:  findings.jsonl in each scenario's folder")


def text_fact(identical: bool | None) -> str:
    """The reason this project exists, said for one scenario."""
    if identical is None:
        return "the engine produced no text to compare"
    if identical:
        return "the final text is identical to greedy decoding without speculation: no text comparison would show this"
    return "the final text differs from greedy decoding without speculation as well"


def render_cost(console: Console, result: RunResult) -> None:
    cost = result.cost
    console.print(
        f"\n{cost.boots} engine boot{'s' if cost.boots != 1 else ''} {cost.boot_seconds:.1f} s, "
        f"engine {cost.engine_seconds:.1f} s, reference {cost.reference_seconds:.1f} s, checks {cost.judge_seconds:.1f} s, "
        f"store {cost.store_seconds:.1f} s, in all {cost.total_seconds:.1f} s",
        highlight=False,
    )


def render_verdict(console: Console, result: RunResult) -> None:
    for reason in result.verdict.reasons:
        if reason.startswith("not exercised"):
            console.print(Text(reason), style="dim", soft_wrap=True)
    counts = {outcome: sum(one.verdict.outcome is outcome for one in result.results) for outcome in Outcome}
    line = Text("verdict ")
    line.append(str(result.verdict.outcome), style=STYLE[result.verdict.outcome])
    line.append(f"  ({', '.join(f'{count} {outcome}' for outcome, count in counts.items() if count)})")
    console.print(line)
    if result.verdict.outcome is Outcome.UNKNOWN:
        for reason in result.verdict.reasons:
            if not reason.startswith("not exercised"):
                console.print(f"  because: {escape(reason)}", highlight=False)
    console.print(f"run folder: {result.folder}", highlight=False, soft_wrap=True)
    console.print(f"judge it again without SGLang:  eaglecheck recheck {result.folder}", highlight=False, soft_wrap=True)


def render_matrix(console: Console, cells: Sequence[dict[str, Any]]) -> None:
    """One row a cell: verdict, what was expected of the release window, and the first wrong place."""
    table = Table(title="matrix", title_justify="left")
    for heading in ("engine", "case", "revert", "verdict", "expected", "kinds", "first wrong place", "text"):
        table.add_column(heading, overflow="fold")
    for cell in cells:
        style = STYLE[Outcome(cell["verdict"])]
        table.add_row(
            cell["engine"],
            cell["case"],
            str(cell["revert"] or "-"),
            Text(cell["verdict"], style=style),
            cell["expected"],
            " ".join(cell["kinds"]) or "-",
            _place(cell["first"]),
            {True: "identical", False: "differs", None: "-"}[cell["text_identical"]],
        )
    console.print(table)


def _place(first: dict[str, Any] | None) -> str:
    if first is None:
        return "-"
    return (
        f"{first['rid']} c={first['committed_len']} round {first['round']} {first['phase']} step {first['step']} "
        f"slot {first['slot']}: engine {first['observed']}, reference {first['expected']}"
    )
