"""Templates of hand-overs from a prefill to a decode engine.

Only what the two sides and the way between them do is drawn here; what happens inside a batch is drawn there.
"""

from __future__ import annotations

from cases.boots import Boot
from cases.kit import MOST_NEW as MOST_GENERATED
from cases.kit import Kit, Opening, template

#: Requests of one program, so that a pool of 160 tokens holds them: retraction is a program of its own.
MOST, LONGEST, MOST_NEW = 4, 18, 10
#: By this step after its arrival, a request that nothing holds back and that needs no chunks has been handed over.
ARRIVED = 3
#: By then everything that a template began is over; some hold only while nothing else is in transit.
OVER = 12


def _pair(boot: Boot) -> bool:
    return boot.engine.disaggregation


def _arrive(kit: Kit, step: int, *, length: int | None = None, new: int | None = None) -> str:
    return kit.arrive(step, length or kit.integer(1, LONGEST), new=new or kit.integer(1, MOST_NEW))


def _transfer(kit: Kit, step: int, what: str, *rids: str) -> None:
    kit.timeline.at(step, "transfer", *rids, name=what)


@template(fits=_pair, roams=True)
def handed_over_together(kit: Kit) -> Opening:
    kit.chunk = max(kit.chunk, 2 * kit.page)  # a prompt takes whole pages of it
    for _ in range(2):  # short enough for one chunk
        _arrive(kit, 0, length=kit.integer(1, 2))
    return Opening(calm=OVER)


@template(fits=_pair, roams=True)
def finished_at_hand_over(kit: Kit) -> Opening:
    _arrive(kit, 0, new=1)
    return Opening()


@template(fits=_pair, roams=True)
def prebuilt_all_finished(kit: Kit) -> Opening:
    for _ in range(kit.integer(1, 2)):
        _arrive(kit, 0, length=kit.integer(1, 4), new=1)
    return Opening(calm=OVER)


@template(fits=_pair, roams=True)
def last_chunk_of_one(kit: Kit) -> Opening:
    _arrive(kit, 0, length=kit.chunk + 1)
    return Opening()


@template(fits=_pair, roams=True)
def delayed_transfer(kit: Kit) -> Opening:
    rid = _arrive(kit, 0)
    _transfer(kit, 0, "hold", rid)
    _transfer(kit, ARRIVED + 1 + kit.integer(1, 6), "release", rid)
    return Opening()


@template(fits=_pair, roams=True)
def reordered_transfers(kit: Kit) -> Opening:
    first, second = _arrive(kit, 0, length=3), _arrive(kit, 0, length=4)
    _transfer(kit, 0, "hold", first, second)
    step = ARRIVED + kit.integer(1, 3)
    _transfer(kit, step, "release", second)
    _transfer(kit, step + kit.integer(2, 4), "release", first)
    return Opening()


@template(fits=_pair, roams=True)
def failed_beside_good(kit: Kit) -> Opening:
    bad, good = _arrive(kit, 0, length=3), _arrive(kit, 0, length=4)
    _transfer(kit, 0, "hold", bad, good)
    _transfer(kit, ARRIVED, "fail", bad)
    _transfer(kit, ARRIVED + kit.integer(1, 3), "release", good)
    return Opening()


@template(fits=_pair, roams=True)
def abort_in_transfer(kit: Kit) -> Opening:
    rid = _arrive(kit, 0)
    _transfer(kit, 0, "hold", rid)
    kit.timeline.at(ARRIVED + kit.integer(0, 3), "abort", rid)
    return Opening()


@template(fits=_pair, roams=True)
def dropped_transfer(kit: Kit) -> Opening:
    rid = _arrive(kit, 0, length=kit.integer(1, kit.chunk))
    _transfer(kit, 0, "drop", rid)
    kit.timeline.at(ARRIVED + 3 + kit.integer(0, 3), "abort", rid)
    return Opening()


@template(fits=_pair, roams=True)
def empty_prebuilt_batch(kit: Kit) -> Opening:
    rids = [_arrive(kit, 0, length=kit.integer(1, 4)) for _ in range(kit.integer(1, 2))]
    _transfer(kit, 0, "hold", *rids)
    step = ARRIVED + kit.integer(0, 2)
    if kit.chance():
        kit.timeline.at(step, "abort", *rids)
    else:
        _transfer(kit, step, "fail", *rids)
    return Opening(calm=OVER)


@template(fits=_pair, certain=False)
def retracted_on_decode_side(kit: Kit) -> Opening:
    """More to generate than its pool holds, by requests that are all handed over at once.

    Their prompts leave it the room that it keeps for each, an eighth of the pool; else the last waits outside.
    """
    lengths = [kit.integer(LONGEST - 3, LONGEST) for _ in range(MOST)]
    rids = [_arrive(kit, 0, length=length, new=kit.new_tokens(MOST_GENERATED - 2)) for length in lengths]
    _transfer(kit, 0, "hold", *rids)
    step = ARRIVED + sum(map(kit.chunks, lengths))
    _transfer(kit, step, "release", *rids)
    return Opening(calm=step + OVER)


@template(fits=_pair, certain=False)
def taken_back_on_decode_side(kit: Kit) -> Opening:
    """Some of those that decode there together."""
    rids = [_arrive(kit, 0, new=kit.long_run()) for _ in range(MOST - 1)]
    kit.timeline.at(ARRIVED + kit.integer(2, 4), "retract", *kit.random.sample(rids, kit.integer(1, 2)))
    return Opening(calm=OVER)


def beside(kit: Kit, *, calm: int) -> None:
    """Up to MOST requests in all, each with a fate."""
    calm = max(calm, kit.random.choice((1, OVER)))
    while len(kit.timeline.arrivals) < MOST and kit.integer(1, 5) <= 3:
        step = calm + kit.integer(0, 6)
        rid = _arrive(kit, step)
        fate = kit.random.choice(("whole", "whole", "release", "fail", "abort"))
        if fate != "whole":
            _transfer(kit, step, "hold", rid)
        if fate == "abort":
            kit.timeline.at(step + kit.integer(2, 4), "abort", rid)
        elif fate != "whole":
            _transfer(kit, step + kit.integer(1, 8 if fate == "release" else 4), fate, rid)
