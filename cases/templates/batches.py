"""Templates of batches that grow and shrink, and of what a verify accepts."""

from __future__ import annotations

from cases.builder import CONTEXT, DECODING, LONGEST_PROMPT, MOST_NEW, Builder, Opening, template
from cases.fixed import never
from cases.templates.where import on
from harness.contract.admission import reserved
from harness.contract.scenario import room


@template(fits=on())
def all_finished_in_one_verify(builder: Builder) -> Opening:
    """Alone, and with two tokens to generate: one from the prefill, the other from the first verify."""
    length = builder.length()
    builder.arrive(0, length, new=2)
    return Opening(calm=builder.chunks(length) + 1, protected=("r0",))


@template(fits=on())
def all_finished_with_arrival(builder: Builder) -> Opening:
    builder.arrive(0, builder.length(1, builder.chunk), new=2)
    builder.arrive(2, builder.length(), stops=True)
    return Opening(calm=3, protected=("r0", "r1"))


@template(fits=on("room"))
def some_finished(builder: Builder) -> Opening:
    """One of two requests has two tokens to generate."""
    builder.chunk = max(builder.chunk, 2 * builder.page)
    for new in (2, builder.long_run()):
        builder.arrive(0, builder.integer(1, builder.chunk // 2 - builder.page + 1), new=new)
    return Opening(calm=2, protected=("r0", "r1"))


@template(fits=on("room"))
def batch_grows(builder: Builder) -> Opening:
    builder.arrive(0, builder.length(1, builder.chunk), new=builder.long_run())
    length = builder.length()
    builder.arrive(2, length, new=builder.new_tokens(4))
    return Opening(calm=2 + builder.chunks(length) + 1, protected=("r0", "r1"))


@template(fits=on())
def one_token_left(builder: Builder) -> Opening:
    return all_finished_in_one_verify(builder)


@template(fits=on())
def idle_tick(builder: Builder) -> Opening:
    builder.arrive(0, builder.length(1, builder.chunk), new=builder.new_tokens(1, 4))
    builder.arrive(10, builder.length(), stops=True)
    return Opening(calm=11, protected=("r0", "r1"))


@template(fits=on("no priorities"))
def running_limit_reached(builder: Builder) -> Opening:
    builder.running_limit = builder.integer(1, 2)
    for _ in range(builder.running_limit + 1):
        builder.arrive(0, builder.length(1, 20), new=builder.long_run())
    return Opening(calm=8)


@template(fits=on("no room"), certain=False, texts=None)
def pool_exhausted(builder: Builder) -> Opening:
    """Prompts that fit the pool together with what a draft takes, and more to generate than it holds."""
    spec, count = builder.boot.spec, builder.integer(2, 4)
    draft = max(spec.num_steps * spec.eagle_topk, spec.num_draft_tokens)
    share = builder.boot.engine.max_total_tokens // count - draft - 12
    for _ in range(count):
        request = builder.request(
            builder.prompt(builder.integer(share - 4, share)), new=builder.new_tokens(MOST_NEW - 2)
        )
        builder.timeline.arrive(
            builder.integer(0, 1), request.model_copy(update={"stop_token_ids": (never(builder.boot.checkpoint),)})
        )
    return Opening(calm=16)


@template(fits=on(), certain=False)
def stop_inside_accepted_run(builder: Builder) -> Opening:
    """Several requests that end on a token they generate; some of them with accepted tokens after it."""
    for _ in range(builder.integer(2, 4)):
        request = builder.request(builder.prompt(builder.length(1, 40)), new=builder.new_tokens(4))
        builder.timeline.arrive(
            builder.integer(0, 3), request.model_copy(update={"stop_token_ids": builder.stop_ids()})
        )
    return Opening()


@template(fits=on("cache", "pages"))
def page_border_in_draft(builder: Builder) -> Opening:
    """The prompt ends so close to the end of a page that the first verify goes on behind it."""
    pages = builder.integer(1, max(1, LONGEST_PROMPT // builder.page))
    length = builder.page * pages - builder.integer(1, min(builder.k, builder.page - 1))
    builder.arrive(0, length, new=builder.long_run())
    return Opening(calm=builder.chunks(length) + DECODING, protected=("r0",))


@template(fits=on("a context's room"))
def context_limit(builder: Builder) -> Opening:
    """As much as SGLang admits: prompt, output and the slots it holds back for drafts fill the window exactly.

    It also refuses prompts that leave less than six tokens of the window.
    """
    spec, new = builder.boot.spec, builder.new_tokens(6)
    builder.chunk *= 4
    length = CONTEXT - reserved(spec) - new
    builder.arrive(0, length, new=new)
    return Opening(calm=builder.chunks(length), protected=("r0",))


@template(fits=on("room", "chains"), certain=False)
def unlimited_ended(builder: Builder) -> Opening:
    """A fourth of all tokens stops it; a tree's writes past its row where none comes (F-025)."""
    prompt = builder.prompt(builder.length())
    stops = tuple(range(builder.integer(0, 3), builder.boot.vocab, 4))
    long = builder.request(prompt, new=room(len(prompt), builder.boot.engine))  # for how long it may live
    builder.timeline.arrive(0, long.model_copy(update={"unlimited": True, "stop_token_ids": stops}))
    return Opening(calm=builder.chunks(len(prompt)) + 1, protected=("r0",))


@template(fits=on("room", "no ranks"))
def samples_of_one_prompt(builder: Builder) -> Opening:
    length = builder.length()
    several = builder.request(builder.prompt(length), new=builder.long_run())
    asked = {"n": builder.integer(2, 3), "temperature": builder.random.choice((0.7, 1.0, 1.3))}
    builder.timeline.arrive(0, several.model_copy(update=asked))
    return Opening(calm=builder.chunks(length) + DECODING, protected=("r0",), events=False)


@template(fits=on())
def too_long_refused(builder: Builder) -> Opening:
    """One that runs, and one that is longer than SGLang admits by no more than it keeps for drafts."""
    builder.arrive(0, builder.length(1, 20), new=builder.long_run())
    spare, new = reserved(builder.boot.spec), builder.new_tokens()
    long = builder.request(builder.prompt(CONTEXT - spare - new + builder.integer(1, spare)), new=new)
    builder.timeline.arrive(builder.integer(0, 3), long.model_copy(update={"expect": "refusal"}))
    return Opening(calm=3, protected=(long.rid,))


@template(fits=on("no priorities", "queue"))
def full_queue_refused(builder: Builder) -> Opening:
    """One more than may wait, all at once: the last one."""
    waiting = builder.boot.engine.max_queued_requests or 0
    made = [
        builder.request(builder.prompt(builder.length(1, 20)), new=builder.new_tokens()) for _ in range(waiting + 1)
    ]
    builder.timeline.arrive(0, *made[:-1], made[-1].model_copy(update={"expect": "refusal"}))
    return Opening(calm=2, protected=(made[-1].rid,))


@template(fits=on("no room", "an end"))
def outgrew_the_pool(builder: Builder) -> Opening:
    """So long that SGLang cuts what is to come to the pool's size, where no draft fits behind it any more."""
    room = builder.boot.engine.max_total_tokens
    large = builder.request(builder.prompt(room - builder.integer(12, MOST_NEW)), new=MOST_NEW)
    builder.timeline.arrive(0, large.model_copy(update={"expect": "exhaustion"}))
    return Opening(calm=24, protected=(large.rid,), events=False)
