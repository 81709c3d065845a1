"""Generated hand-overs: a lead that brings about one situation, then a fate for every other request.

The same seed gives the same programs. Only what the two sides and the way between them do is drawn here; what happens
inside a batch is drawn by `cases/strategies`. It must not know a bug, and must not import torch or sglang.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from cases.boots import Boot
from cases.fixed import DRAIN, tokens
from harness.contract.types import Op, RequestSpec, Scenario

#: Requests of one program, so that a pool of 160 tokens holds them: retraction is a program of its own.
MOST, LONGEST_PROMPT, MOST_NEW = 4, 18, 10
#: By this turn after its arrival, a request that nothing holds back and that needs no chunks has been handed over.
ARRIVED = 3


@dataclass(slots=True)
class _Program:
    draw: random.Random
    boot: Boot
    chunk: int
    ops: list[tuple[int, Op]] = field(default_factory=list)
    arrivals: list[tuple[int, RequestSpec]] = field(default_factory=list)

    def request(self, turn: int, *, length: int | None = None, new: int | None = None) -> str:
        rid = f"r{len(self.arrivals)}"
        prompt = tokens(seed=self.draw.randrange(10**6), length=length or self.draw.randint(1, LONGEST_PROMPT))
        fresh = RequestSpec(
            rid=rid,
            prompt=prompt,
            max_new_tokens=new or self.draw.randint(1, MOST_NEW),
            dp_rank=self.draw.randrange(self.boot.engine.dp) if self.boot.engine.dp > 1 else 0,
        )
        self.arrivals.append((turn, fresh))
        return rid

    def transfer(self, turn: int, what: str, *rids: str) -> None:
        self.ops.append((turn, Op(kind="transfer", name=what, rids=rids)))

    def abort(self, turn: int, *rids: str) -> None:
        self.ops.append((turn, Op(kind="abort", rids=rids)))

    def script(self) -> tuple[Op, ...]:
        """Arrivals of one turn as one submit; what is said of a transfer comes right after its request's arrival."""
        by_turn: dict[int, list[Op]] = {}
        for turn, request in self.arrivals:
            by_turn.setdefault(turn, []).append(Op(kind="submit", rids=(request.rid,)))
        for turn, op in self.ops:
            by_turn.setdefault(turn, []).append(op)
        made, now = list[Op](), 0
        for turn in sorted(by_turn):
            if turn > now:
                made.append(Op(kind="tick", count=turn - now))
                now = turn
            made += by_turn[turn]
        return (*made, DRAIN)


Lead = Callable[[_Program], None]
LEADS: dict[str, Lead] = {}


def _lead(make: Lead) -> Lead:
    LEADS[make.__name__] = make
    return make


@_lead
def handed_over_together(program: _Program) -> None:
    program.chunk = max(program.chunk, 2 * program.boot.engine.page)  # a prompt takes whole pages of it
    for _ in range(2):  # short enough for one chunk
        program.request(0, length=program.draw.randint(1, 2))


@_lead
def finished_at_hand_over(program: _Program) -> None:
    program.request(0, new=1)


@_lead
def prebuilt_all_finished(program: _Program) -> None:
    for _ in range(program.draw.randint(1, 2)):
        program.request(0, length=program.draw.randint(1, 4), new=1)


@_lead
def last_chunk_of_one(program: _Program) -> None:
    program.request(0, length=program.chunk + 1)


@_lead
def delayed_transfer(program: _Program) -> None:
    rid = program.request(0)
    program.transfer(0, "hold", rid)
    program.transfer(ARRIVED + 1 + program.draw.randint(1, 6), "release", rid)


@_lead
def reordered_transfers(program: _Program) -> None:
    first, second = program.request(0, length=3), program.request(0, length=4)
    program.transfer(0, "hold", first, second)
    turn = ARRIVED + program.draw.randint(1, 3)
    program.transfer(turn, "release", second)
    program.transfer(turn + program.draw.randint(2, 4), "release", first)


@_lead
def failed_beside_good(program: _Program) -> None:
    bad, good = program.request(0, length=3), program.request(0, length=4)
    program.transfer(0, "hold", bad, good)
    program.transfer(ARRIVED, "fail", bad)
    program.transfer(ARRIVED + program.draw.randint(1, 3), "release", good)


@_lead
def abort_in_transfer(program: _Program) -> None:
    rid = program.request(0)
    program.transfer(0, "hold", rid)
    program.abort(ARRIVED + program.draw.randint(0, 3), rid)


@_lead
def dropped_transfer(program: _Program) -> None:
    rid = program.request(0, length=program.draw.randint(1, program.chunk))
    program.transfer(0, "drop", rid)
    program.abort(ARRIVED + 3 + program.draw.randint(0, 3), rid)


@_lead
def empty_prebuilt_batch(program: _Program) -> None:
    rids = [program.request(0, length=program.draw.randint(1, 4)) for _ in range(program.draw.randint(1, 2))]
    program.transfer(0, "hold", *rids)
    turn = ARRIVED + program.draw.randint(0, 2)
    if program.draw.random() < 0.5:
        program.abort(turn, *rids)
    else:
        program.transfer(turn, "fail", *rids)


#: Leads that hold only while nothing else is in transit, and the turn by which they are over.
ALONE = ("handed_over_together", "prebuilt_all_finished", "empty_prebuilt_batch")
CALM = 12


def _others(program: _Program, *, calm: int) -> None:
    """Up to MOST requests in all, each with a fate."""
    while len(program.arrivals) < MOST and program.draw.random() < 0.6:
        turn = calm + program.draw.randint(0, 6)
        rid = program.request(turn)
        match program.draw.choice(("whole", "whole", "late", "fails", "aborted")):
            case "late":
                program.transfer(turn, "hold", rid)
                program.transfer(turn + program.draw.randint(1, 8), "release", rid)
            case "fails":
                program.transfer(turn, "hold", rid)
                program.transfer(turn + program.draw.randint(1, 4), "fail", rid)
            case "aborted":
                program.transfer(turn, "hold", rid)
                program.abort(turn + program.draw.randint(2, 4), rid)


def generate(boot: Boot, *, count: int, seed: int) -> list[Scenario]:
    """`count` programs for one boot configuration, the leads taking turns; the same for the same seed."""
    made = []
    for number in range(count):
        name = list(LEADS)[number % len(LEADS)]
        draw = random.Random(f"{boot.name} {seed} {number}")
        page = boot.engine.page
        program = _Program(draw=draw, boot=boot, chunk=max(page, draw.choice((4, 8, 16)) // page * page))
        LEADS[name](program)
        _others(program, calm=CALM if draw.random() < 0.5 or name in ALONE else 1)
        made.append(
            Scenario(
                name=f"handed-{boot.name}-{seed}-{number}",
                seed=seed,
                checkpoint=boot.checkpoint,
                spec=boot.spec,
                engine=boot.engine.model_copy(update={"chunk": program.chunk}),
                requests=tuple(request for _, request in program.arrivals),
                script=program.script(),
                wants=(name,),
            )
        )
    return made
