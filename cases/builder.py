"""What scenario templates are written with: the timeline of a program, draws in its terms, and the registry.

Every draw comes from a `random.Random`: Hypothesis' own, whose draws it shrinks, or a seeded one (`cases/generation`).
Nothing here may know a bug, and nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from cases.boots import Boot
from cases.fixed import tokens, window
from cases.timeline import Timeline
from harness.contract.admission import reserved_slots
from harness.contract.requests import GRAMMARS, RequestSpec

LONGEST_PROMPT = 100
MOST_NEW = 24
#: Engines are started with this context window; see `harness.engines.launch`.
CONTEXT = 512
#: By this step after its last prefill chunk, a request that may run on has decoded under every loop.
DECODING = 3


class Builder:
    """One program under construction. roams: whether a request may be on any rank; otherwise it is at `home`."""

    def __init__(self, random: Random, boot: Boot, *, chunk: int | None = None) -> None:
        self.random, self.boot = random, boot
        self.page, self.k = boot.engine.page_size, boot.spec.most_steps
        self.chunk = chunk or self._chunk()
        self.running_limit: int | None = None
        self.timeline = Timeline()
        self._prompts = self._requests = 0
        self.roams = False
        self.home = self.integer(0, boot.engine.dp_size - 1)
        #: what its requests may have, and what those of the template have: one, so that they share prefixes
        self.adapters = (None, *boot.engine.lora_paths)
        self.adapter = self.random.choice(self.adapters) if boot.engine.lora_paths else None

    def _chunk(self) -> int:
        """A multiple of the page; two pages at most where pages are longer than the usual chunks."""
        sizes = (4, 8, 16) if self.boot.engine.disaggregation else (8, 16, 24, 32)
        usual = [size for size in sizes if size % self.page == 0]
        return self.random.choice(usual or [self.page, 2 * self.page])

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, max(low, high))

    def chance(self) -> bool:
        return self.random.choice((False, True))

    def length(self, low: int = 1, high: int = LONGEST_PROMPT) -> int:
        """A prompt length in [low, high], often beside a chunk or page border."""
        borders = [n * size + off for size in (self.chunk, self.page) for n in (1, 2, 3) for off in (-1, 0, 1)]
        near = sorted({border for border in borders if low <= border <= high})
        return self.random.choice(near) if near and self.chance() else self.integer(low, high)

    def new_tokens(self, low: int = 1, high: int = MOST_NEW) -> int:
        return self.integer(low, high)

    def long_run(self) -> int:
        """Enough new tokens for at least four verifies."""
        return self.new_tokens(4 * (self.k + 1), max(MOST_NEW, 4 * (self.k + 1)))

    def prompt(self, length: int) -> tuple[int, ...]:
        """Tokens that no other prompt of this scenario starts with."""
        self._prompts += 1
        seed = 100 * self.integer(0, 999) + self._prompts
        return window(seed=seed, length=length) if self.boot.text else tokens(seed=seed, length=length)

    def branch_of(self, earlier: tuple[int, ...], shared: int, more: int) -> tuple[int, ...]:
        """A prompt that shares exactly `shared` tokens with an earlier one and then differs."""
        tail = list(self.prompt(more))
        if shared < len(earlier) and tail[0] == earlier[shared]:
            tail[0] = (tail[0] + 1) % self.boot.vocab
        return earlier[:shared] + tuple(tail)

    def room(self, prompt: tuple[int, ...]) -> int:
        """New tokens that still fit the pool behind a prompt, were it the only one; one at least."""
        pages = 2 * self.page if self.page > 1 else 0  # that of the prompt's end, and the one that SGLang keeps
        left = self.boot.engine.max_total_tokens - reserved_slots(self.boot.spec) - pages
        return max(1, left - len(prompt))

    def prompt_or_branch(self, length: int) -> tuple[int, ...]:
        """A prompt of its own, or one that begins as an earlier request's."""
        earlier = [request.input_ids[:LONGEST_PROMPT] for request in self.timeline.requests]
        if not earlier or not self.chance():
            return self.prompt(length)
        parent = self.random.choice(earlier)
        return self.branch_of(parent, self.integer(1, len(parent)), self.integer(1, 20))

    def request(self, prompt: tuple[int, ...], *, new: int, stops: bool = False, beside: bool = False) -> RequestSpec:
        """A request with the next free name. stops: may end early; beside: on the rank next to `home`."""
        ranks = self.boot.engine.dp_size
        self._requests += 1
        return RequestSpec(
            rid=f"r{self._requests - 1}",
            input_ids=prompt,
            max_new_tokens=new,
            stop_token_ids=self.stop_ids() if stops and self.chance() else (),
            priority=self.integer(0, 30) if self.boot.engine.priority_scheduling else None,
            dp_rank=self.integer(0, ranks - 1) if self.roams else (self.home + beside) % ranks,
            lora_path=self.random.choice(self.adapters) if self.roams and self.adapters[1:] else self.adapter,
        )

    def arrive(
        self, step: int, length: int, *, new: int | None = None, stops: bool = False, beside: bool = False
    ) -> str:
        """A request with a prompt of its own arrives; returns its name."""
        fresh = self.request(self.prompt(length), new=new or self.new_tokens(), stops=stops, beside=beside)
        self.timeline.arrive(step, fresh)
        return fresh.rid

    def stop_ids(self) -> tuple[int, ...]:
        """A twelfth of the vocabulary, so that a request soon generates one."""
        vocab = self.boot.vocab
        start = self.integer(0, vocab - 1)
        return tuple(sorted((start + step * 12) % vocab for step in range(vocab // 12)))

    def chunks(self, length: int) -> int:
        """Steps that a prompt alone takes to prefill."""
        return -(-length // self.chunk)


def shortest_life(request: RequestSpec, *, k: int) -> int:
    """Steps after its arrival for which a request lives whatever happens: a prefill, and every draft accepted."""
    soon = request.stop_token_ids or request.ends_by_text or set(request.rules) & {*GRAMMARS}
    return 1 if soon else 1 + max(0, request.max_new_tokens - 2) // (k + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a template leaves to the rest of the program.

    calm: the step from which anything else may happen; protected: requests that nobody aborts; events: whether aborts,
    pauses, … may follow at all; cached: whether it comes about by what the prefix cache hands out;
    unlogged: whether log-probabilities would keep it from coming about.
    """

    calm: int = 0
    protected: tuple[str, ...] = ()
    events: bool = True
    cached: bool = False
    unlogged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """How a coverage point is brought about.

    certain: it happens whatever the draws, so the scenario may want it; fits: on which boot configurations it can be;
    roams: its requests may be on any rank; texts: for engines with a tokenizer, or without; None: for both;
    often: what the boot configurations that it fits are for, so that every second scenario is of one of these.
    """

    build: Callable[[Builder], Opening]
    certain: bool
    fits: Callable[[Boot], bool]
    roams: bool
    texts: bool | None
    often: bool


TEMPLATES: dict[str, Template] = {}


def template(
    *,
    fits: Callable[[Boot], bool],
    certain: bool = True,
    roams: bool = False,
    texts: bool | None = False,
    often: bool = False,
) -> Callable[[Callable[[Builder], Opening]], Callable[[Builder], Opening]]:
    """Decorator: the function's name is the coverage point's name, or one of its own where it is not certain."""

    def keep(build: Callable[[Builder], Opening]) -> Callable[[Builder], Opening]:
        TEMPLATES[build.__name__] = Template(
            build=build, certain=certain, fits=fits, roams=roams, texts=texts, often=often
        )
        return build

    return keep


def possible(boot: Boot) -> list[str]:
    """The templates that fit a boot configuration, the simplest first."""
    return [name for name, one in TEMPLATES.items() if one.texts in (boot.spelled, None) and one.fits(boot)]


def turns(boot: Boot, random: Random) -> list[str]:
    """The templates of a boot configuration in the order in which generated scenarios take them, over and over."""
    order = possible(boot)
    random.shuffle(order)
    often = [name for name in order if TEMPLATES[name].often]
    others = [name for name in order if name not in often]
    return [name for place, other in enumerate(others) for name in (other, *often[place % max(1, len(often)) :][:1])]
