"""Templates of batch programs: each opens a scenario so that one coverage point comes about, and is named after it.

To add one: a function that writes requests and ops into the kit's timeline, decorated with `@template(fits=…)`, and
`certain=False` if the point need not happen whatever is drawn. It names a batch shape, never a bug.
"""

from __future__ import annotations

from collections.abc import Callable

from cases.boots import Boot
from cases.fixed import never
from cases.fixed_weights import update
from cases.kit import CONTEXT, DECODING, LONGEST_PROMPT, MOST_NEW, Kit, Opening, template
from harness.contract.admission import reserved, reserved_slots
from harness.contract.scenario import room

#: What a boot configuration has, by a word.
HAS: dict[str, Callable[[Boot], bool]] = {
    "cache": lambda boot: boot.engine.radix_cache,
    "pages": lambda boot: boot.engine.page_size > 1,
    "windows": lambda boot: not boot.engine.disable_hybrid_swa_memory,
    "states": lambda boot: boot.checkpoint.startswith("hybrid"),
    "host": lambda boot: bool(boot.engine.server_args.get("enable_hierarchical_cache")),
    # a template's two or three requests surely fit the pool together
    "room": lambda boot: boot.engine.max_total_tokens >= 512,
    "a context's room": lambda boot: boot.engine.max_total_tokens > CONTEXT,
    # a request that SGLang cuts to the pool, less a page or so, has no room for its last round: two are reserved, of
    # which it may fill one
    "an end": lambda boot: reserved_slots(boot.spec) - (boot.spec.most_steps + 1) > boot.engine.page_size + 1,
    "ranks": lambda boot: boot.engine.dp_size > 1,
    "coordination": lambda boot: boot.engine.dp_spec_prefill_coordination,
    "priorities": lambda boot: boot.engine.priority_scheduling,
    "queue": lambda boot: boot.engine.max_queued_requests is not None,
    "mixed chunks": lambda boot: boot.engine.enable_mixed_chunk,
    "changing steps": lambda boot: boot.spec.adaptive is not None,
    "chains": lambda boot: boot.spec.eagle_topk == 1,
    "adapters": lambda boot: len(boot.engine.lora_paths) > 0,
    "new weights": lambda boot: bool(boot.successor),
}


def on(*words: str) -> Callable[[Boot], bool]:
    """Whether a boot configuration has all of these, or has not what "no" stands before.

    One engine; a pair of them is in `cases/templates_handoff`.
    """
    wanted = [(HAS[word.removeprefix("no ")], not word.startswith("no ")) for word in words]
    return lambda boot: not boot.engine.disaggregation and all(has(boot) == due for has, due in wanted)


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


# Prefill


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


# A hierarchical cache


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


# Sliding windows


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


# Recurrent states


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


# Batches


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


# Acceptance


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


# Leaving and coming back


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


# Ranks of DP attention; each template of one rank is all on one rank, and what else arrives may be on any


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
