"""Hypothesis strategies for batch programs: a lead that brings about one situation, then anything that may happen.

Boot configurations are a short fixed list, since a reboot is what costs; everything else is drawn. A scenario asks
for its lead's situation only where the lead makes it certain. No strategy may know a bug; nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

from cases.boots import BOOTS, TREES, Boot
from cases.fixed import VOCAB, tokens
from cases.timeline import Timeline
from harness.contract.types import RequestSpec, Scenario

__all__ = ["BOOTS", "TREES", "Boot", "Kit", "collect", "programs", "scenarios", "shortest_life"]

#: The first n greedy tokens of a prompt, for stop ids that really occur.
Greedy = Callable[[tuple[int, ...], int], tuple[int, ...]]

LONGEST_PROMPT = 100
MOST_NEW = 24
MOST_REQUESTS = 5
#: Engines are started with this context window; see `harness.engines.launch`.
CONTEXT = 512
#: Leads whose requests may be on any rank: they promise nothing.
ROAMING = ("free", "company")
#: By this turn after its last prefill chunk, a request that may run on has decoded under every loop.
DECODING = 3


def programs(boot: Boot, *, count: int, seed_value: int, greedy: Greedy | None = None) -> list[Scenario]:
    """`count` scenarios, the leads taking turns in an order that the seed decides; the same for the same seed."""
    from cases.leads import possible

    shuffled = random.Random(f"{boot.name} {seed_value}")
    leads = possible(boot)
    shuffled.shuffle(leads)
    turns = [leads[number % len(leads)] for number in range(count)]
    drawn: dict[str, Iterator[Scenario]] = {}
    for name in dict.fromkeys(turns):
        strategy = scenarios(boot, greedy=greedy, lead=name)
        drawn[name] = iter(collect(strategy, count=turns.count(name), seed_value=shuffled.randrange(2**32)))
    return [scenario for name in turns for scenario in itertools.islice(drawn[name], 1)]


def collect(strategy: st.SearchStrategy[Any], *, count: int, seed_value: int) -> list[Any]:
    """`count` different draws, the same for the same seed; fewer only if there are no more.

    Hypothesis begins with the simplest draws there are, up to a tenth of what it may draw; those are left out.
    """
    examples = 3 * count + 20
    simple = 2 + examples // 10
    found: dict[Any, None] = {}
    calls = itertools.count()

    class Enough(Exception):
        """Hypothesis has no other way to be told that it may stop."""

    @seed(seed_value)
    @settings(
        max_examples=examples,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn=strategy)
    def keep(drawn: Any) -> None:
        if len(found) >= count:
            raise Enough
        if next(calls) >= simple:
            found[drawn] = None

    with contextlib.suppress(Enough):
        keep()
    return list(found)


@st.composite
def scenarios(
    draw: st.DrawFn, boot: Boot, *, greedy: Greedy | None = None, lead: str | None = None, quiet: bool = False
) -> Scenario:
    """A scenario for one boot configuration. lead: one of `cases.leads.LEADS`; None draws one.

    quiet: nothing but the lead happens.
    """
    from cases.leads import LEADS, possible  # leads draw with this module's vocabulary

    name = lead or draw(st.sampled_from(possible(boot)), label="lead")
    kit = Kit(draw=draw, boot=boot, greedy=greedy, chunk=_chunk(draw, boot))
    kit.roams = name in ROAMING
    led = LEADS[name].build(kit)
    kit.roams = True
    if not quiet:
        _bystanders(kit, calm=led.calm)
    if led.events and not quiet:
        _interference(kit, calm=led.calm, protected=led.protected)
    return Scenario(
        name=f"generated-{boot.name}",
        checkpoint=boot.checkpoint,
        spec=boot.spec,
        engine=boot.engine.model_copy(update={"chunk": kit.chunk, "running_limit": kit.running_limit}),
        requests=kit.timeline.requests,
        script=kit.timeline.script(),
        # A request of higher priority may come in between anywhere, so no lead is certain then.
        wants=(name,) if LEADS[name].certain and not boot.engine.priority else (),
    )


def _chunk(draw: st.DrawFn, boot: Boot) -> int:
    """A multiple of the page; two pages at most where pages are longer than the usual chunks."""
    page = boot.engine.page
    usual = [size for size in (8, 16, 24, 32) if size % page == 0]
    return draw(st.sampled_from(usual or [page, 2 * page]), label="chunk")


#: Numbers are drawn in parts below this.
PART = 50


class Kit:
    """What leads and bystanders draw with: the timeline being written, and labelled draws in its terms."""

    def __init__(self, *, draw: st.DrawFn, boot: Boot, greedy: Greedy | None, chunk: int) -> None:
        self.draw, self.boot, self.greedy, self.chunk = draw, boot, greedy, chunk
        self.page, self.k = boot.engine.page, boot.spec.k
        self.running_limit: int | None = None
        self.timeline = Timeline()
        self._made = self._prompts = 0
        #: whether a request may be on any rank; otherwise it is at `home`, or with `beside` on the next rank
        self.roams = False
        self.home = self.integer(0, boot.engine.dp - 1, "rank") if boot.engine.dp > 1 else 0

    def integer(self, low: int, high: int, label: str) -> int:
        """A number in [low, high], drawn in parts if it may be large.

        Hypothesis now and then takes an integer from the constants of whatever of this project is imported, but none
        below 100: the same seed shall give the same scenarios whoever draws them, and after every edit.
        """
        high = max(low, high)
        if high < PART:
            return self.draw(st.integers(low, high), label=label)
        part = self.draw(st.integers(0, (high - low) // PART), label=f"{label}, part")
        rest = min(PART - 1, high - low - PART * part)
        return low + PART * part + self.draw(st.integers(0, rest), label=label)

    def chance(self, label: str) -> bool:
        return self.draw(st.booleans(), label=label)

    def choice(self, options: list[Any], label: str) -> Any:
        return self.draw(st.sampled_from(options), label=label)

    def length(self, low: int = 1, high: int = LONGEST_PROMPT) -> int:
        """A prompt length in [low, high], often beside a chunk or page border."""
        borders = [n * size + off for size in (self.chunk, self.page) for n in (1, 2, 3) for off in (-1, 0, 1)]
        near = sorted({border for border in borders if low <= border <= high})
        if near and self.chance("at a border"):
            return self.choice(near, "length at a border")
        return self.integer(low, high, "length")

    def new_tokens(self, low: int = 1, high: int = MOST_NEW) -> int:
        return self.integer(low, high, "new tokens")

    def long_run(self) -> int:
        """Enough new tokens for at least four verifies."""
        return self.new_tokens(4 * (self.k + 1), max(MOST_NEW, 4 * (self.k + 1)))

    def prompt(self, length: int) -> tuple[int, ...]:
        """Tokens that no other prompt of this scenario starts with."""
        self._prompts += 1
        return tokens(seed=100 * self.integer(0, 999, "prompt seed") + self._prompts, length=length)

    def request(self, prompt: tuple[int, ...], *, new: int, stops: bool = False, beside: bool = False) -> RequestSpec:
        """A request with the next free name; with stops it may end early on a token it really generates."""
        rid = f"r{self._made}"
        self._made += 1
        stop_ids = self.stop_ids(prompt, new) if stops and self.chance("stop ids") else ()
        priority = self.integer(0, 30, "priority") if self.boot.engine.priority else None
        rank = self._rank(beside=beside)
        return RequestSpec(
            rid=rid, prompt=prompt, max_new_tokens=new, stop_ids=stop_ids, priority=priority, dp_rank=rank
        )

    def _rank(self, *, beside: bool) -> int:
        ranks = self.boot.engine.dp
        if self.roams and ranks > 1:
            return self.integer(0, ranks - 1, "rank of a request")
        return (self.home + beside) % ranks

    def stop_ids(self, prompt: tuple[int, ...], new: int) -> tuple[int, ...]:
        """One token of the greedy text where that is known, else a twelfth of the vocabulary."""
        if self.greedy is not None:
            return (self.choice(list(self.greedy(prompt, new)), "stop token"),)
        start = self.integer(0, VOCAB - 1, "stop ids from")
        return tuple(sorted((start + step * 12) % VOCAB for step in range(VOCAB // 12)))

    def branch_of(self, earlier: tuple[int, ...], shared: int, more: int) -> tuple[int, ...]:
        """A prompt that shares exactly `shared` tokens with an earlier one and then differs."""
        tail = list(self.prompt(more))
        if shared < len(earlier) and tail[0] == earlier[shared]:
            tail[0] = (tail[0] + 1) % VOCAB
        return earlier[:shared] + tuple(tail)

    def chunks(self, length: int) -> int:
        """Turns that a prompt alone takes to prefill."""
        return -(-length // self.chunk)


def _bystanders(kit: Kit, *, calm: int) -> None:
    """Up to MOST_REQUESTS in all; each arrives from turn `calm` on, some as branches of an earlier prompt."""
    room = MOST_REQUESTS - len(kit.timeline.requests)
    for _ in range(kit.integer(0, min(2, room), "bystanders")):
        earlier = [request.prompt for request in kit.timeline.requests]
        if earlier and kit.chance("shares a prefix"):
            parent = kit.choice(earlier, "parent prompt")[:LONGEST_PROMPT]
            prompt = kit.branch_of(parent, kit.integer(1, len(parent), "shared"), kit.integer(1, 20, "own tokens"))
        else:
            prompt = kit.prompt(kit.length())
        request = kit.request(prompt, new=kit.new_tokens(), stops=True)
        kit.timeline.arrive(calm + kit.integer(0, 8, "arrival"), request)


def _interference(kit: Kit, *, calm: int, protected: tuple[str, ...]) -> None:
    """Up to two of: abort, retract, pause and resume, flush; from turn `calm` on."""
    gone = [rid for _, op in kit.timeline.ops if op.kind == "abort" for rid in op.rids]
    free = [entry for entry in kit.timeline.arrivals if entry[1].rid not in (*protected, *gone)]
    for _ in range(kit.integer(0, 2, "interferences")):
        kind = kit.choice(["retract", "pause", "flush", *(["abort"] if free else [])], "interference")
        turn = calm + kit.integer(0, 12, "turn")
        if kind == "abort":
            arrival, request = kit.choice(free, "aborted")
            _abort(kit, arrival, request, calm=calm)
            free = [other for other in free if other[1] is not request]
        elif kind == "pause":
            kit.timeline.at(turn, "pause")
            kit.timeline.at(turn + kit.integer(1, 3, "paused turns"), "resume")
        else:
            kit.timeline.at(turn, kind)


def _abort(kit: Kit, arrival: int, request: RequestSpec, *, calm: int) -> None:
    """While the request surely lives: whether SGLang still passes on an abort of one that has ended is a race."""
    first, last = max(arrival, calm), arrival + shortest_life(request, k=kit.k)
    if first <= last:
        kit.timeline.at(kit.integer(first, last, "turn of the abort"), "abort", request.rid)


def shortest_life(request: RequestSpec, *, k: int) -> int:
    """Turns after its arrival for which a request lives whatever happens: a prefill, and every draft accepted."""
    return 1 if request.stop_ids else 1 + max(0, request.max_new_tokens - 2) // (k + 1)
