"""Programs as people think of them: what happens at which turn. `script` turns that into ops.

Pure data; it must not draw anything and must not know an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from harness.contract.types import Op, RequestSpec


@dataclass(slots=True, kw_only=True)
class Timeline:
    """requests with their arrival turns, and other ops with the turn before which they are given."""

    arrivals: list[tuple[int, RequestSpec]] = field(default_factory=list)
    ops: list[tuple[int, Op]] = field(default_factory=list)

    def arrive(self, turn: int, *requests: RequestSpec) -> None:
        self.arrivals += [(turn, request) for request in requests]

    def at(self, turn: int, kind: str, *rids: str) -> None:
        self.ops.append((turn, Op.model_validate({"kind": kind, "rids": rids})))

    @property
    def requests(self) -> tuple[RequestSpec, ...]:
        return tuple(request for _, request in self.arrivals)

    def script(self) -> tuple[Op, ...]:
        """Ops in order of turns, arrivals of one turn as one submit, a drain at the end.

        What SGLang holds back or refuses while it is paused waits for the end of the pause. A second pause inside a
        pause is left out, a pause without an end is ended before the drain, and an abort that would come before its
        request's arrival comes right after it.
        """
        return _render(self._placed())

    def _placed(self) -> list[tuple[int, Op]]:
        pauses = _pauses(self.ops)
        placed: list[tuple[int, int, Op]] = [(turn, _RANK[op.kind], op) for turn, op in pauses]
        arrived: dict[str, int] = {}
        for turn, request in self.arrivals:
            arrived[request.rid] = _after_pause(turn, pauses)
        for turn in sorted(set(arrived.values())):
            rids = tuple(rid for rid, at in arrived.items() if at == turn)
            placed.append((turn, _RANK["submit"], Op(kind="submit", rids=rids)))
        for turn, op in self.ops:
            if op.kind == "abort":
                placed.append((max(turn, arrived[op.rids[0]]), _RANK["abort"], op))
            elif op.kind == "flush":
                placed.append((_after_pause(turn, pauses), _RANK["flush"], op))
        placed += [(turn, _RANK["retract"], Op(kind="retract")) for turn in self._retractions(pauses)]
        placed.sort(key=lambda entry: entry[:2])
        return [(turn, op) for turn, _, op in placed]

    def _retractions(self, pauses: list[tuple[int, Op]]) -> list[int]:
        """Turns of retractions. Each is a pause and a resume by itself, and a turn takes one of either."""
        taken = {turn for turn, _ in pauses}
        for wanted in sorted(turn for turn, op in self.ops if op.kind == "retract"):
            turn = _after_pause(wanted, pauses)
            while turn in taken:
                turn = _after_pause(turn + 1, pauses)
            taken.add(turn)
        return sorted(taken - {turn for turn, _ in pauses})


#: Order of ops given before one turn.
_RANK = {"resume": 0, "flush": 1, "submit": 2, "abort": 3, "retract": 4, "pause": 5}


def _pauses(ops: Iterable[tuple[int, Op]]) -> list[tuple[int, Op]]:
    """Alternating pause and resume ops, at different turns."""
    kept: list[tuple[int, Op]] = []
    wanted = "pause"
    for turn, op in sorted(ops, key=lambda entry: entry[0]):
        if op.kind == wanted and (not kept or turn > kept[-1][0]):
            kept.append((turn, op))
            wanted = "resume" if wanted == "pause" else "pause"
    if wanted == "resume":
        kept.append((kept[-1][0] + 1, Op(kind="resume")))
    return kept


def _after_pause(turn: int, pauses: list[tuple[int, Op]]) -> int:
    """`turn`, or the end of the pause that it falls into."""
    for (start, _), (end, _) in zip(pauses[::2], pauses[1::2], strict=True):
        if start <= turn < end:
            return end
    return turn


def _render(placed: list[tuple[int, Op]]) -> tuple[Op, ...]:
    script: list[Op] = []
    now = placed[0][0] if placed else 0
    for turn, op in placed:
        if turn > now:
            script.append(Op(kind="tick", count=turn - now))
            now = turn
        script.append(op)
    return (*script, Op(kind="drain"))


def inserted(script: tuple[Op, ...], turn: int, *ops: Op) -> tuple[Op, ...]:
    """The script with ops given before turn `turn` (after what it gives there itself); the drain stays last."""
    done, now = list[Op](), 0
    rest = list(script[:-1])
    while rest and now + (rest[0].count if rest[0].kind == "tick" else 0) <= turn:
        op = rest.pop(0)
        now += op.count if op.kind == "tick" else 0
        done.append(op)
    if turn > now:
        done.append(Op(kind="tick", count=turn - now))
    if rest and rest[0].kind == "tick" and turn > now:
        rest[0] = rest[0].model_copy(update={"count": rest[0].count - (turn - now)})
    return (*done, *ops, *rest, script[-1])
