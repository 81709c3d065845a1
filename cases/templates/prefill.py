"""Templates of anything, of prompts in chunks and of prefixes that are cached."""

from __future__ import annotations

from cases.builder import DECODING, LONGEST_PROMPT, Builder, Opening, template
from cases.fixed_weights import update
from cases.templates.where import on


@template(fits=on(), certain=False, roams=True)
def free(builder: Builder) -> Opening:
    """Nothing in particular: one to three requests at any time."""
    for _ in range(builder.integer(1, 3)):
        builder.arrive(builder.integer(0, 8), builder.length(), stops=True)
    return Opening()


@template(fits=on("room"), certain=False, roams=True)
def company(builder: Builder) -> Opening:
    """Two to four requests that meet: two at once, the others soon after, some as branches of another's prompt."""
    for place in range(builder.integer(2, 4)):
        prompt = builder.prompt_or_branch(builder.length(2 if place == 0 else 1, 60))
        builder.timeline.arrive(
            0 if place < 2 else builder.integer(0, 6), builder.request(prompt, new=builder.long_run())
        )
    return Opening()


@template(fits=on())
def non_final_chunk(builder: Builder) -> Opening:
    builder.arrive(0, builder.length(builder.chunk + 1), stops=True)
    return Opening(calm=1)


@template(fits=on())
def chunk_longer_by_one(builder: Builder) -> Opening:
    builder.arrive(0, _multiple(builder) + 1, stops=True)
    return Opening(calm=5)


@template(fits=on())
def chunk_exact_multiple(builder: Builder) -> Opening:
    builder.arrive(0, _multiple(builder), stops=True)
    return Opening(calm=5)


def _multiple(builder: Builder) -> int:
    return builder.chunk * builder.integer(1, min(3, LONGEST_PROMPT // builder.chunk))


@template(fits=on("room"))
def split_by_shared_budget(builder: Builder) -> Opening:
    """The second request fits a chunk of its own, but not what the first one leaves of it (at least a page)."""
    builder.chunk = max(builder.chunk, 2 * builder.page)
    first = builder.integer(1, builder.chunk - builder.page)
    used = -(-first // builder.page) * builder.page
    builder.arrive(0, first)
    builder.arrive(0, builder.integer(builder.chunk - used + 1, builder.chunk))
    return Opening(calm=2)


@template(fits=on("room"))
def chunked_back_to_back(builder: Builder) -> Opening:
    for _ in range(2):
        builder.arrive(0, builder.length(builder.chunk + 1, min(LONGEST_PROMPT, 3 * builder.chunk)))
    return Opening(calm=6)


@template(fits=on("room", "mixed chunks"), often=True)
def mixed_batch(builder: Builder) -> Opening:
    """A prompt that arrives, in chunks or whole, while one or two requests run."""
    for _ in range(builder.integer(1, 2)):
        builder.arrive(0, builder.length(1, 8), new=builder.long_run())
    builder.arrive(DECODING, builder.length(2))
    return Opening(calm=DECODING + 1, unlogged=True)


@template(fits=on("room", "adapters"), often=True)
def adapters_in_one_batch(builder: Builder) -> Opening:
    """Two or three that meet, each with another adapter, or with none."""
    for name in builder.random.sample(builder.adapters, builder.integer(2, len(builder.adapters))):
        one = builder.request(builder.prompt(builder.length(1, 8)), new=builder.long_run())
        builder.timeline.arrive(0, one.model_copy(update={"lora_path": name}))
    return Opening(calm=DECODING + 2)


@template(fits=on("room", "new weights"), often=True)
def updated_while_running(builder: Builder) -> Opening:
    """One or two that run when their engine gets other weights, and one that begins as an earlier one, behind that."""
    for _ in range(builder.integer(1, 2)):
        builder.arrive(0, builder.length(1, 8), new=builder.long_run())
    step, take = builder.integer(DECODING, DECODING + 1), builder.random.choice(builder.boot.takes)
    builder.timeline.ops.append((step, update(builder.boot, take, running=True)))
    builder.timeline.arrive(
        step + builder.integer(1, 3),
        builder.request(builder.prompt_or_branch(builder.length()), new=builder.new_tokens()),
    )
    return Opening(calm=step + 1)


@template(fits=on("room", "changing steps"), certain=False, often=True)
def steps_raised(builder: Builder) -> Opening:
    """Requests that come one after another, so that batches of each size decide."""
    for place in range(builder.integer(2, 4)):
        builder.arrive(3 * place, builder.length(1, 20), new=builder.long_run())
    return Opening(calm=DECODING)


@template(fits=on("cache"))
def prefix_hit(builder: Builder) -> Opening:
    return _shared(builder, builder.integer(max(2, builder.page + 1), 48))


@template(fits=on("cache", "pages"))
def prefix_ends_at_page_border(builder: Builder) -> Opening:
    return _shared(builder, builder.page * builder.integer(2, _pages(builder)))


@template(fits=on("cache", "pages"))
def prefix_ends_before_page_border(builder: Builder) -> Opening:
    return _shared(builder, builder.page * builder.integer(3, _pages(builder)) - 1)


@template(fits=on("cache", "pages"))
def prefix_ends_after_page_border(builder: Builder) -> Opening:
    return _shared(builder, builder.page * builder.integer(2, _pages(builder)) + 1)


def _pages(builder: Builder) -> int:
    """The most pages that two prompts share: three, or ten short ones; with the rest of one they fit the pool."""
    return max(3, min(10, min(160, builder.boot.engine.max_total_tokens - 80) // builder.page))


def _shared(builder: Builder, shared: int) -> Opening:
    """One request, and after its prefill another that leaves its prompt after `shared` tokens."""
    first = builder.prompt(shared + builder.integer(1, 20))
    second = builder.branch_of(first, shared, builder.integer(1, 20))
    builder.timeline.arrive(0, builder.request(first, new=builder.new_tokens()))
    later = builder.chunks(len(first)) + builder.integer(1, 8)
    builder.timeline.arrive(later, builder.request(second, new=builder.new_tokens(), stops=True))
    return Opening(events=False, cached=True)


@template(fits=on("cache", "windows"))
def prefix_hit_past_window(builder: Builder) -> Opening:
    """Longer than the windows of the tiny pairs, in whole pages."""
    return _shared(builder, builder.integer(24, 48))
