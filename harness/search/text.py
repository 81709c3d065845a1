"""The scoreboards of `eaglecheck mutants` and `mutate`: mutant by check, and what is wrong.

It must not judge, and must not import torch or sglang.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from harness.contract.words import counted, percent
from harness.search.board import Board, worst
from harness.search.fates import Asked, End
from harness.search.fates import Fate as Became
from harness.search.scoreboard import EXCUSED, Fate, Score, Scoreboard, Step
from reports.live import PULSE_SECONDS, STYLE, StatusLine
from reports.prose import heading, say

FATES = {Fate.KILLED: "green", Fate.SURVIVED: "bold red", Fate.NOT_RUN: "yellow", Fate.BROKEN: "bold red"}
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
    line.append(str(score.fate), style=FATES[score.fate])
    return line.append(f"  {', '.join(score.kinds) if score.fate is Fate.KILLED else score.why}")


def render_scoreboard(console: Console, board: Scoreboard, *, again: Callable[[str], str]) -> None:
    """The matrix, then each mutant that is not killed, each check that kills nothing, and the verdict.

    again: the command that asks mutants of these names once more. Where no mutant ran nobody can have killed any, and
    there is no matrix.
    """
    if any(score.fate is not Fate.NOT_RUN for score in board.scores):
        _matrix(console, board)
    _complain(console, board, again)
    _sum_up(console, board)


def _matrix(console: Console, board: Scoreboard) -> None:
    names = list(board.by_check)
    heading(console, f"mutants on SGLang {board.engine}: who kills what")
    for number, name in enumerate(names):
        say(console, f"  {'│ ' * number}┌ {name}")
    for family in dict.fromkeys(score.mutant.family for score in board.scores):
        say(console, f"  {'│ ' * len(names)}{family}", style="bold")
        for score in board.scores:
            if score.mutant.family == family:
                say(console, _row(names, score))


def _row(names: Sequence[str], score: Score) -> Text:
    row = Text("  ")
    for name in names:
        row.append("× " if score.fate is Fate.KILLED and name in score.killed_by else "· ")
    row.append(f"  {score.mutant.id:<30} ")
    row.append(f"{score.fate!s:<9}", style=FATES[score.fate])
    examples = f"{score.examples} example" + ("s" if score.examples != 1 else " ")
    return row.append(f" {examples}  text {SAME_TEXT[score.text_identical]:<8} {' '.join(score.kinds)}")


def _complain(console: Console, board: Scoreboard, again: Callable[[str], str]) -> None:
    for what in board.unsound:
        say(console, f"unsound without a mutant: {what}", style="bold")
    reasons: dict[tuple[Fate, str], list[str]] = {}
    for score in board.scores:
        if score.fate is not Fate.KILLED:
            reasons.setdefault((score.fate, score.why), []).append(score.mutant.id)
    for (fate, why), ids in reasons.items():
        say(console, f"{fate}: {', '.join(ids)}", style=FATES[fate])
        say(console, f"  because: {why}")
        if fate is not Fate.NOT_RUN:
            say(console, f"  look again:  {again(','.join(ids))}")
    for name in board.idle_checks:
        say(console, f"check {name} kills no mutant: it proves nothing; find it one, or remove it", style="bold red")
    for name, why in EXCUSED.items() if board.whole else ():
        say(console, f"check {name} has no mutant here: {why}")


def _sum_up(console: Console, board: Scoreboard) -> None:
    counts = Counter(score.fate for score in board.scores)
    each = ", ".join(f"{counts[fate]} {str(fate).lower()}" for fate in Fate if counts[fate])
    busy = sum(bool(killed) for killed in board.by_check.values())
    say(console)
    checks = f"; {busy} of {len(board.by_check)} checks kill at least one"
    if set(counts) <= {Fate.NOT_RUN}:
        checks = ", so no check was asked"
    mutants = ", ".join(filter(None, [counted(len(board.scores), "mutant"), each]))
    say(console, f"verdict {board.outcome}: {mutants}{checks}", style=STYLE[board.outcome])


def line_of(mutant: Asked, became: Became) -> str:
    """What became of a mutant of the source, and what that took."""
    by = f"{became.check} {', '.join(became.kinds)}" if became.end is End.KILLED else became.why
    took = f"{became.seconds:.0f} s, {counted(len(became.asked), 'scenario')}"
    return " ".join(f"{mutant.id} {mutant.operator}: {became.end} {by}".split()) + f" ({took})"


def render_board(console: Console, board: Board) -> None:
    """Files and operators, who else would have seen it, what is left to look at, and the verdict last."""
    campaign = board.campaign
    heading(console, f"mutants of SGLang {campaign.engine}'s source, seed {campaign.seed}")
    for what in campaign.left_out:
        say(console, f"not used, since it does not pass without a mutant: {what}", style="yellow")
    for name, counts in (*board.by(lambda one: one.file).items(), *board.by(lambda one: one.operator).items()):
        say(console, f"  {name:<60} {_each(counts)}")
    _who(console, board)
    for line in board.lines:
        if line.explained is not None and line.stands == "killed":
            say(console, f"explained as a survivor, and killed: {line.mutant.id}: {line.explained.why}", style="yellow")
    for line in worst(board.lines):
        why = f": {line.explained.kind}: {line.explained.why}" if line.explained else ""
        rows = "rows differ" if line.fate.rows else "rows are the same"
        say(console, f"{line.stands}: {line.mutant.id} {line.mutant.where} {line.mutant.operator}, {rows}{why}")
        say(console, f"  {line.mutant.function}: {line.mutant.what}")
    middle, mean = board.seconds
    asked = f"{len(board.lines)} of {counted(len(campaign.mutants), 'mutant')} asked"
    took = f", {_each(board.counts)}; {middle:.0f} s a mutant (median; mean {mean:.0f})" if board.lines else ""
    if not campaign.mutants:
        asked = "no line ran that could be written wrong"
    say(console, f"verdict {board.outcome}: {asked}{took}", style=STYLE[board.outcome])


def _who(console: Console, board: Board) -> None:
    """Who would have seen how many; apart from the engines that ended, which everybody sees, where any went on."""
    faults, ended = len(board.faults), sum(line.fate.ended for line in board.faults)
    if not faults:
        return
    apart = faults - ended
    say(console, f"seen over the same runs, of {counted(faults, 'mutant')} not equivalent, by")
    say(console, f"  {'':<28} all {faults:>4}" + (f"    engine alive {apart:>4}" if apart else ""))
    for name, seen in board.beside().items():
        more = f"    {seen - ended:>9} {percent(seen - ended, apart, 1):>7}" if apart else ""
        say(console, f"  {name:<28} {seen:>4} {percent(seen, faults, 1):>7}{more}")


def _each(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])))
