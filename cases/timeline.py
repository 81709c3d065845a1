"""Programs as people think of them: what happens at which scheduler step. `script` makes ops of that.

Pure data; it must not draw anything and must not know an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from harness.contract.requests import RequestSpec
from harness.contract.script import Op


@dataclass(slots=True, kw_only=True)
class Timeline:
    """Requests with the steps of their arrival, and other ops with the step before which they are given."""

    arrivals: list[tuple[int, RequestSpec]] = field(default_factory=list)
    ops: list[tuple[int, Op]] = field(default_factory=list)

    def arrive(self, step: int, *requests: RequestSpec) -> None:
        self.arrivals += [(step, request) for request in requests]

    def at(self, step: int, kind: str, *rids: str, name: str | None = None) -> None:
        self.ops.append((step, Op.model_validate({"kind": kind, "rids": rids, "name": name})))

    @property
    def requests(self) -> tuple[RequestSpec, ...]:
        return tuple(request for _, request in self.arrivals)

    def script(self) -> tuple[Op, ...]:
        """Ops in order of steps, arrivals of one step as one submit, a drain at the end.

        What SGLang holds back or refuses while it is paused waits for the end of the pause. A second pause inside a
        pause is left out, a pause without an end is ended before the drain, and an abort or a transfer that would come
        before its request's arrival comes right after it.
        """
        return _render(self._placed())

    def _placed(self) -> list[tuple[int, Op]]:
        pauses = _pauses(self.ops)
        placed: list[tuple[int, int, Op]] = [(step, _RANK[op.kind], op) for step, op in pauses]
        arrived: dict[str, int] = {}
        for step, request in self.arrivals:
            arrived[request.rid] = _after_pause(step, pauses)
        for step in sorted(set(arrived.values())):
            rids = tuple(rid for rid, at in arrived.items() if at == step)
            placed.append((step, _RANK["submit"], Op(kind="submit", rids=rids)))
        for step, op in self.ops:
            if op.kind in ("abort", "transfer"):
                placed.append((max(step, arrived[op.rids[0]]), _RANK[op.kind], op))
            elif op.kind == "flush":
                placed.append((_after_pause(step, pauses), _RANK["flush"], op))
            elif op.kind == "retract" and not op.everybody:
                placed.append((_after_pause(step, pauses), _RANK["retract"], op))
        placed += [(step, _RANK["retract"], op) for step, op in self._retractions(pauses)]
        placed.sort(key=lambda entry: entry[:2])
        return [(step, op) for step, _, op in placed]

    def _retractions(self, pauses: list[tuple[int, Op]]) -> list[tuple[int, Op]]:
        """Those of everybody, for new weights too. Each is a pause and a resume, and a step takes one of either."""
        taken = dict(pauses)
        whole = [(step, op) for step, op in self.ops if (op.kind == "retract" and op.everybody) or op.kind == "update"]
        for wanted, op in sorted(whole, key=lambda entry: entry[0]):
            step = _after_pause(wanted, pauses)
            while step in taken:
                step = _after_pause(step + 1, pauses)
            taken[step] = op
        return [entry for entry in sorted(taken.items(), key=lambda entry: entry[0]) if entry not in pauses]


#: Order of ops given before one step.
_RANK = {"resume": 0, "flush": 1, "submit": 2, "transfer": 3, "retract": 4, "abort": 5, "pause": 6}


def _pauses(ops: Iterable[tuple[int, Op]]) -> list[tuple[int, Op]]:
    """Alternating pause and resume ops, at different steps."""
    kept: list[tuple[int, Op]] = []
    wanted = "pause"
    for step, op in sorted(ops, key=lambda entry: entry[0]):
        if op.kind == wanted and (not kept or step > kept[-1][0]):
            kept.append((step, op))
            wanted = "resume" if wanted == "pause" else "pause"
    if wanted == "resume":
        kept.append((kept[-1][0] + 1, Op(kind="resume")))
    return kept


def _after_pause(step: int, pauses: list[tuple[int, Op]]) -> int:
    """`step`, or the end of the pause that it falls into."""
    for (start, _), (end, _) in zip(pauses[::2], pauses[1::2], strict=True):
        if start <= step < end:
            return end
    return step


def _render(placed: list[tuple[int, Op]]) -> tuple[Op, ...]:
    script: list[Op] = []
    now = placed[0][0] if placed else 0
    for step, op in placed:
        if step > now:
            script.append(Op(kind="step", count=step - now))
            now = step
        script.append(op)
    return (*script, Op(kind="drain"))


def inserted(script: tuple[Op, ...], step: int, *ops: Op) -> tuple[Op, ...]:
    """The script with ops given before step `step` (after what it gives there itself); the drain stays last."""
    done, now = list[Op](), 0
    rest = list(script[:-1])
    while rest and now + (rest[0].count if rest[0].kind == "step" else 0) <= step:
        op = rest.pop(0)
        now += op.count if op.kind == "step" else 0
        done.append(op)
    if step > now:
        done.append(Op(kind="step", count=step - now))
    if rest and rest[0].kind == "step" and step > now:
        rest[0] = rest[0].model_copy(update={"count": rest[0].count - (step - now)})
    return (*done, *ops, *rest, script[-1])
