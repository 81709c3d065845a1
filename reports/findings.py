"""Findings on a terminal: each root finding, whether text and draft chain are right, and what to type next.

It must not judge, and must not import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from harness.archive.again import run_again
from harness.checks.describe import describe
from harness.checks.findings import Finding
from harness.contract.known_issues import Known
from harness.contract.providers import WITNESS
from harness.contract.types import Divergence, Kind, Phase
from harness.contract.words import counted
from harness.driving.accept_lengths import AcceptLengths
from harness.driving.around import Around
from harness.driving.results import ScenarioResult
from reports.blame import UNKNOWN, server_flags, where, where_lines
from reports.prose import say

#: Kinds that are about the engine's processes and resource accounting, not about what was drafted or verified.
NOT_THE_CHAIN = (Kind.CRASH, Kind.HANG, Kind.LEAK, Kind.LOCKSTEP, Kind.NONDETERMINISM)
#: Said of a root finding that no page of docs/findings looks like, on that release and in such a scenario.
NEW = "known: nothing in docs/findings looks like it"
#: Checks of what the user gets, whatever was drafted.
ABOUT_THE_ANSWER = (
    *("finish", "losslessness", "texts", "counts", "streamed", "logprobs", "returned_states"),
    *("admission", "aborts", "retraction"),
)


def render_findings(
    console: Console,
    results: Sequence[ScenarioResult],
    *,
    most: int = 8,
    look: bool = True,
    printed: set[str] | None = None,
) -> None:
    """Every root finding of every failing scenario, the first `most` in full, then the facts and the commands.

    A signature in one part of SGLang is printed once, with the scenarios that show it too; a scenario that shows
    nothing else is only named.
    look: name the command that judges again; False where that is what was just done. printed: see `render_known`.
    """
    left, printed, shown = most, set() if printed is None else printed, set[tuple[str, str]]()
    for one in results:
        fresh = [finding for finding in roots_of(one) if _identity(one, finding) not in shown]
        if not fresh:
            continue
        shown |= {_identity(one, finding) for finding in fresh}
        for finding in fresh[: max(left, 0)]:
            say(console)
            render_finding(console, one, finding)
            render_known(console, one, finding.signature, printed=printed)
            same = _identity(one, finding)
            if also := [other.scenario.name for other in results if other is not one and same in _identities(other)]:
                say(console, f"  also in {counted(len(also), 'other scenario')}: {', '.join(also)}")
        if left > 0:
            render_next(console, one, look=look, printed=printed)
        left -= len(fresh)
    if left < 0:
        more = counted(-left, "more finding")
        say(console, f"\n{more}; all of them are in findings.jsonl in each scenario's folder")


def _identity(one: ScenarioResult, finding: Finding) -> tuple[str, str]:
    """Two defects may have one signature: where they are in SGLang tells them apart."""
    found = where(finding.first, one.scenario, one.setup.release, around_of(one, finding.signature))
    return finding.signature, found[0]


def _identities(one: ScenarioResult) -> set[tuple[str, str]]:
    return {_identity(one, finding) for finding in roots_of(one)}


def render_first(console: Console, one: ScenarioResult, *, where: str, printed: set[str] | None = None) -> None:
    """The first root finding, how many others there are, the two facts, and where to look. where: case and engine.

    printed: see `render_known`.
    """
    roots, printed = roots_of(one), set() if printed is None else printed
    if first := first_of(one):
        say(console)
        say(console, where, style="bold")
        render_finding(console, one, first)
        render_known(console, one, first.signature, printed=printed)
        if len(roots) > 1:
            others = ", ".join(found.signature for found in roots if found is not first)
            say(console, f"  {counted(len(roots) - 1, 'other finding')}: {others}")
        render_next(console, one, printed=printed)
        render_assume(console, [one])


def known_lines(one: ScenarioResult, text: str) -> list[str]:
    """What a signature of the scenario, or a reason for its UNKNOWN, may be: one line each; of a root always one."""
    lines = [known.line for known in one.known.get(text, ())]
    return lines or [NEW for found in roots_of(one) if found.signature == text]


def render_finding(console: Console, one: ScenarioResult, finding: Finding) -> None:
    """Its first divergence, and what it costs."""
    say(console, describe(finding.first, one.scenario, finding=finding))
    for line in where_lines(finding.first, one.scenario, one.setup.release, around_of(one, finding.signature)):
        say(console, f"  {line}")
    for line in accept_lines(one.accept_of.get(finding.signature)):
        say(console, f"  {line}")


def around_of(one: ScenarioResult, signature: str) -> Around:
    """What is known of the place where a finding begins; nothing of what follows from another."""
    return one.around.get(signature, UNKNOWN)


def accept_lines(accept: AcceptLengths | None) -> list[str]:
    """What a finding costs, in the rounds that it and its consequences touch; nothing where it is not known."""
    if accept is None:
        return []
    return [f"accept length in the {counted(accept.verifies, 'verify', 'verifies')} it touches: {accept.text}"]


def said_lines(one: ScenarioResult, signature: str, *, accept: AcceptLengths | None = None) -> list[str]:
    """Where a finding of the scenario is in SGLang, what it costs, and what it may be: one line each.

    accept: what it costs in other scenarios too.
    """
    first = next(found.first for found in one.findings if found.signature == signature)
    where = where_lines(first, one.scenario, one.setup.release, around_of(one, signature))
    return [*where, *accept_lines(accept or one.accept_of.get(signature)), *known_lines(one, signature)]


def render_known(console: Console, one: ScenarioResult, text: str, *, printed: set[str]) -> None:
    """What a signature or a reason may be. printed: lines that were printed before, which are not printed again."""
    found = one.known.get(text, ())
    for known in found:
        if known.line not in printed:
            printed.add(known.line)
            say(console, f"  {known.line}", style="cyan")
            found = tuple(other for other in found if other is not known)
    if found:
        say(console, f"  known: {', '.join(known.id for known in found)}, see above", style="cyan")
    elif NEW in known_lines(one, text):
        say(console, f"  {NEW}", style="cyan")


def render_assume(console: Console, results: Sequence[ScenarioResult]) -> None:
    """The command that takes every known issue named of these results for granted, and shows what else differs.

    A replacement kernel works past one in an engine; what the reference predicts needs none, but a witness predicts
    nothing.
    """
    found = [(one, known) for one in results if WITNESS not in one.providers.values() for known in _assumable(one)]
    if not found:
        return
    folders = dict.fromkeys(one.folder for one, _ in found)
    folder = next(iter(folders)) if len(folders) == 1 else found[0][0].folder.parent
    again = f"eaglecheck recheck {folder} --fresh-reference"
    command = (
        again if all(known.predicted for _, known in found) else run_again(found[0][0].folder.parent, replay=False)
    )
    options = " ".join(
        f"--assume {each}" for each in sorted({each for _, one in found for each in (one.id, *one.behind)})
    )
    say(console, f"expect what is known, and see what else differs:  {command} {options}", style="cyan")


def _assumable(one: ScenarioResult) -> Iterator[Known]:
    """What can be assumed of what is named as known of its findings, and of its reasons."""
    for text in (*(finding.signature for finding in roots_of(one)), *one.verdict.reasons):
        yield from (known for known in one.known.get(text, ()) if known.assume)


def render_next(console: Console, one: ScenarioResult, *, printed: set[str], look: bool = True) -> None:
    """What else is known about a failing scenario, and the commands that look at it again. printed: as above."""
    follow = sum(finding.count for finding in one.findings if not finding.is_root)
    if follow:
        say(console, f"  {follow} more in this scenario follow{'s' if follow == 1 else ''} from what is named above")
    for line in facts(one):
        say(console, f"  {line}")
    for line in flag_lines(one):
        say(console, "  server flags: as above" if line in printed else f"  {line}")
        printed.add(line)
    if look:
        say(console, f"  look again without SGLang:  eaglecheck recheck {one.folder}")
    if one.reproducer is not None:
        say(console, f"  run it again:  eaglecheck replay {one.reproducer}")


def facts(one: ScenarioResult) -> list[str]:
    """The reason this project exists, said for one failing scenario: text, chain, and what is lost."""
    text = {
        True: "final text: identical to greedy decoding without speculation",
        False: "final text: differs from greedy decoding without speculation",
        None: "final text: none that could be compared",
    }[one.text_identical]
    accept = [] if one.accept is None else [f"accept length: {one.accept.text}"]
    wrong: dict[str, set[str]] = {}
    for found in roots_of(one):
        wrong.setdefault(_part(found.first), set()).add(str(found.first.kind))
    wrong.pop("", None)
    right = "; what was drafted is right" if wrong.keys() == {ACCEPTANCE} else ""
    hidden = "; no comparison of texts would show it" if one.text_identical else ""
    parts = [f"{part}: wrong ({', '.join(sorted(kinds))}){right}{hidden}" for part, kinds in wrong.items()]
    return [text, *parts, *accept]


#: The parts of a round.
TARGET, DRAFT, ACCEPTANCE = "target's own rows", "draft chain", "acceptance"


def _part(found: Divergence) -> str:
    """Which part of a round it is about; empty where it is about none."""
    if found.kind in NOT_THE_CHAIN or found.check in ABOUT_THE_ANSWER:
        return ""
    if found.key.phase == Phase.VERIFY and (
        found.kind in (Kind.NUMERIC, Kind.STATE) or found.hint.startswith("choice")
    ):
        return TARGET
    return {Phase.PREFILL: TARGET, Phase.ACCEPT: ACCEPTANCE}.get(Phase(found.key.phase), DRAFT)


def flag_lines(one: ScenarioResult) -> list[str]:
    """The flags of a server that is the engine of a scenario, in one line; none where no release is known."""
    said = server_flags(one.scenario, one.setup.release, one.setup.device)
    return [f"server flags: {said}"] if said else []


def first_of(one: ScenarioResult) -> Finding | None:
    """The root finding of the earliest divergence."""
    roots = roots_of(one)
    return next((found for found in roots if found.first.first), next(iter(roots), None))


def roots_of(one: ScenarioResult) -> list[Finding]:
    """The findings that nothing earlier explains."""
    return [finding for finding in one.findings if finding.is_root]
