"""The reports of `eaglecheck mutants` and `mutate`: mutant by check, and what is wrong.

It must not judge, and must not import torch or sglang.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from harness.contract.words import counted, percent
from harness.search.mutant_results import Asked, Result, Status
from harness.search.mutants_report import EXCUSED, Report, Score, Step
from harness.search.mutate_report import Report as MutateReport
from harness.search.mutate_report import worst
from reports.live import PULSE_SECONDS, STYLE, StatusLine
from reports.prose import heading, say

STYLES = {Status.KILLED: "green", Status.SURVIVED: "bold red", Status.NOT_RUN: "yellow", Status.BROKEN: "bold red"}
SAME_TEXT = {True: "same", False: "differs", None: "-"}


class MutantLine(StatusLine):
    """The live line of a campaign: use as a context manager, and as its observer."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._last = time.monotonic()

    def __call__(self, step: Step) -> None:
        place = f"mutant {step.index:>{len(str(step.total))}}/{step.total}"
        now = time.monotonic()
        if step.score is not None:
            self._last = now
            say(self._console, _line(place, step.score))
        elif self._status is not None:
            self._status.update(Text(f"{place} {step.text}"))
        elif now - self._last >= PULSE_SECONDS:
            self._last = now
            say(self._console, f"{place} {step.text}")


def _line(place: str, score: Score) -> Text:
    line = Text(f"{place} {score.mutant.id:<30} ")
    line.append(str(score.status), style=STYLES[score.status])
    return line.append(f"  {', '.join(score.kinds) if score.status is Status.KILLED else score.why}")


def render_mutants_report(console: Console, report: Report, *, again: Callable[[str], str]) -> None:
    """The matrix, then each mutant that is not killed, each check that kills nothing, and the verdict.

    again: the command that asks mutants of these names once more. Where no mutant ran nobody can have killed any, and
    there is no matrix.
    """
    if any(score.status is not Status.NOT_RUN for score in report.scores):
        _matrix(console, report)
    _complain(console, report, again)
    _sum_up(console, report)


def _matrix(console: Console, report: Report) -> None:
    names = list(report.by_check)
    heading(console, f"mutants on SGLang {report.engine}: who kills what")
    for number, name in enumerate(names):
        say(console, f"  {'│ ' * number}┌ {name}")
    for family in dict.fromkeys(score.mutant.family for score in report.scores):
        say(console, f"  {'│ ' * len(names)}{family}", style="bold")
        for score in report.scores:
            if score.mutant.family == family:
                say(console, _row(names, score))


def _row(names: Sequence[str], score: Score) -> Text:
    row = Text("  ")
    for name in names:
        row.append("× " if score.status is Status.KILLED and name in score.killed_by else "· ")
    row.append(f"  {score.mutant.id:<30} ")
    row.append(f"{score.status!s:<9}", style=STYLES[score.status])
    examples = f"{score.examples} example" + ("s" if score.examples != 1 else " ")
    return row.append(f" {examples}  text {SAME_TEXT[score.text_identical]:<8} {' '.join(score.kinds)}")


def _complain(console: Console, report: Report, again: Callable[[str], str]) -> None:
    for what in report.unsound:
        say(console, f"unsound without a mutant: {what}", style="bold")
    reasons: dict[tuple[Status, str], list[str]] = {}
    for score in report.scores:
        if score.status is not Status.KILLED:
            reasons.setdefault((score.status, score.why), []).append(score.mutant.id)
    for (status, why), ids in reasons.items():
        say(console, f"{status}: {', '.join(ids)}", style=STYLES[status])
        say(console, f"  because: {why}")
        if status is not Status.NOT_RUN:
            say(console, f"  look again:  {again(','.join(ids))}")
    for name in report.idle_checks:
        say(console, f"check {name} kills no mutant: it proves nothing; find it one, or remove it", style="bold red")
    for name, why in EXCUSED.items() if report.whole else ():
        say(console, f"check {name} has no mutant here: {why}")


def _sum_up(console: Console, report: Report) -> None:
    counts = Counter(score.status for score in report.scores)
    each = ", ".join(f"{counts[status]} {str(status).lower()}" for status in Status if counts[status])
    busy = sum(bool(killed) for killed in report.by_check.values())
    say(console)
    checks = f"; {busy} of {len(report.by_check)} checks kill at least one"
    if set(counts) <= {Status.NOT_RUN}:
        checks = ", so no check was asked"
    mutants = ", ".join(filter(None, [counted(len(report.scores), "mutant"), each]))
    say(console, f"verdict {report.outcome}: {mutants}{checks}", style=STYLE[report.outcome])


def line_of(mutant: Asked, became: Result) -> str:
    """What became of a mutant of the source, and what that took."""
    by = f"{became.check} {', '.join(became.kinds)}" if became.end is Status.KILLED else became.why
    took = f"{became.seconds:.0f} s, {counted(len(became.asked), 'scenario')}"
    return " ".join(f"{mutant.id} {mutant.operator}: {became.end} {by}".split()) + f" ({took})"


def render_mutate_report(console: Console, report: MutateReport) -> None:
    """Files and operators, who else would have seen it, what is left to look at, and the verdict last."""
    campaign = report.campaign
    heading(console, f"mutants of SGLang {campaign.engine}'s source, seed {campaign.seed}")
    for what in campaign.left_out:
        say(console, f"not used, since it does not pass without a mutant: {what}", style="yellow")
    for name, counts in (*report.by(lambda one: one.file).items(), *report.by(lambda one: one.operator).items()):
        say(console, f"  {name:<60} {_each(counts)}")
    _who(console, report)
    for line in report.lines:
        if line.explained is not None and line.stands == "killed":
            say(console, f"explained as a survivor, and killed: {line.mutant.id}: {line.explained.why}", style="yellow")
    for line in worst(report.lines):
        why = f": {line.explained.kind}: {line.explained.why}" if line.explained else ""
        rows = "rows differ" if line.result.rows else "rows are the same"
        say(console, f"{line.stands}: {line.mutant.id} {line.mutant.where} {line.mutant.operator}, {rows}{why}")
        say(console, f"  {line.mutant.function}: {line.mutant.what}")
    middle, mean = report.seconds
    asked = f"{len(report.lines)} of {counted(len(campaign.mutants), 'mutant')} asked"
    took = f", {_each(report.counts)}; {middle:.0f} s a mutant (median; mean {mean:.0f})" if report.lines else ""
    if not campaign.mutants:
        asked = "no line ran that could be written wrong"
    say(console, f"verdict {report.outcome}: {asked}{took}", style=STYLE[report.outcome])


def _who(console: Console, report: MutateReport) -> None:
    """Who would have seen how many; apart from the engines that ended, which everybody sees, where any went on."""
    faults, ended = len(report.faults), sum(line.result.ended for line in report.faults)
    if not faults:
        return
    apart = faults - ended
    say(console, f"seen over the same runs, of {counted(faults, 'mutant')} not equivalent, by")
    say(console, f"  {'':<28} all {faults:>4}" + (f"    engine alive {apart:>4}" if apart else ""))
    for name, seen in report.beside().items():
        more = f"    {seen - ended:>9} {percent(seen - ended, apart, 1):>7}" if apart else ""
        say(console, f"  {name:<28} {seen:>4} {percent(seen, faults, 1):>7}{more}")


def _each(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])))
