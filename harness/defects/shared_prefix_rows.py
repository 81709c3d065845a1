"""F-012: rows out of the prefix cache hold what the MTP layers of whoever wrote them read.

Layer i reads the token i + 1 places behind a row, so what it leaves there fits only requests that agree that far. A
cache that hands a row to every request that agrees in the row and the next token hands deep layers rows of another
text. Here the rows' owners are followed through time, by tokens alone, and what a host cache brings back is what lay on
the device when it left: whoever wrote that row anew since has no part in it. This module must not run a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from harness.contract.batches import Part, Share
from harness.contract.scenario import Scenario
from reference.departures import Departure, Followed, ReadsOtherwise
from reference.windows import Reads, Window

#: What the k layers read at one row.
Read = tuple[int, ...]


class SharedPrefixRows(Departure):
    """held: what the rows before each window hold when it runs, by the key of its part."""

    def __init__(self) -> None:
        self.held: dict[Share, tuple[Read, ...]] = {}

    def follow(self, scenario: Scenario, requests: Sequence[Followed]) -> None:
        if not scenario.engine.radix_cache:
            return
        steps = [step for request in requests for step in _steps(request)]
        steps.sort(key=lambda one: (one[0].record.dp_rank, one[0].record.index, one[0].record.rids.index(one[0].rid)))
        for _, own in groupby(steps, key=lambda one: one[0].record.dp_rank):
            listed = list(own)
            for (part, _), held in zip(listed, held_rows(step for _, step in listed), strict=True):
                self.held[part.share] = held

    def reads(self, reads: Reads, request: Followed) -> Reads:
        return _Shared(reads, self, {window.start: part.share for part, window in request.ran})


class _Shared(ReadsOtherwise):
    """shares: the key of the part that ran a window, by the window's start."""

    def __init__(self, inner: Reads, owners: SharedPrefixRows, shares: dict[int, Share]) -> None:
        super().__init__(inner)
        self.owners, self.shares = owners, shares

    def before(self, text: Sequence[int], window: Window, i: int) -> Sequence[int]:
        """An entry that is not known counts as what this request's own layers would read."""
        held = self.owners.held.get(self.shares[window.start], ())
        return [read[i] if read else self.token(text, window, row + 1 + i) for row, read in enumerate(held)]


def _steps(request: Followed) -> Iterator[tuple[Part, Step]]:
    """The windows of one request and what their layers read, as far as the engine reported what they proposed."""
    text, ran = request.timeline.tokens, request.ran
    prompts = [window.stop for part, window in ran if part.record.mode == "PREFILL"]
    owner = Owner(text=text, asked=max(prompts, default=0), stays=not request.timeline.restarted)
    for number, (part, window) in enumerate(ran):
        rows, layers = range(window.start, window.stop), range(request.spec.num_steps)
        read: list[Read] = [()] * len(rows)
        if None not in window.proposals:
            read = [tuple(request.reads.token(text, window, row + 1 + i) for i in layers) for row in rows]
        yield (
            part,
            Step(
                owner=owner,
                round=part.record.index,
                window=window,
                read=read,
                prompt=part.record.mode == "PREFILL",
                final=part.final,
                first=not number,
                last=number == len(ran) - 1,
                from_host=request.view.from_host(part),
            ),
        )


@dataclass(slots=True, kw_only=True)
class Owner:
    """One request between two restarts. text: prompt and all it committed. held: what its rows hold now, by row.

    asked: how many tokens it began with. stays: whether its rows go into the cache when it ends (those of a retracted
    request do not).
    """

    text: Sequence[int]
    asked: int
    stays: bool = True
    held: list[Read] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A window of an owner in a round, in the order of the batch. prompt: of its prompt; final: its last chunk.

    read: what the layers read at the window's rows. first, last: of the owner's windows. from_host: the round before
    which each row left that a host cache brought back for it, the last of them just before the window.
    """

    owner: Owner
    round: int
    window: Window
    read: Sequence[Read]
    prompt: bool
    final: bool
    first: bool
    last: bool
    from_host: Sequence[int] = ()


@dataclass(slots=True)
class Cache:
    """The prefix cache, by key: what its rows hold on the device now, and since which round they held what before."""

    now: dict[tuple[int, ...], Read] = field(default_factory=dict)
    was: dict[tuple[int, ...], list[tuple[int, Read]]] = field(default_factory=dict)

    def put(self, key: tuple[int, ...], read: Read, at: int) -> None:
        self.now[key] = read
        self.was.setdefault(key, []).append((at, read))

    def before(self, key: tuple[int, ...], at: int) -> Read:
        """What it held when round `at` began; () if nothing."""
        return next((read for since, read in reversed(self.was.get(key, [])) if since < at), ())


def held_rows(steps: Iterable[Step]) -> list[tuple[Read, ...]]:
    """What the rows before each step's window hold when it runs, in the order of `steps` (by round, then by batch)."""
    tree, found = Cache(), list[tuple[Read, ...]]()
    for _, batch in groupby(steps, key=lambda step: step.round):
        together = list(batch)
        for step in together:
            if step.first:
                _enter(tree, step)
            found.append(tuple(step.owner.held[: step.window.start]))
            step.owner.held[step.window.start :] = step.read
        for step in sorted(together, key=lambda step: not step.final):  # a request in mid-prompt is cached last
            if step.prompt:
                _share(tree, step, takes=True)
            if step.last and step.owner.stays:
                _share(tree, step, takes=False)
    return found


def _enter(tree: Cache, step: Step) -> None:
    """The rows a request begins with are the cache's; what it did not get, though it fits, is no longer there.

    A request never gets its last row, and the one before has no token behind it among those that are looked for.
    """
    text, start = step.owner.text, step.window.start
    for row, left in enumerate(step.from_host, start - len(step.from_host)):
        tree.put(_key(text, row), tree.before(_key(text, row), left), step.round)
    step.owner.held = [tree.now.get(_key(text, row), ()) for row in range(start)]
    if start < step.owner.asked - 2 and _key(text, start) in tree.now:
        for row in range(start, len(text) - 1):
            tree.now.pop(_key(text, row), None)


def _share(tree: Cache, step: Step, *, takes: bool) -> None:
    """Rows 0..stop-2 go into the cache, unless they are there: then the owner takes (or frees) its own for those."""
    owner = step.owner
    for row in range(step.window.stop - 1):
        if (key := _key(owner.text, row)) not in tree.now:
            tree.put(key, owner.held[row], step.round)
        if takes:
            owner.held[row] = tree.now[key]


def _key(text: Sequence[int], row: int) -> tuple[int, ...]:
    """What a request must agree in to be given a row: all up to it, and the token behind."""
    return tuple(text[: row + 2])
