"""Which token a draft row must carry when the draft catches up with a chunk or a verify, layer by layer.

Row j of a chunk or an extend that starts at p reads full[p+1+j], and in the layer of depth i full[p+1+j+i], wherever
that token existed when the row ran: a prompt exists from the start, so the last rows of a non-final chunk read it too.
Beyond the text there is only what the layers before proposed from the chunk's last row, one token each. This module
knows no weights, no reference and no tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult
from harness.contract.batches import Part, Share
from harness.contract.known_issues import assumed_in, issues
from harness.contract.types import Kind, Phase

#: The known issue in which guesses stand for the next tokens of a prompt.
GUESSES = "F-010"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """Rows that ran together. stop: index behind the last one. known: tokens of the text that existed then.

    proposals: what each layer chose from the last row. guess: what the target chose from it. guesses: whether that is
    taken to stand for token `stop` of a prompt that goes on.
    """

    share: Share
    phase: Phase
    stop: int
    known: int
    final: bool
    full: dict[int, int]
    proposals: list[list[int]]
    guess: list[int]
    guesses: bool

    def expected(self, at: int) -> int | None:
        """The token at index `at` of the text, as it could be known; None if the rows do not tell."""
        if self.guesses and at == self.stop:
            return self.guess[0] if self.guess else None
        if at < (self.stop if self.guesses else self.known):
            return self.full.get(at)
        layer = at - self.stop - 1
        chosen = self.proposals[layer] if 0 <= layer < len(self.proposals) else []
        return chosen[0] if len(chosen) == 1 else None


def rotated_rows(evidence: Evidence, result: CheckResult) -> None:
    """EXTEND_INPUT for rows of DRAFT_PREFILL and EXTEND."""
    parts = {part.share: part for listed in evidence.parts.values() for part in listed}
    ends, assumed = _prompt_ends(evidence), _guesses(evidence)
    ints = evidence.table.ints
    for phase in (Phase.DRAFT_PREFILL, Phase.EXTEND):
        for share, indices in evidence.table.each(phase):
            window = _window(evidence, share, phase, indices, parts.get(share), ends, assumed=assumed)
            for index in indices:
                at = share[3] + ints["slot"][index] + 1 + ints["step"][index]
                expected = window.expected(at)
                if expected is None:
                    continue
                result.count("extend_inputs", 1)
                observed = ints["input_id"][index]
                if observed != expected:
                    result.divergences.append(
                        evidence.divergence(
                            index,
                            kind=Kind.EXTEND_INPUT,
                            check="inputs",
                            expected=expected,
                            observed=observed,
                            hint=_hint(window, at, observed, layer=ints["step"][index]),
                        )
                    )


def last_choices(evidence: Evidence, indices: list[int]) -> list[list[int]]:
    """What each layer chose from the last of its rows; indices sorted by (layer, slot)."""
    last = {evidence.table.ints["step"][index]: index for index in indices}
    return [evidence.table.chosen(last[layer]) for layer in sorted(last)]


def _prompt_ends(evidence: Evidence) -> dict[tuple[str, int], int]:
    """(rid, epoch) -> length of what it started from: the prompt, and after a retraction the output so far too."""
    lengths = {request.rid: len(request.prompt) for request in evidence.scenario.requests}
    ends: dict[tuple[str, int], int] = {}
    for (rid, epoch), parts in evidence.parts.items():
        prefills = [part for part in parts if part.record.mode == "PREFILL"]
        stops = [part.start + part.length for part in prefills]
        done = [stop for stop, part in zip(stops, prefills, strict=True) if part.final]
        ends[rid, epoch] = done[-1] if done else max([lengths.get(rid, 0), *stops])
    return ends


def _window(
    evidence: Evidence,
    share: Share,
    phase: Phase,
    indices: list[int],
    part: Part | None,
    ends: dict[tuple[str, int], int],
    *,
    assumed: bool,
) -> _Window:
    final = part is not None and part.final
    stop = share[3] + max(evidence.table.ints["slot"][index] for index in indices) + 1
    early = phase is Phase.DRAFT_PREFILL and not final
    target = evidence.table.of(share, Phase.PREFILL)
    return _Window(
        share=share,
        phase=phase,
        stop=stop,
        known=max(ends.get((share[1], share[2]), 0), stop) if early else stop + 1,
        final=final,
        full=evidence.full.get(share[1], {}),
        proposals=last_choices(evidence, indices),
        guess=evidence.table.chosen(target[-1])[:1] if target else [],
        guesses=assumed and early,
    )


def _guesses(evidence: Evidence) -> bool:
    """Whether the reference took guesses at a chunk's end for granted, and they can show."""
    header = {} if evidence.reference is None else evidence.reference.header
    return GUESSES in assumed_in(header) and issues()[GUESSES].shows_in(evidence.scenario.spec)


def _hint(window: _Window, at: int, observed: int, *, layer: int) -> str:
    """Names the usual ways to get a rotated row wrong."""
    behind = at - window.stop  # how far the wanted token lies behind the rows that ran
    if behind >= 0 and window.phase is Phase.DRAFT_PREFILL:
        if window.final:
            return "final-tail"
        if [observed] == window.guess:
            return "chunk-tail-target-guess"
        return "chunk-tail-proposal" if [observed] in window.proposals[:layer] else "chunk-tail"
    if observed == window.full.get(at - 1):
        return "not-rotated"
    if observed == window.full.get(at + 1):
        return "rotated-twice"
    return "tail" if behind >= 0 else "row"
