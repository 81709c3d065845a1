"""Templates of requests that leave and come back: aborted, retracted, paused."""

from __future__ import annotations

from cases.builder import Builder, Opening, template
from cases.templates.where import on


@template(fits=on("priorities"), certain=False)
def preempted(builder: Builder) -> Opening:
    """As many as may run at once, and then one that is more urgent by more than SGLang's threshold of ten."""
    running = builder.boot.engine.max_running_requests
    for _ in range(running):
        calm = builder.request(builder.prompt(builder.length(1, builder.chunk)), new=builder.long_run())
        builder.timeline.arrive(0, calm.model_copy(update={"priority": builder.integer(0, 5)}))
    urgent = builder.request(builder.prompt(builder.length()), new=builder.new_tokens())
    step = running + builder.integer(1, 3)
    builder.timeline.arrive(step, urgent.model_copy(update={"priority": builder.integer(20, 30)}))
    return Opening(calm=step)


@template(fits=on())
def abort_before_prefill(builder: Builder) -> Opening:
    """The first request takes three whole chunks, so the second one still waits when it is aborted."""
    builder.arrive(0, 3 * builder.chunk)
    builder.timeline.at(1, "abort", builder.arrive(0, builder.length()))
    return Opening(calm=3, protected=("r0",))


@template(fits=on())
def abort_in_chunk(builder: Builder) -> Opening:
    builder.timeline.at(1, "abort", builder.arrive(0, builder.length(2 * builder.chunk + 1)))
    return Opening(calm=builder.integer(2, 4))  # a pause before the abort would hold the prompt back behind it


@template(fits=on())
def abort_in_decode(builder: Builder) -> Opening:
    length = _runs_on(builder)
    builder.timeline.at(builder.chunks(length) + builder.integer(1, 2), "abort", "r0")
    return Opening(calm=builder.chunks(length), events=False)


@template(fits=on())
def abort_last_live(builder: Builder) -> Opening:
    gone = builder.chunks(_runs_on(builder)) + 1
    builder.timeline.at(gone, "abort", "r0")
    return Opening(calm=gone + 1)


@template(fits=on())
def retract_resume(builder: Builder) -> Opening:
    step = builder.chunks(_runs_on(builder)) + builder.integer(1, 2)
    builder.timeline.at(step, "retract")
    return Opening(calm=step + 1, protected=("r0",))


@template(fits=on("room"))
def partial_retraction(builder: Builder) -> Opening:
    """Some of several that run together, by name or by SGLang's own switch."""
    rids, step = _together(builder)
    if builder.chance():
        builder.timeline.at(step, "retract", *builder.random.sample(rids, builder.integer(1, len(rids) - 1)))
    else:
        builder.timeline.at(step, "retract", name="test")
    return Opening(calm=step + 1, protected=tuple(rids))


@template(fits=on("room"), certain=False)
def batch_reordered(builder: Builder) -> Opening:
    """SGLang keeps those first that have generated most: here the longest prompts come first, and differ in that."""
    rids, step = _together(builder)
    builder.timeline.at(step + builder.integer(0, 3), "retract", builder.random.choice(rids))
    return Opening(calm=step + 4)


@template(fits=on("room"))
def abort_of_some(builder: Builder) -> Opening:
    rids, step = _together(builder)
    builder.timeline.at(step, "abort", builder.random.choice(rids))
    return Opening(calm=step + 1, protected=tuple(rids))


def _together(builder: Builder) -> tuple[list[str], int]:
    """Three or four that decode together, and the step from which they surely do."""
    builder.chunk = max(builder.chunk, 2 * builder.page)
    lengths = sorted((builder.integer(1, builder.chunk) for _ in range(builder.integer(3, 4))), reverse=True)
    rids = [builder.arrive(0, length, new=builder.long_run()) for length in lengths]
    return rids, len(rids) + 1


@template(fits=on("room"))
def pause_in_chunk(builder: Builder) -> Opening:
    """A prompt that is half read while another request decodes."""
    builder.arrive(0, builder.length(1, builder.chunk), new=builder.long_run())
    builder.arrive(2, builder.length(2 * builder.chunk + 1, 3 * builder.chunk))
    builder.timeline.at(3, "pause")
    builder.timeline.at(3 + builder.integer(1, 3), "resume")
    return Opening(calm=8, protected=("r0", "r1"))


@template(fits=on())
def pause_resume(builder: Builder) -> Opening:
    step = builder.chunks(_runs_on(builder)) + 1
    resumed = step + builder.integer(1, 3)
    builder.timeline.at(step, "pause")
    builder.timeline.at(resumed, "resume")
    return Opening(calm=resumed + 1, protected=("r0",))


@template(fits=on())
def abort_while_paused(builder: Builder) -> Opening:
    step = builder.chunks(_runs_on(builder)) + 1
    builder.timeline.at(step, "pause")
    builder.timeline.at(step + 1, "abort", "r0")
    builder.timeline.at(step + 2, "resume")
    return Opening(calm=step + 3)


@template(fits=on())
def abort_after_retraction(builder: Builder) -> Opening:
    step = builder.chunks(_runs_on(builder)) + builder.integer(1, 2)
    builder.timeline.at(step, "retract")
    builder.timeline.at(step, "abort", "r0")
    return Opening(calm=step + 1)


def _runs_on(builder: Builder) -> int:
    """One request that decodes for a while; the length of its prompt."""
    length = builder.length()
    builder.arrive(0, length, new=builder.long_run())
    return length


@template(fits=on("cache"))
def cache_flushed(builder: Builder) -> Opening:
    """The same prompt before and after the prefix cache was emptied."""
    prompt = builder.prompt(builder.length(4, 3 * builder.chunk))
    builder.timeline.arrive(0, builder.request(prompt, new=builder.new_tokens(1, 8)))
    gone = builder.chunks(len(prompt)) + 16
    builder.timeline.at(gone, "flush")
    builder.timeline.arrive(gone, builder.request(prompt, new=builder.new_tokens()))
    return Opening(calm=gone + 1)
