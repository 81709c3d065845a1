"""Templates of DP ranks; those of one rank are all on one rank, and what else arrives may be on any."""

from __future__ import annotations

from cases.builder import DECODING, Builder, Opening, template
from cases.templates.where import on


@template(fits=on("ranks"))
def idle_from_the_start(builder: Builder) -> Opening:
    """One request, and for its first steps nothing anywhere else."""
    builder.arrive(0, builder.length(), new=builder.new_tokens(2))
    return Opening(calm=2)


@template(fits=on("ranks", "no coordination"))
def held_idle_by_prefill(builder: Builder) -> Opening:
    """A prompt that arrives while another rank decodes."""
    builder.arrive(0, builder.length(1, builder.chunk), new=builder.long_run())
    builder.arrive(2, builder.length(), beside=True)
    return Opening(calm=3)


@template(fits=on("ranks", "coordination"), often=True)
def verify_beside_prefill(builder: Builder) -> Opening:
    return held_idle_by_prefill(builder)


@template(fits=on("ranks"))
def idle_inside_chunked_prefill(builder: Builder) -> Opening:
    builder.arrive(0, builder.length(builder.chunk + 1))
    return Opening(calm=1)


@template(fits=on("ranks"))
def uneven_ranks(builder: Builder) -> Opening:
    """Two requests on one rank and one on another, which verify together."""
    for beside in (False, False, True):
        builder.arrive(0, builder.length(1, 4), new=builder.long_run(), beside=beside)
    return Opening(calm=DECODING)


@template(fits=on("ranks"), certain=False)
def idle_after_all_finished(builder: Builder) -> Opening:
    """Short requests on one rank beside a long one: they end together if their drafts are accepted alike."""
    new = builder.new_tokens(2, 6)
    for _ in range(2):
        builder.arrive(0, builder.length(1, 4), new=new, beside=True)
    builder.arrive(0, builder.length(1, 4), new=builder.long_run())
    return Opening(calm=DECODING)
