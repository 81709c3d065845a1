"""Templates of DP ranks; those of one rank are all on one rank, and what else arrives may be on any."""

from __future__ import annotations

from cases.kit import DECODING, Kit, Opening, template
from cases.templates.where import on


@template(fits=on("ranks"))
def idle_from_the_start(kit: Kit) -> Opening:
    """One request, and for its first steps nothing anywhere else."""
    kit.arrive(0, kit.length(), new=kit.new_tokens(2))
    return Opening(calm=2)


@template(fits=on("ranks", "no coordination"))
def held_idle_by_prefill(kit: Kit) -> Opening:
    """A prompt that arrives while another rank decodes."""
    kit.arrive(0, kit.length(1, kit.chunk), new=kit.long_run())
    kit.arrive(2, kit.length(), beside=True)
    return Opening(calm=3)


@template(fits=on("ranks", "coordination"), often=True)
def verify_beside_prefill(kit: Kit) -> Opening:
    return held_idle_by_prefill(kit)


@template(fits=on("ranks"))
def idle_inside_chunked_prefill(kit: Kit) -> Opening:
    kit.arrive(0, kit.length(kit.chunk + 1))
    return Opening(calm=1)


@template(fits=on("ranks"))
def uneven_ranks(kit: Kit) -> Opening:
    """Two requests on one rank and one on another, which verify together."""
    for beside in (False, False, True):
        kit.arrive(0, kit.length(1, 4), new=kit.long_run(), beside=beside)
    return Opening(calm=DECODING)


@template(fits=on("ranks"), certain=False)
def idle_after_all_finished(kit: Kit) -> Opening:
    """Short requests on one rank beside a long one: they end together if their drafts are accepted alike."""
    new = kit.new_tokens(2, 6)
    for _ in range(2):
        kit.arrive(0, kit.length(1, 4), new=new, beside=True)
    kit.arrive(0, kit.length(1, 4), new=kit.long_run())
    return Opening(calm=DECODING)
