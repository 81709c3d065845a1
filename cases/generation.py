"""Generated scenarios: a template that brings about one coverage point, then anything that may happen.

`scenarios` is a Hypothesis strategy, for tests; `generate` draws from a seed alone, for nights, `eaglecheck fuzz` and
benchmarks: scenario i of a boot configuration and a seed is the same whoever asks, for however many. Boot
configurations are a short fixed list, since a reboot is what costs; everything else is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from hypothesis import strategies as st

from cases.boots import Boot
from cases.builder import TEMPLATES, Builder, Opening, possible, shortest_life, turns
from cases.templates import answers, handoff, rules, texts
from harness.checks.logprobs import LOOSE
from harness.contract.requests import ADJUSTING, CUTTING, OF_LOGPROBS, RequestSpec
from harness.contract.scenario import Scenario

MOST_REQUESTS = 5
#: Ids that a request may ask the log-probabilities of.
MOST_IDS = 3
#: What a request returns whose text two models may write: no reference says log-probabilities of that.
WITHOUT_LOGPROBS = {name: RequestSpec.model_fields[name].default for name in ("return_logprob", *OF_LOGPROBS)}
#: What a witness does not know: how a token is drawn or ruled out, and what comes back beside it.
BESIDE_TOKENS = ("temperature", "custom_params", *ADJUSTING, *CUTTING, *WITHOUT_LOGPROBS, "return_hidden_states")


@st.composite
def scenarios(draw: st.DrawFn, boot: Boot) -> Scenario:
    """A scenario for one boot configuration, of plain requests; `generate` draws their keys too."""
    random = draw(st.randoms(use_true_random=False))
    return build(random, boot, template=random.choice(possible(boot)), keys=False)


def generate(boot: Boot, *, count: int, seed: int) -> list[Scenario]:
    """The first `count` scenarios of a seed, the templates alternating in an order that the seed decides."""
    order = turns(boot, Random(f"{boot.name} {seed}"))
    return [
        build(
            Random(f"{boot.name} {seed} {number}"),
            boot,
            template=order[number % len(order)],
            name=f"{boot.name}-{seed}-{number}",
        )
        for number in range(count)
    ]


def greedy(scenarios: Sequence[Scenario]) -> Iterator[Scenario]:
    """Each with requests of greedy tokens alone, which is what a witness follows; not those that are about more."""
    plain = {key: RequestSpec.model_fields[key].default for key in BESIDE_TOKENS}
    about_more = {name for name, one in TEMPLATES.items() if one.build.__module__ in (answers.__name__, rules.__name__)}
    for one in scenarios:
        if about_more.isdisjoint(one.wants):
            yield one.model_copy(update={"requests": tuple(each.model_copy(update=plain) for each in one.requests)})


def build(
    random: Random, boot: Boot, *, template: str, name: str = "generated", quiet: bool = False, keys: bool = True
) -> Scenario:
    """quiet: nothing but the template's own requests and ops. keys: requests sample, and ask for more than tokens."""
    chosen = TEMPLATES[template]
    builder = Builder(random, boot)
    builder.roams = chosen.roams
    opening = chosen.build(builder)
    builder.roams = True
    if boot.engine.disaggregation and not quiet:
        handoff.beside(builder, calm=opening.calm)
    elif not quiet:
        _other_requests(builder, calm=opening.calm)
        if opening.events:
            _interference(builder, calm=opening.calm, protected=opening.protected)
        _one_that_drafts(builder, calm=opening.calm)
    return Scenario(
        name=name,
        checkpoint=boot.checkpoint,
        spec=boot.spec,
        engine=boot.engine.model_copy(
            update={"chunked_prefill_size": builder.chunk, "running_limit": builder.running_limit}
        ),
        requests=_asked(builder, opening, quiet=quiet) if keys else builder.timeline.requests,
        script=builder.timeline.script(),
        # A request of higher priority may come in between anywhere, so nothing is certain then.
        wants=(template,) if chosen.certain and not boot.engine.priority_scheduling else (),
    )


def _asked(builder: Builder, opening: Opening, *, quiet: bool) -> tuple[RequestSpec, ...]:
    own = builder.timeline.requests if quiet else _with_keys(builder, opening)
    if builder.boot.engine.rejection_sampling:
        own = tuple(rules.sampling(request, builder.random) for request in own)
    asked = asking(builder.random, builder.boot, own, cached=opening.cached)
    updates = [step for step, op in builder.timeline.ops if op.kind == "update"]
    before = {one.rid for step, one in builder.timeline.arrivals if updates and step <= max(updates)}
    silent = [one.rid in before or opening.unlogged for one in asked]
    return tuple(one.model_copy(update=WITHOUT_LOGPROBS) if no else one for one, no in zip(asked, silent, strict=True))


def _with_keys(builder: Builder, opening: Opening) -> tuple[RequestSpec, ...]:
    """Of every second scenario, whatever its template, some requests sample or ask for more; drawn last of all.

    Not those that the template needs as they are, for the lengths of what they accept or for log-probabilities, which
    nobody follows beside some keys; and one that drafts stays.
    """
    own = builder.timeline.requests
    if not rules.single(builder.boot) or builder.chance():
        return own
    asked = [
        request if request.rules else _judged(request, rules.perhaps_asking(request, builder.boot, builder.random))
        for request in own
    ]
    if (plain := _drafting(builder, own)) and not _drafting(builder, asked):
        asked[own.index(plain[0])] = plain[0]
    return tuple(asked)


def _judged(own: RequestSpec, drawn: RequestSpec) -> RequestSpec:
    """Whatever was drawn, unless the template's own request samples, or has log-probabilities not judged beside it."""
    return own if own.temperature or (own.return_logprob and {*LOOSE} & {*drawn.asked}) else drawn


def _other_requests(builder: Builder, *, calm: int) -> None:
    """Up to MOST_REQUESTS in all; each arrives from step `calm` on, some as branches of an earlier prompt."""
    for _ in range(builder.integer(0, min(2, MOST_REQUESTS - len(builder.timeline.requests)))):
        prompt = builder.prompt_or_branch(builder.length())
        request = builder.request(prompt, new=min(builder.new_tokens(), builder.room(prompt)), stops=True)
        if builder.boot.spelled:
            request = texts.perhaps_held(request, builder.random)
        builder.timeline.arrive(calm + builder.integer(0, 8), request)


def _one_that_drafts(builder: Builder, *, calm: int) -> None:
    """A greedy request that surely writes more than its first token, if there is none: else nothing may be drafted, or
    no verify be compared token by token."""
    if not _drafting(builder, builder.timeline.requests):
        builder.timeline.arrive(
            calm, builder.request(builder.prompt_or_branch(builder.length()), new=builder.integer(2, 8))
        )


def _drafting(builder: Builder, requests: Sequence[RequestSpec]) -> list[RequestSpec]:
    """Those that are greedy, live to the end and write more than one token, whatever they are."""
    gone = {rid for _, op in builder.timeline.ops if op.kind == "abort" for rid in op.rids}
    left = [request for request in requests if request.rid not in gone]
    return [one for one in left if one.greedy and one.max_new_tokens > 1 and not (one.stop_token_ids or one.rules)]


def _interference(builder: Builder, *, calm: int, protected: tuple[str, ...]) -> None:
    """Up to two of: abort, retraction of all or some, pause and resume, flush; from step `calm` on."""
    gone = [rid for _, op in builder.timeline.ops if op.kind == "abort" for rid in op.rids]
    free = [entry for entry in builder.timeline.arrivals if entry[1].rid not in (*protected, *gone)]
    for _ in range(builder.integer(0, 2)):
        kind = builder.random.choice(["retract", "retract-some", "pause", "flush", *(["abort"] if free else [])])
        step = calm + builder.integer(0, 12)
        if kind == "abort":
            entry = builder.random.choice(free)
            _abort(builder, *entry, calm=calm)
            free.remove(entry)
        elif kind == "retract-some":
            rids = [request.rid for request in builder.timeline.requests]
            chosen = builder.random.sample(rids, builder.integer(0, len(rids) - 1))
            builder.timeline.at(step, "retract", *chosen, name=None if chosen else "test")
        else:
            builder.timeline.at(step, kind)
        if kind == "pause":
            builder.timeline.at(step + builder.integer(1, 3), "resume")


def _abort(builder: Builder, arrival: int, request: RequestSpec, *, calm: int) -> None:
    """While the request surely lives: whether SGLang still passes on an abort of one that has ended is a race."""
    first, last = max(arrival, calm), arrival + shortest_life(request, k=builder.k)
    if first <= last:
        builder.timeline.at(builder.integer(first, last), "abort", request.rid)


def asking(random: Random, boot: Boot, requests: tuple[RequestSpec, ...], *, cached: bool) -> tuple[RequestSpec, ...]:
    """Each with what it asks for, about half of them nothing. cached: the program needs its prompts' prefixes.

    Log-probabilities only where they are judged.
    """
    loose = any({*LOOSE} & {*request.asked} for request in requests)
    handed = boot.engine.disaggregation  # no decode side has those of a first token (F-071)
    ids = _ids(random, boot) if random.random() < 0.25 and not loose and not handed else ()
    return tuple(
        request.model_copy(update=_returned(random, boot, request, ids=ids, cached=cached))
        if request.expect == "answer"  # nothing comes back of the others
        else request
        for request in requests
    )


def _returned(
    random: Random, boot: Boot, request: RequestSpec, *, ids: tuple[int, ...], cached: bool
) -> dict[str, Any]:
    """ids: asked for by all requests of a program or by none (on older releases a mixture ends the engine, F-040)."""
    asked: dict[str, Any] = {"stream": True} if random.random() < 0.25 else {}
    if boot.engine.enable_return_hidden_states and random.random() < 0.5:
        asked["return_hidden_states"] = True
    if {*LOOSE} & {*request.asked} or (not ids and random.random() < 0.5):
        return asked
    asked |= {"return_logprob": True}
    asked |= {"token_ids_logprob": ids} if ids else {}
    if random.random() < 0.5:
        asked["top_logprobs_num"] = random.choice((1, 2, 5, 20))
    if not cached and not boot.engine.disaggregation and random.random() < 0.4:  # the prefill side answers those
        asked["logprob_start_len"] = random.choice((0, random.randint(0, len(request.input_ids) - 1)))
    return asked


def _ids(random: Random, boot: Boot) -> tuple[int, ...]:
    return tuple(random.sample(range(boot.vocab), random.randint(1, MOST_IDS)))
