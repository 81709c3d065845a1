"""Templates of anything, of prompts in chunks and of prefixes that are cached."""

from __future__ import annotations

from cases.fixed_weights import update
from cases.kit import DECODING, LONGEST_PROMPT, Kit, Opening, template
from cases.templates.where import on


@template(fits=on(), certain=False, roams=True)
def free(kit: Kit) -> Opening:
    """Nothing in particular: one to three requests at any time."""
    for _ in range(kit.integer(1, 3)):
        kit.arrive(kit.integer(0, 8), kit.length(), stops=True)
    return Opening()


@template(fits=on("room"), certain=False, roams=True)
def company(kit: Kit) -> Opening:
    """Two to four requests that meet: two at once, the others soon after, some as branches of another's prompt."""
    for place in range(kit.integer(2, 4)):
        prompt = kit.prompt_or_branch(kit.length(2 if place == 0 else 1, 60))
        kit.timeline.arrive(0 if place < 2 else kit.integer(0, 6), kit.request(prompt, new=kit.long_run()))
    return Opening()


@template(fits=on())
def non_final_chunk(kit: Kit) -> Opening:
    kit.arrive(0, kit.length(kit.chunk + 1), stops=True)
    return Opening(calm=1)


@template(fits=on())
def chunk_longer_by_one(kit: Kit) -> Opening:
    kit.arrive(0, _multiple(kit) + 1, stops=True)
    return Opening(calm=5)


@template(fits=on())
def chunk_exact_multiple(kit: Kit) -> Opening:
    kit.arrive(0, _multiple(kit), stops=True)
    return Opening(calm=5)


def _multiple(kit: Kit) -> int:
    return kit.chunk * kit.integer(1, min(3, LONGEST_PROMPT // kit.chunk))


@template(fits=on("room"))
def split_by_shared_budget(kit: Kit) -> Opening:
    """The second request fits a chunk of its own, but not what the first one leaves of it (at least a page)."""
    kit.chunk = max(kit.chunk, 2 * kit.page)
    first = kit.integer(1, kit.chunk - kit.page)
    used = -(-first // kit.page) * kit.page
    kit.arrive(0, first)
    kit.arrive(0, kit.integer(kit.chunk - used + 1, kit.chunk))
    return Opening(calm=2)


@template(fits=on("room"))
def chunked_back_to_back(kit: Kit) -> Opening:
    for _ in range(2):
        kit.arrive(0, kit.length(kit.chunk + 1, min(LONGEST_PROMPT, 3 * kit.chunk)))
    return Opening(calm=6)


@template(fits=on("room", "mixed chunks"), often=True)
def mixed_batch(kit: Kit) -> Opening:
    """A prompt that arrives, in chunks or whole, while one or two requests run."""
    for _ in range(kit.integer(1, 2)):
        kit.arrive(0, kit.length(1, 8), new=kit.long_run())
    kit.arrive(DECODING, kit.length(2))
    return Opening(calm=DECODING + 1, unlogged=True)


@template(fits=on("room", "adapters"), often=True)
def adapters_in_one_batch(kit: Kit) -> Opening:
    """Two or three that meet, each with another adapter, or with none."""
    for name in kit.random.sample(kit.adapters, kit.integer(2, len(kit.adapters))):
        one = kit.request(kit.prompt(kit.length(1, 8)), new=kit.long_run())
        kit.timeline.arrive(0, one.model_copy(update={"lora_path": name}))
    return Opening(calm=DECODING + 2)


@template(fits=on("room", "new weights"), often=True)
def updated_while_running(kit: Kit) -> Opening:
    """One or two that run when their engine gets other weights, and one that begins as an earlier one, behind that."""
    for _ in range(kit.integer(1, 2)):
        kit.arrive(0, kit.length(1, 8), new=kit.long_run())
    step, take = kit.integer(DECODING, DECODING + 1), kit.random.choice(kit.boot.takes)
    kit.timeline.ops.append((step, update(kit.boot, take, running=True)))
    kit.timeline.arrive(step + kit.integer(1, 3), kit.request(kit.prompt_or_branch(kit.length()), new=kit.new_tokens()))
    return Opening(calm=step + 1)


@template(fits=on("room", "changing steps"), certain=False, often=True)
def steps_raised(kit: Kit) -> Opening:
    """Requests that come one after another, so that batches of each size decide."""
    for place in range(kit.integer(2, 4)):
        kit.arrive(3 * place, kit.length(1, 20), new=kit.long_run())
    return Opening(calm=DECODING)


@template(fits=on("cache"))
def prefix_hit(kit: Kit) -> Opening:
    return _shared(kit, kit.integer(max(2, kit.page + 1), 48))


@template(fits=on("cache", "pages"))
def prefix_ends_at_page_border(kit: Kit) -> Opening:
    return _shared(kit, kit.page * kit.integer(2, _pages(kit)))


@template(fits=on("cache", "pages"))
def prefix_ends_before_page_border(kit: Kit) -> Opening:
    return _shared(kit, kit.page * kit.integer(3, _pages(kit)) - 1)


@template(fits=on("cache", "pages"))
def prefix_ends_after_page_border(kit: Kit) -> Opening:
    return _shared(kit, kit.page * kit.integer(2, _pages(kit)) + 1)


def _pages(kit: Kit) -> int:
    """The most pages that two prompts share: three, or ten short ones; with the rest of one they fit the pool."""
    return max(3, min(10, min(160, kit.boot.engine.max_total_tokens - 80) // kit.page))


def _shared(kit: Kit, shared: int) -> Opening:
    """One request, and after its prefill another that leaves its prompt after `shared` tokens."""
    first = kit.prompt(shared + kit.integer(1, 20))
    second = kit.branch_of(first, shared, kit.integer(1, 20))
    kit.timeline.arrive(0, kit.request(first, new=kit.new_tokens()))
    later = kit.chunks(len(first)) + kit.integer(1, 8)
    kit.timeline.arrive(later, kit.request(second, new=kit.new_tokens(), stops=True))
    return Opening(events=False, cached=True)


@template(fits=on("cache", "windows"))
def prefix_hit_past_window(kit: Kit) -> Opening:
    """Longer than the windows of the tiny pairs, in whole pages."""
    return _shared(kit, kit.integer(24, 48))
