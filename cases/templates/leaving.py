"""Templates of requests that leave and come back: aborted, retracted, paused."""

from __future__ import annotations

from cases.kit import Kit, Opening, template
from cases.templates.where import on


@template(fits=on("priorities"), certain=False)
def preempted(kit: Kit) -> Opening:
    """As many as may run at once, and then one that is more urgent by more than SGLang's threshold of ten."""
    running = kit.boot.engine.max_running_requests
    for _ in range(running):
        calm = kit.request(kit.prompt(kit.length(1, kit.chunk)), new=kit.long_run())
        kit.timeline.arrive(0, calm.model_copy(update={"priority": kit.integer(0, 5)}))
    urgent = kit.request(kit.prompt(kit.length()), new=kit.new_tokens())
    step = running + kit.integer(1, 3)
    kit.timeline.arrive(step, urgent.model_copy(update={"priority": kit.integer(20, 30)}))
    return Opening(calm=step)


@template(fits=on())
def abort_before_prefill(kit: Kit) -> Opening:
    """The first request takes three whole chunks, so the second one still waits when it is aborted."""
    kit.arrive(0, 3 * kit.chunk)
    kit.timeline.at(1, "abort", kit.arrive(0, kit.length()))
    return Opening(calm=3, protected=("r0",))


@template(fits=on())
def abort_in_chunk(kit: Kit) -> Opening:
    kit.timeline.at(1, "abort", kit.arrive(0, kit.length(2 * kit.chunk + 1)))
    return Opening(calm=kit.integer(2, 4))  # a pause before the abort would hold the prompt back behind it


@template(fits=on())
def abort_in_decode(kit: Kit) -> Opening:
    length = _runs_on(kit)
    kit.timeline.at(kit.chunks(length) + kit.integer(1, 2), "abort", "r0")
    return Opening(calm=kit.chunks(length), events=False)


@template(fits=on())
def abort_last_live(kit: Kit) -> Opening:
    gone = kit.chunks(_runs_on(kit)) + 1
    kit.timeline.at(gone, "abort", "r0")
    return Opening(calm=gone + 1)


@template(fits=on())
def retract_resume(kit: Kit) -> Opening:
    step = kit.chunks(_runs_on(kit)) + kit.integer(1, 2)
    kit.timeline.at(step, "retract")
    return Opening(calm=step + 1, protected=("r0",))


@template(fits=on("room"))
def partial_retraction(kit: Kit) -> Opening:
    """Some of several that run together, by name or by SGLang's own switch."""
    rids, step = _together(kit)
    if kit.chance():
        kit.timeline.at(step, "retract", *kit.random.sample(rids, kit.integer(1, len(rids) - 1)))
    else:
        kit.timeline.at(step, "retract", name="test")
    return Opening(calm=step + 1, protected=tuple(rids))


@template(fits=on("room"), certain=False)
def batch_reordered(kit: Kit) -> Opening:
    """SGLang keeps those first that have generated most: here the longest prompts come first, and differ in that."""
    rids, step = _together(kit)
    kit.timeline.at(step + kit.integer(0, 3), "retract", kit.random.choice(rids))
    return Opening(calm=step + 4)


@template(fits=on("room"))
def abort_of_some(kit: Kit) -> Opening:
    rids, step = _together(kit)
    kit.timeline.at(step, "abort", kit.random.choice(rids))
    return Opening(calm=step + 1, protected=tuple(rids))


def _together(kit: Kit) -> tuple[list[str], int]:
    """Three or four that decode together, and the step from which they surely do."""
    kit.chunk = max(kit.chunk, 2 * kit.page)
    lengths = sorted((kit.integer(1, kit.chunk) for _ in range(kit.integer(3, 4))), reverse=True)
    rids = [kit.arrive(0, length, new=kit.long_run()) for length in lengths]
    return rids, len(rids) + 1


@template(fits=on("room"))
def pause_in_chunk(kit: Kit) -> Opening:
    """A prompt that is half read while another request decodes."""
    kit.arrive(0, kit.length(1, kit.chunk), new=kit.long_run())
    kit.arrive(2, kit.length(2 * kit.chunk + 1, 3 * kit.chunk))
    kit.timeline.at(3, "pause")
    kit.timeline.at(3 + kit.integer(1, 3), "resume")
    return Opening(calm=8, protected=("r0", "r1"))


@template(fits=on())
def pause_resume(kit: Kit) -> Opening:
    step = kit.chunks(_runs_on(kit)) + 1
    resumed = step + kit.integer(1, 3)
    kit.timeline.at(step, "pause")
    kit.timeline.at(resumed, "resume")
    return Opening(calm=resumed + 1, protected=("r0",))


@template(fits=on())
def abort_while_paused(kit: Kit) -> Opening:
    step = kit.chunks(_runs_on(kit)) + 1
    kit.timeline.at(step, "pause")
    kit.timeline.at(step + 1, "abort", "r0")
    kit.timeline.at(step + 2, "resume")
    return Opening(calm=step + 3)


@template(fits=on())
def abort_after_retraction(kit: Kit) -> Opening:
    step = kit.chunks(_runs_on(kit)) + kit.integer(1, 2)
    kit.timeline.at(step, "retract")
    kit.timeline.at(step, "abort", "r0")
    return Opening(calm=step + 1)


def _runs_on(kit: Kit) -> int:
    """One request that decodes for a while; the length of its prompt."""
    length = kit.length()
    kit.arrive(0, length, new=kit.long_run())
    return length


@template(fits=on("cache"))
def cache_flushed(kit: Kit) -> Opening:
    """The same prompt before and after the prefix cache was emptied."""
    prompt = kit.prompt(kit.length(4, 3 * kit.chunk))
    kit.timeline.arrive(0, kit.request(prompt, new=kit.new_tokens(1, 8)))
    gone = kit.chunks(len(prompt)) + 16
    kit.timeline.at(gone, "flush")
    kit.timeline.arrive(gone, kit.request(prompt, new=kit.new_tokens()))
    return Opening(calm=gone + 1)
