"""Templates of a hierarchical cache, of sliding windows and of recurrent states."""

from __future__ import annotations

from cases.kit import DECODING, MOST_NEW, Kit, Opening, template
from cases.templates.where import on


@template(fits=on("host"), certain=False, often=True)
def host_hit(kit: Kit) -> Opening:
    return _from_host(kit, kit.integer(1, 20))


@template(fits=on("host"), certain=False, often=True)
def host_hit_in_chunks(kit: Kit) -> Opening:
    return _from_host(kit, kit.integer(kit.chunk + 1, 40))


@template(fits=on("host"), certain=False, often=True)
def host_hit_in_part(kit: Kit) -> Opening:
    """A part of the prefix is used once more before the rest is evicted."""
    return _from_host(kit, kit.integer(1, 20), part=kit.integer(20, 36))


def _from_host(kit: Kit, more: int, *, part: int = 0) -> Opening:
    """Two requests of one prefix, others that fill the pool, and one that comes back with `more` tokens of its own.

    `write_through_selective` stores what was hit twice.
    """
    first, step = kit.prompt(kit.integer(40, 64)), 0
    prompts = [first + kit.prompt(3), first + kit.prompt(4), *([first[:part] + kit.prompt(24)] if part else [])]
    prompts += [kit.prompt(kit.integer(80, 96)) for _ in range(1 if part else 2)]
    for prompt in (*prompts, first + kit.prompt(more)):
        new = kit.integer(2, 6)
        kit.timeline.arrive(step, kit.request(prompt, new=new))
        step += kit.chunks(len(prompt)) + new + DECODING
    return Opening(calm=step, cached=True)


@template(fits=on("windows"), certain=False)
def window_evicted(kit: Kit) -> Opening:
    """Two requests that outlive their windows, if none of them accepts all that it drafts."""
    for step in (0, kit.integer(0, 4)):
        kit.arrive(step, kit.length(1, 60), new=MOST_NEW)
    return Opening(calm=DECODING)


@template(fits=on("windows", "no cache"), certain=False)
def window_evicted_in_prompt(kit: Kit) -> Opening:
    """Three chunks or more."""
    kit.arrive(0, kit.length(2 * kit.chunk + 1))
    return Opening(calm=3)


@template(fits=on("states"), certain=False)
def state_behind_refused(kit: Kit) -> Opening:
    """Two requests that refuse something, if their drafts do not agree everywhere."""
    for step in (0, kit.integer(0, 4)):
        kit.arrive(step, kit.length(1, 60), new=MOST_NEW)
    return Opening(calm=DECODING)


@template(fits=on("states"))
def state_behind_chunk(kit: Kit) -> Opening:
    kit.arrive(0, kit.length(kit.chunk + 1))
    return Opening(calm=2)


@template(fits=on("states", "cache"), certain=False)
def state_from_cache(kit: Kit) -> Opening:
    """States are kept at the ends of texts and chunks: one that goes on behind another, which may be gone by then."""
    first = kit.prompt(2 * kit.chunk + kit.integer(1, 20))
    kit.timeline.arrive(0, kit.request(first, new=kit.new_tokens()))
    second = kit.branch_of(first, 2 * kit.chunk, kit.integer(1, 20))
    kit.timeline.arrive(kit.chunks(len(first)) + kit.integer(4, 12), kit.request(second, new=kit.new_tokens()))
    return Opening(events=False, cached=True)
