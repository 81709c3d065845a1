"""Leads: the opening of a generated scenario that brings about one situation, named after it.

A lead is certain if the situation happens whatever the draws; only then does the scenario ask for it. It must not know
a bug: it names a batch shape, never a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cases.strategies import CONTEXT, DECODING, LONGEST_PROMPT, Boot, Kit


@dataclass(frozen=True, slots=True, kw_only=True)
class Led:
    """calm: the turn from which anything else may happen. protected: requests that nobody aborts."""

    calm: int = 0
    protected: tuple[str, ...] = ()
    events: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """How a situation is brought about, and on which boot configurations it can be."""

    build: Callable[[Kit], Led]
    certain: bool
    fits: Callable[[Boot], bool]


LEADS: dict[str, Lead] = {}


def possible(boot: Boot) -> list[str]:
    """The leads that fit a boot configuration, the free one first."""
    return [name for name, lead in LEADS.items() if lead.fits(boot)]


def _lead(
    *, certain: bool = True, fits: Callable[[Boot], bool] = lambda _boot: True
) -> Callable[[Callable[[Kit], Led]], Callable[[Kit], Led]]:
    def keep(build: Callable[[Kit], Led]) -> Callable[[Kit], Led]:
        LEADS[build.__name__] = Lead(build=build, certain=certain, fits=fits)
        return build

    return keep


def _cached(boot: Boot) -> bool:
    return boot.engine.prefix_cache


def _roomy(boot: Boot) -> bool:
    """Whether a lead's two or three requests surely fit the pool together."""
    return boot.engine.pool_tokens >= 512


def _paged(boot: Boot) -> bool:
    return _cached(boot) and boot.engine.page > 1


@_lead(certain=False)
def free(kit: Kit) -> Led:
    """Nothing in particular: one to three requests at any time."""
    for _ in range(kit.integer(1, 3, "requests")):
        kit.timeline.arrive(
            kit.integer(0, 8, "arrival"), kit.request(kit.prompt(kit.length()), new=kit.new_tokens(), stops=True)
        )
    return Led()


@_lead(certain=False, fits=_roomy)
def company(kit: Kit) -> Led:
    """Two to four requests that meet: two at once, the others soon after, some as branches of another's prompt."""
    prompts = [kit.prompt(kit.length(2, 60))]
    for _ in range(kit.integer(1, 3, "others")):
        if kit.chance("shares a prefix"):
            shared = kit.integer(1, len(prompts[0]), "shared")
            prompts.append(kit.branch_of(prompts[0], shared, kit.integer(1, 20, "own tokens")))
        else:
            prompts.append(kit.prompt(kit.length(1, 60)))
    for place, prompt in enumerate(prompts):
        turn = 0 if place < 2 else kit.integer(0, 6, "arrival")
        kit.timeline.arrive(turn, kit.request(prompt, new=kit.long_run()))
    return Led()


# Prefill


@_lead()
def non_final_chunk(kit: Kit) -> Led:
    prompt = kit.prompt(kit.length(kit.chunk + 1))
    kit.timeline.arrive(0, kit.request(prompt, new=kit.new_tokens(), stops=True))
    return Led(calm=1)


@_lead()
def chunk_longer_by_one(kit: Kit) -> Led:
    kit.timeline.arrive(0, kit.request(kit.prompt(_multiple(kit) + 1), new=kit.new_tokens(), stops=True))
    return Led(calm=5)


@_lead()
def chunk_exact_multiple(kit: Kit) -> Led:
    kit.timeline.arrive(0, kit.request(kit.prompt(_multiple(kit)), new=kit.new_tokens(), stops=True))
    return Led(calm=5)


def _multiple(kit: Kit) -> int:
    return kit.chunk * kit.integer(1, min(3, LONGEST_PROMPT // kit.chunk), "chunks")


@_lead(fits=_roomy)
def split_by_shared_budget(kit: Kit) -> Led:
    """The second request fits a chunk of its own, but not what the first one leaves of it (at least a page)."""
    kit.chunk = max(kit.chunk, 2 * kit.page)
    first = kit.integer(1, kit.chunk - kit.page, "first length")
    used = -(-first // kit.page) * kit.page
    second = kit.integer(kit.chunk - used + 1, kit.chunk, "second length")
    for length in (first, second):
        kit.timeline.arrive(0, kit.request(kit.prompt(length), new=kit.new_tokens()))
    return Led(calm=2)


@_lead(fits=_roomy)
def chunked_back_to_back(kit: Kit) -> Led:
    for _ in range(2):
        prompt = kit.prompt(kit.length(kit.chunk + 1, min(LONGEST_PROMPT, 3 * kit.chunk)))
        kit.timeline.arrive(0, kit.request(prompt, new=kit.new_tokens()))
    return Led(calm=6)


@_lead(fits=_cached)
def prefix_hit(kit: Kit) -> Led:
    _shared(kit, shared=kit.integer(max(2, kit.page + 1), 48, "shared"))
    return Led(calm=0, events=False)


@_lead(fits=_paged)
def prefix_ends_at_page_border(kit: Kit) -> Led:
    _shared(kit, shared=kit.page * kit.integer(2, _pages(kit), "pages"))
    return Led(events=False)


@_lead(fits=_paged)
def prefix_ends_before_page_border(kit: Kit) -> Led:
    _shared(kit, shared=kit.page * kit.integer(3, _pages(kit), "pages") - 1)
    return Led(events=False)


@_lead(fits=_paged)
def prefix_ends_after_page_border(kit: Kit) -> Led:
    _shared(kit, shared=kit.page * kit.integer(2, _pages(kit), "pages") + 1)
    return Led(events=False)


def _pages(kit: Kit) -> int:
    """The most pages that two prompts share: three, or ten short ones; far below the context window."""
    return max(3, min(10, 160 // kit.page))


def _shared(kit: Kit, *, shared: int) -> None:
    """One request, and after its prefill another that leaves its prompt after `shared` tokens."""
    first = kit.prompt(shared + kit.integer(1, 20, "first goes on"))
    second = kit.branch_of(first, shared, kit.integer(1, 20, "second goes on"))
    kit.timeline.arrive(0, kit.request(first, new=kit.new_tokens()))
    later = kit.chunks(len(first)) + kit.integer(1, 8, "later")
    kit.timeline.arrive(later, kit.request(second, new=kit.new_tokens(), stops=True))


# Batches


@_lead()
def all_finished_in_one_verify(kit: Kit) -> Led:
    """Alone, and with two tokens to generate: one from the prefill, the other from the first verify."""
    length = kit.length()
    kit.timeline.arrive(0, kit.request(kit.prompt(length), new=2))
    return Led(calm=kit.chunks(length) + 1, protected=("r0",))


@_lead()
def all_finished_with_arrival(kit: Kit) -> Led:
    length = kit.length(1, kit.chunk)
    kit.timeline.arrive(0, kit.request(kit.prompt(length), new=2))
    kit.timeline.arrive(2, kit.request(kit.prompt(kit.length()), new=kit.new_tokens(), stops=True))
    return Led(calm=3, protected=("r0", "r1"))


@_lead(fits=_roomy)
def some_finished(kit: Kit) -> Led:
    """One of two requests has two tokens to generate."""
    kit.chunk = max(kit.chunk, 2 * kit.page)
    half = kit.chunk // 2
    for new in (2, kit.long_run()):
        kit.timeline.arrive(0, kit.request(kit.prompt(kit.integer(1, half - kit.page + 1, "length")), new=new))
    return Led(calm=2, protected=("r0", "r1"))


@_lead(fits=_roomy)
def batch_grows(kit: Kit) -> Led:
    kit.timeline.arrive(0, kit.request(kit.prompt(kit.length(1, kit.chunk)), new=kit.long_run()))
    length = kit.length()
    kit.timeline.arrive(2, kit.request(kit.prompt(length), new=kit.new_tokens(4)))
    return Led(calm=2 + kit.chunks(length) + 1, protected=("r0", "r1"))


@_lead()
def one_token_left(kit: Kit) -> Led:
    return all_finished_in_one_verify(kit)


@_lead()
def idle_tick(kit: Kit) -> Led:
    kit.timeline.arrive(0, kit.request(kit.prompt(kit.length(1, kit.chunk)), new=kit.new_tokens(1, 4)))
    kit.timeline.arrive(10, kit.request(kit.prompt(kit.length()), new=kit.new_tokens(), stops=True))
    return Led(calm=11, protected=("r0", "r1"))


@_lead(fits=lambda boot: not boot.engine.priority)
def running_limit_reached(kit: Kit) -> Led:
    kit.running_limit = kit.integer(1, 2, "running limit")
    for _ in range(kit.running_limit + 1):
        kit.timeline.arrive(0, kit.request(kit.prompt(kit.length(1, 20)), new=kit.long_run()))
    return Led(calm=8)


@_lead(certain=False, fits=lambda boot: not _roomy(boot))
def pool_exhausted(kit: Kit) -> Led:
    """Prompts that fit the pool together, and more to generate than it holds."""
    count = kit.integer(3, 4, "requests")
    share = kit.boot.engine.pool_tokens // count
    for _ in range(count):
        length = kit.integer(share - 14, share - 4, "length")
        kit.timeline.arrive(kit.integer(0, 3, "arrival"), kit.request(kit.prompt(length), new=kit.long_run()))
    return Led(calm=12)


# Acceptance


@_lead(certain=False)
def stop_inside_accepted_run(kit: Kit) -> Led:
    """Several requests that end on a token they generate; some of them with accepted tokens after it."""
    for _ in range(kit.integer(2, 4, "requests")):
        prompt, new = kit.prompt(kit.length(1, 40)), kit.new_tokens(4)
        request = kit.request(prompt, new=new)
        stop_ids = kit.stop_ids(prompt, new)
        kit.timeline.arrive(kit.integer(0, 3, "arrival"), request.model_copy(update={"stop_ids": stop_ids}))
    return Led()


@_lead(fits=_paged)
def page_border_in_draft(kit: Kit) -> Led:
    """The prompt ends so close to the end of a page that the first verify goes on behind it."""
    pages = kit.integer(1, max(1, LONGEST_PROMPT // kit.page), "pages")
    length = kit.page * pages - kit.integer(1, min(kit.k, kit.page - 1), "short of the border")
    kit.timeline.arrive(0, kit.request(kit.prompt(length), new=kit.long_run()))
    return Led(calm=kit.chunks(length) + DECODING, protected=("r0",))


@_lead(fits=lambda boot: boot.engine.pool_tokens > CONTEXT)
def context_limit(kit: Kit) -> Led:
    """As much as SGLang admits: prompt, output and the slots it holds back for drafts fill the window exactly.

    It also refuses prompts that leave less than six tokens of the window.
    """
    spec, new = kit.boot.spec, kit.new_tokens(6)
    kit.chunk *= 4
    length = CONTEXT - max(spec.k * spec.t, spec.n) - new
    kit.timeline.arrive(0, kit.request(kit.prompt(length), new=new))
    return Led(calm=kit.chunks(length), protected=("r0",))


# Leaving and coming back


@_lead(certain=False, fits=lambda boot: boot.engine.priority)
def preempted(kit: Kit) -> Led:
    """As many as may run at once, and then one that is more urgent by more than SGLang's threshold of ten."""
    for _ in range(kit.boot.engine.max_running):
        calm = kit.request(kit.prompt(kit.length(1, kit.chunk)), new=kit.long_run())
        kit.timeline.arrive(0, calm.model_copy(update={"priority": kit.integer(0, 5, "low priority")}))
    urgent = kit.request(kit.prompt(kit.length()), new=kit.new_tokens())
    turn = kit.boot.engine.max_running + kit.integer(1, 3, "verifies")
    kit.timeline.arrive(turn, urgent.model_copy(update={"priority": kit.integer(20, 30, "high priority")}))
    return Led(calm=turn)


@_lead()
def abort_before_prefill(kit: Kit) -> Led:
    """The first request takes three whole chunks, so the second one still waits when it is aborted."""
    kit.timeline.arrive(0, kit.request(kit.prompt(3 * kit.chunk), new=kit.new_tokens()))
    kit.timeline.arrive(0, kit.request(kit.prompt(kit.length()), new=kit.new_tokens()))
    kit.timeline.at(1, "abort", "r1")
    return Led(calm=3, protected=("r0",))


@_lead()
def abort_in_chunk(kit: Kit) -> Led:
    kit.timeline.arrive(0, kit.request(kit.prompt(kit.length(2 * kit.chunk + 1)), new=kit.new_tokens()))
    kit.timeline.at(1, "abort", "r0")
    return Led(calm=kit.integer(2, 4, "calm"))  # a pause before the abort would hold the prompt back behind it


@_lead()
def abort_in_decode(kit: Kit) -> Led:
    length = kit.length()
    kit.timeline.arrive(0, kit.request(kit.prompt(length), new=kit.long_run()))
    kit.timeline.at(kit.chunks(length) + kit.integer(1, 2, "verifies"), "abort", "r0")
    return Led(calm=kit.chunks(length), events=False)


@_lead()
def abort_last_live(kit: Kit) -> Led:
    length = kit.length()
    kit.timeline.arrive(0, kit.request(kit.prompt(length), new=kit.long_run()))
    gone = kit.chunks(length) + 1
    kit.timeline.at(gone, "abort", "r0")
    return Led(calm=gone + 1)


@_lead()
def retract_resume(kit: Kit) -> Led:
    length = kit.length()
    kit.timeline.arrive(0, kit.request(kit.prompt(length), new=kit.long_run()))
    turn = kit.chunks(length) + kit.integer(1, 2, "verifies")
    kit.timeline.at(turn, "retract")
    return Led(calm=turn + 1, protected=("r0",))


@_lead()
def pause_resume(kit: Kit) -> Led:
    length = kit.length()
    kit.timeline.arrive(0, kit.request(kit.prompt(length), new=kit.long_run()))
    turn = kit.chunks(length) + 1
    kit.timeline.at(turn, "pause")
    kit.timeline.at(turn + kit.integer(1, 3, "paused turns"), "resume")
    return Led(calm=turn + 1, protected=("r0",))


@_lead(fits=_cached)
def cache_flushed(kit: Kit) -> Led:
    """The same prompt before and after the prefix cache was emptied."""
    prompt = kit.prompt(kit.length(4, 3 * kit.chunk))
    kit.timeline.arrive(0, kit.request(prompt, new=kit.new_tokens(1, 8)))
    gone = kit.chunks(len(prompt)) + 16
    kit.timeline.at(gone, "flush")
    kit.timeline.arrive(gone, kit.request(prompt, new=kit.new_tokens()))
    return Led(calm=gone + 1)


# Ranks of DP attention; each lead of one rank is all on one rank, and what else arrives may be on any


def _ranked(boot: Boot) -> bool:
    return boot.engine.dp > 1


@_lead(fits=_ranked)
def idle_from_the_start(kit: Kit) -> Led:
    """One request, and for its first turns nothing anywhere else."""
    kit.timeline.arrive(0, kit.request(kit.prompt(kit.length()), new=kit.new_tokens(2)))
    return Led(calm=2)


@_lead(fits=_ranked)
def held_idle_by_prefill(kit: Kit) -> Led:
    """A prompt that arrives while another rank decodes."""
    length = kit.length(1, kit.chunk)
    kit.timeline.arrive(0, kit.request(kit.prompt(length), new=kit.long_run()))
    kit.timeline.arrive(2, kit.request(kit.prompt(kit.length()), new=kit.new_tokens(), beside=True))
    return Led(calm=3)


@_lead(fits=_ranked)
def idle_inside_chunked_prefill(kit: Kit) -> Led:
    kit.timeline.arrive(0, kit.request(kit.prompt(kit.length(kit.chunk + 1)), new=kit.new_tokens()))
    return Led(calm=1)


@_lead(fits=_ranked)
def uneven_ranks(kit: Kit) -> Led:
    """Two requests on one rank and one on another, which verify together."""
    for beside in (False, False, True):
        kit.timeline.arrive(0, kit.request(kit.prompt(kit.length(1, 4)), new=kit.long_run(), beside=beside))
    return Led(calm=DECODING)


@_lead(certain=False, fits=_ranked)
def idle_after_all_finished(kit: Kit) -> Led:
    """Short requests on one rank beside a long one: they end together if their drafts are accepted alike."""
    new = kit.new_tokens(2, 6)
    for _ in range(2):
        kit.timeline.arrive(0, kit.request(kit.prompt(kit.length(1, 4)), new=new, beside=True))
    kit.timeline.arrive(0, kit.request(kit.prompt(kit.length(1, 4)), new=kit.long_run()))
    return Led(calm=DECODING)
