"""Templates of batches that grow and shrink, and of what a verify accepts."""

from __future__ import annotations

from cases.fixed import never
from cases.kit import CONTEXT, DECODING, LONGEST_PROMPT, MOST_NEW, Kit, Opening, template
from cases.templates.where import on
from harness.contract.admission import reserved
from harness.contract.scenario import room


@template(fits=on())
def all_finished_in_one_verify(kit: Kit) -> Opening:
    """Alone, and with two tokens to generate: one from the prefill, the other from the first verify."""
    length = kit.length()
    kit.arrive(0, length, new=2)
    return Opening(calm=kit.chunks(length) + 1, protected=("r0",))


@template(fits=on())
def all_finished_with_arrival(kit: Kit) -> Opening:
    kit.arrive(0, kit.length(1, kit.chunk), new=2)
    kit.arrive(2, kit.length(), stops=True)
    return Opening(calm=3, protected=("r0", "r1"))


@template(fits=on("room"))
def some_finished(kit: Kit) -> Opening:
    """One of two requests has two tokens to generate."""
    kit.chunk = max(kit.chunk, 2 * kit.page)
    for new in (2, kit.long_run()):
        kit.arrive(0, kit.integer(1, kit.chunk // 2 - kit.page + 1), new=new)
    return Opening(calm=2, protected=("r0", "r1"))


@template(fits=on("room"))
def batch_grows(kit: Kit) -> Opening:
    kit.arrive(0, kit.length(1, kit.chunk), new=kit.long_run())
    length = kit.length()
    kit.arrive(2, length, new=kit.new_tokens(4))
    return Opening(calm=2 + kit.chunks(length) + 1, protected=("r0", "r1"))


@template(fits=on())
def one_token_left(kit: Kit) -> Opening:
    return all_finished_in_one_verify(kit)


@template(fits=on())
def idle_tick(kit: Kit) -> Opening:
    kit.arrive(0, kit.length(1, kit.chunk), new=kit.new_tokens(1, 4))
    kit.arrive(10, kit.length(), stops=True)
    return Opening(calm=11, protected=("r0", "r1"))


@template(fits=on("no priorities"))
def running_limit_reached(kit: Kit) -> Opening:
    kit.running_limit = kit.integer(1, 2)
    for _ in range(kit.running_limit + 1):
        kit.arrive(0, kit.length(1, 20), new=kit.long_run())
    return Opening(calm=8)


@template(fits=on("no room"), certain=False, texts=None)
def pool_exhausted(kit: Kit) -> Opening:
    """Prompts that fit the pool together with what a draft takes, and more to generate than it holds."""
    spec, count = kit.boot.spec, kit.integer(2, 4)
    draft = max(spec.num_steps * spec.eagle_topk, spec.num_draft_tokens)
    share = kit.boot.engine.max_total_tokens // count - draft - 12
    for _ in range(count):
        request = kit.request(kit.prompt(kit.integer(share - 4, share)), new=kit.new_tokens(MOST_NEW - 2))
        kit.timeline.arrive(
            kit.integer(0, 1), request.model_copy(update={"stop_token_ids": (never(kit.boot.checkpoint),)})
        )
    return Opening(calm=16)


@template(fits=on(), certain=False)
def stop_inside_accepted_run(kit: Kit) -> Opening:
    """Several requests that end on a token they generate; some of them with accepted tokens after it."""
    for _ in range(kit.integer(2, 4)):
        request = kit.request(kit.prompt(kit.length(1, 40)), new=kit.new_tokens(4))
        kit.timeline.arrive(kit.integer(0, 3), request.model_copy(update={"stop_token_ids": kit.stop_ids()}))
    return Opening()


@template(fits=on("cache", "pages"))
def page_border_in_draft(kit: Kit) -> Opening:
    """The prompt ends so close to the end of a page that the first verify goes on behind it."""
    pages = kit.integer(1, max(1, LONGEST_PROMPT // kit.page))
    length = kit.page * pages - kit.integer(1, min(kit.k, kit.page - 1))
    kit.arrive(0, length, new=kit.long_run())
    return Opening(calm=kit.chunks(length) + DECODING, protected=("r0",))


@template(fits=on("a context's room"))
def context_limit(kit: Kit) -> Opening:
    """As much as SGLang admits: prompt, output and the slots it holds back for drafts fill the window exactly.

    It also refuses prompts that leave less than six tokens of the window.
    """
    spec, new = kit.boot.spec, kit.new_tokens(6)
    kit.chunk *= 4
    length = CONTEXT - reserved(spec) - new
    kit.arrive(0, length, new=new)
    return Opening(calm=kit.chunks(length), protected=("r0",))


@template(fits=on("room", "chains"), certain=False)
def unlimited_ended(kit: Kit) -> Opening:
    """A fourth of all tokens stops it; a tree's writes past its row where none comes (F-025)."""
    prompt = kit.prompt(kit.length())
    stops = tuple(range(kit.integer(0, 3), kit.boot.vocab, 4))
    long = kit.request(prompt, new=room(len(prompt), kit.boot.engine))  # for how long it may live
    kit.timeline.arrive(0, long.model_copy(update={"unlimited": True, "stop_token_ids": stops}))
    return Opening(calm=kit.chunks(len(prompt)) + 1, protected=("r0",))


@template(fits=on("room", "no ranks"))
def samples_of_one_prompt(kit: Kit) -> Opening:
    length = kit.length()
    several = kit.request(kit.prompt(length), new=kit.long_run())
    asked = {"n": kit.integer(2, 3), "temperature": kit.random.choice((0.7, 1.0, 1.3))}
    kit.timeline.arrive(0, several.model_copy(update=asked))
    return Opening(calm=kit.chunks(length) + DECODING, protected=("r0",), events=False)


@template(fits=on())
def too_long_refused(kit: Kit) -> Opening:
    """One that runs, and one that is longer than SGLang admits by no more than it keeps for drafts."""
    kit.arrive(0, kit.length(1, 20), new=kit.long_run())
    spare, new = reserved(kit.boot.spec), kit.new_tokens()
    long = kit.request(kit.prompt(CONTEXT - spare - new + kit.integer(1, spare)), new=new)
    kit.timeline.arrive(kit.integer(0, 3), long.model_copy(update={"expect": "refusal"}))
    return Opening(calm=3, protected=(long.rid,))


@template(fits=on("no priorities", "queue"))
def full_queue_refused(kit: Kit) -> Opening:
    """One more than may wait, all at once: the last one."""
    waiting = kit.boot.engine.max_queued_requests or 0
    made = [kit.request(kit.prompt(kit.length(1, 20)), new=kit.new_tokens()) for _ in range(waiting + 1)]
    kit.timeline.arrive(0, *made[:-1], made[-1].model_copy(update={"expect": "refusal"}))
    return Opening(calm=2, protected=(made[-1].rid,))


@template(fits=on("no room", "an end"))
def outgrew_the_pool(kit: Kit) -> Opening:
    """So long that SGLang cuts what is to come to the pool's size, where no draft fits behind it any more."""
    room = kit.boot.engine.max_total_tokens
    large = kit.request(kit.prompt(room - kit.integer(12, MOST_NEW)), new=MOST_NEW)
    kit.timeline.arrive(0, large.model_copy(update={"expect": "exhaustion"}))
    return Opening(calm=24, protected=(large.rid,), events=False)
