"""Templates of a hierarchical cache, of sliding windows and of recurrent states."""

from __future__ import annotations

from cases.builder import DECODING, MOST_NEW, Builder, Opening, template
from cases.templates.where import on


@template(fits=on("host"), certain=False, often=True)
def host_hit(builder: Builder) -> Opening:
    return _from_host(builder, builder.integer(1, 20))


@template(fits=on("host"), certain=False, often=True)
def host_hit_in_chunks(builder: Builder) -> Opening:
    return _from_host(builder, builder.integer(builder.chunk + 1, 40))


@template(fits=on("host"), certain=False, often=True)
def host_hit_in_part(builder: Builder) -> Opening:
    """A part of the prefix is used once more before the rest is evicted."""
    return _from_host(builder, builder.integer(1, 20), part=builder.integer(20, 36))


def _from_host(builder: Builder, more: int, *, part: int = 0) -> Opening:
    """Two requests of one prefix, others that fill the pool, and one that comes back with `more` tokens of its own.

    `write_through_selective` stores what was hit twice.
    """
    first, step = builder.prompt(builder.integer(40, 64)), 0
    prompts = [
        first + builder.prompt(3),
        first + builder.prompt(4),
        *([first[:part] + builder.prompt(24)] if part else []),
    ]
    prompts += [builder.prompt(builder.integer(80, 96)) for _ in range(1 if part else 2)]
    for prompt in (*prompts, first + builder.prompt(more)):
        new = builder.integer(2, 6)
        builder.timeline.arrive(step, builder.request(prompt, new=new))
        step += builder.chunks(len(prompt)) + new + DECODING
    return Opening(calm=step, cached=True)


@template(fits=on("windows"), certain=False)
def window_evicted(builder: Builder) -> Opening:
    """Two requests that outlive their windows, if none of them accepts all that it drafts."""
    for step in (0, builder.integer(0, 4)):
        builder.arrive(step, builder.length(1, 60), new=MOST_NEW)
    return Opening(calm=DECODING)


@template(fits=on("windows", "no cache"), certain=False)
def window_evicted_in_prompt(builder: Builder) -> Opening:
    """Three chunks or more."""
    builder.arrive(0, builder.length(2 * builder.chunk + 1))
    return Opening(calm=3)


@template(fits=on("states"), certain=False)
def state_behind_refused(builder: Builder) -> Opening:
    """Two requests that refuse something, if their drafts do not agree everywhere."""
    for step in (0, builder.integer(0, 4)):
        builder.arrive(step, builder.length(1, 60), new=MOST_NEW)
    return Opening(calm=DECODING)


@template(fits=on("states"))
def state_behind_chunk(builder: Builder) -> Opening:
    builder.arrive(0, builder.length(builder.chunk + 1))
    return Opening(calm=2)


@template(fits=on("states", "cache"), certain=False)
def state_from_cache(builder: Builder) -> Opening:
    """States are kept at the ends of texts and chunks: one that goes on behind another, which may be gone by then."""
    first = builder.prompt(2 * builder.chunk + builder.integer(1, 20))
    builder.timeline.arrive(0, builder.request(first, new=builder.new_tokens()))
    second = builder.branch_of(first, 2 * builder.chunk, builder.integer(1, 20))
    builder.timeline.arrive(
        builder.chunks(len(first)) + builder.integer(4, 12), builder.request(second, new=builder.new_tokens())
    )
    return Opening(events=False, cached=True)
