"""Templates of hand-overs from a prefill to a decode engine.

Only what the two sides and the way between them do is drawn here; what happens inside a batch is drawn there.
"""

from __future__ import annotations

from cases.boots import Boot
from cases.builder import MOST_NEW as MOST_GENERATED
from cases.builder import Builder, Opening, template

#: Requests of one program, so that a pool of 160 tokens holds them: retraction is a program of its own.
MOST, LONGEST, MOST_NEW = 4, 18, 10
#: By this step after its arrival, a request that nothing holds back and that needs no chunks has been handed over.
ARRIVED = 3
#: By then everything that a template began is over; some hold only while nothing else is in transit.
OVER = 12


def _pair(boot: Boot) -> bool:
    return boot.engine.disaggregation


def _arrive(builder: Builder, step: int, *, length: int | None = None, new: int | None = None) -> str:
    return builder.arrive(step, length or builder.integer(1, LONGEST), new=new or builder.integer(1, MOST_NEW))


def _transfer(builder: Builder, step: int, what: str, *rids: str) -> None:
    builder.timeline.at(step, "transfer", *rids, name=what)


@template(fits=_pair, roams=True)
def handed_over_together(builder: Builder) -> Opening:
    builder.chunk = max(builder.chunk, 2 * builder.page)  # a prompt takes whole pages of it
    for _ in range(2):  # short enough for one chunk
        _arrive(builder, 0, length=builder.integer(1, 2))
    return Opening(calm=OVER)


@template(fits=_pair, roams=True)
def finished_at_hand_over(builder: Builder) -> Opening:
    _arrive(builder, 0, new=1)
    return Opening()


@template(fits=_pair, roams=True)
def prebuilt_all_finished(builder: Builder) -> Opening:
    for _ in range(builder.integer(1, 2)):
        _arrive(builder, 0, length=builder.integer(1, 4), new=1)
    return Opening(calm=OVER)


@template(fits=_pair, roams=True)
def last_chunk_of_one(builder: Builder) -> Opening:
    _arrive(builder, 0, length=builder.chunk + 1)
    return Opening()


@template(fits=_pair, roams=True)
def delayed_transfer(builder: Builder) -> Opening:
    rid = _arrive(builder, 0)
    _transfer(builder, 0, "hold", rid)
    _transfer(builder, ARRIVED + 1 + builder.integer(1, 6), "release", rid)
    return Opening()


@template(fits=_pair, roams=True)
def reordered_transfers(builder: Builder) -> Opening:
    first, second = _arrive(builder, 0, length=3), _arrive(builder, 0, length=4)
    _transfer(builder, 0, "hold", first, second)
    step = ARRIVED + builder.integer(1, 3)
    _transfer(builder, step, "release", second)
    _transfer(builder, step + builder.integer(2, 4), "release", first)
    return Opening()


@template(fits=_pair, roams=True)
def failed_beside_good(builder: Builder) -> Opening:
    bad, good = _arrive(builder, 0, length=3), _arrive(builder, 0, length=4)
    _transfer(builder, 0, "hold", bad, good)
    _transfer(builder, ARRIVED, "fail", bad)
    _transfer(builder, ARRIVED + builder.integer(1, 3), "release", good)
    return Opening()


@template(fits=_pair, roams=True)
def abort_in_transfer(builder: Builder) -> Opening:
    rid = _arrive(builder, 0)
    _transfer(builder, 0, "hold", rid)
    builder.timeline.at(ARRIVED + builder.integer(0, 3), "abort", rid)
    return Opening()


@template(fits=_pair, roams=True)
def dropped_transfer(builder: Builder) -> Opening:
    rid = _arrive(builder, 0, length=builder.integer(1, builder.chunk))
    _transfer(builder, 0, "drop", rid)
    builder.timeline.at(ARRIVED + 3 + builder.integer(0, 3), "abort", rid)
    return Opening()


@template(fits=_pair, roams=True)
def empty_prebuilt_batch(builder: Builder) -> Opening:
    rids = [_arrive(builder, 0, length=builder.integer(1, 4)) for _ in range(builder.integer(1, 2))]
    _transfer(builder, 0, "hold", *rids)
    step = ARRIVED + builder.integer(0, 2)
    if builder.chance():
        builder.timeline.at(step, "abort", *rids)
    else:
        _transfer(builder, step, "fail", *rids)
    return Opening(calm=OVER)


@template(fits=_pair, certain=False)
def retracted_on_decode_side(builder: Builder) -> Opening:
    """More to generate than its pool holds, by requests that are all handed over at once.

    Their prompts leave it the room that it keeps for each, an eighth of the pool; else the last waits outside.
    """
    lengths = [builder.integer(LONGEST - 3, LONGEST) for _ in range(MOST)]
    rids = [_arrive(builder, 0, length=length, new=builder.new_tokens(MOST_GENERATED - 2)) for length in lengths]
    _transfer(builder, 0, "hold", *rids)
    step = ARRIVED + sum(map(builder.chunks, lengths))
    _transfer(builder, step, "release", *rids)
    return Opening(calm=step + OVER)


@template(fits=_pair, certain=False)
def taken_back_on_decode_side(builder: Builder) -> Opening:
    """Some of those that decode there together."""
    rids = [_arrive(builder, 0, new=builder.long_run()) for _ in range(MOST - 1)]
    builder.timeline.at(ARRIVED + builder.integer(2, 4), "retract", *builder.random.sample(rids, builder.integer(1, 2)))
    return Opening(calm=OVER)


def beside(builder: Builder, *, calm: int) -> None:
    """Up to MOST requests in all, each with a fate."""
    calm = max(calm, builder.random.choice((1, OVER)))
    while len(builder.timeline.arrivals) < MOST and builder.integer(1, 5) <= 3:
        step = calm + builder.integer(0, 6)
        rid = _arrive(builder, step)
        fate = builder.random.choice(("whole", "whole", "release", "fail", "abort"))
        if fate != "whole":
            _transfer(builder, step, "hold", rid)
        if fate == "abort":
            builder.timeline.at(step + builder.integer(2, 4), "abort", rid)
        elif fate != "whole":
            _transfer(builder, step + builder.integer(1, 8 if fate == "release" else 4), fate, rid)
