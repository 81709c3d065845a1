"""Sampling over a pair whose distribution is known: programs, and whether what an engine sampled is distributed so.

Given that a round got as far as its j-th token, that token has the distribution of its position, whatever was drafted:
so the counts of every (place in the round, position) are multinomial with known probabilities. A p-value is the summed
probability of all outcomes that are no likelier than the one seen; nothing is approximated. For that, a request may
visit a cell only once: what it drew there earlier would decide whether it comes again. All tests of a run share one
false-alarm rate. It must not run an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from cases.table_weights import SYMBOLS, TABLE, distribution, token_of
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import SpecConfig
from harness.contract.trace import Trace
from harness.contract.types import Phase

CHECKPOINT = "table-tiny"
#: Fewer than the table is long with a whole round more, so that no request visits a cell twice.
NEW = 4
TOGETHER = 8
#: Drafts that differ in what verifying does: one branch, several, and a token that no branch can hold.
DRAFTS = {
    "chain": SpecConfig(num_steps=3, eagle_topk=1, num_draft_tokens=4),
    "tree": SpecConfig(num_steps=2, eagle_topk=2, num_draft_tokens=6),
    "whole-tree": SpecConfig(num_steps=2, eagle_topk=3, num_draft_tokens=13),
}


def sampled_scenarios(draft: str, *, count: int, temperature: float = 1.0) -> Iterator[Scenario]:
    """`count` scenarios of TOGETHER requests each, the same prompt in all: only the uniforms differ."""
    rids = tuple(f"r{i}" for i in range(TOGETHER))
    requests = tuple(
        RequestSpec(rid=rid, input_ids=(token_of(0, 0), token_of(1, 1)), max_new_tokens=NEW, temperature=temperature)
        for rid in rids
    )
    for number in range(count):
        yield Scenario(
            name=f"sampled-{draft}",
            seed=number,
            checkpoint=CHECKPOINT,
            spec=DRAFTS[draft],
            requests=requests,
            script=(Op(kind="submit", rids=rids), Op(kind="drain")),
        )


#: How often a whole run may cry wolf: once in ten thousand runs of a right engine.
FALSE_ALARM = 1e-4

#: (where the token was drawn, its position in the table): 'prompt' is the sampler's own draw after a prompt.
Cell = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One cell: how often each symbol was drawn, how often it should be, and how rare a fit as bad as this one is."""

    cell: Cell
    counts: tuple[int, ...]
    expected: tuple[float, ...]
    p: float


@dataclass(slots=True)
class Counts:
    """Counts by cell over many scenarios. misplaced: tokens that do not stand at their position at all."""

    temperature: float
    cells: dict[Cell, list[int]] = field(default_factory=dict)
    misplaced: int = 0

    def add(self, scenario: Scenario, trace: Trace) -> None:
        """Count what the requests of one run committed, each token at its place; ended requests' spare tokens too.

        Raises ValueError where a request visits a cell twice: ask for fewer tokens than the table is long.
        """
        seen: set[tuple[str, Cell]] = set()
        drawing = {one.rid: len(one.input_ids) for one in scenario.requests if one.temperature == self.temperature}
        rows = trace.rows
        for i in range(len(rows)):
            key = rows.key(i)
            if key.rid not in drawing:
                continue
            if key.phase == Phase.ACCEPT:
                cell = (f"token {key.slot}", (key.committed + 1 + key.slot) % len(TABLE))
                self._count(cell, int(rows.ints["input_id"][i]))
            elif key.phase == Phase.PREFILL and key.committed + key.slot + 1 == drawing[key.rid]:
                cell = ("prompt", drawing[key.rid] % len(TABLE))
                for token in rows.lists["chosen_ids"][i]:
                    self._count(cell, int(token))
            else:
                continue
            if (key.rid, cell) in seen:
                raise ValueError(f"request {key.rid} drew twice in cell {cell}; ask for fewer new tokens")
            seen.add((key.rid, cell))

    def _count(self, cell: Cell, token: int) -> None:
        block, symbol = divmod(token, SYMBOLS)
        if block != cell[1]:
            self.misplaced += 1
        else:
            self.cells.setdefault(cell, [0] * SYMBOLS)[symbol] += 1

    def fits(self) -> list[Fit]:
        """Every cell against its distribution, the worst first."""
        found = []
        for cell, counts in self.cells.items():
            expected = distribution(cell[1], self.temperature)
            p = multinomial_p(counts, expected)
            found.append(Fit(cell=cell, counts=tuple(counts), expected=tuple(expected.tolist()), p=p))
        return sorted(found, key=lambda fit: fit.p)

    def misfits(self, *, tests: int | None = None) -> list[Fit]:
        """Cells too rare to be chance. tests: how many share the false-alarm rate, all cells by default."""
        limit = FALSE_ALARM / max(1, len(self.cells) if tests is None else tests)
        return [fit for fit in self.fits() if fit.p < limit]


def multinomial_p(counts: Iterable[int], shares: np.ndarray) -> float:
    """The exact p-value of three counts under `shares` [3]: every outcome of as many draws is looked at."""
    seen = np.asarray(list(counts), dtype=np.int64)
    total = int(seen.sum())
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, total + 1)))])  # log n!
    first, second = (axis.ravel() for axis in np.meshgrid(np.arange(total + 1), np.arange(total + 1), indexing="ij"))
    inside = first + second <= total
    outcomes = np.stack([first, second, total - first - second])[:, inside]
    chances = logs[total] - logs[outcomes].sum(0) + (np.log(shares)[:, None] * outcomes).sum(0)
    own = logs[total] - logs[seen].sum() + float((np.log(shares) * seen).sum())
    return float(np.exp(chances[chances <= own + 1e-9]).sum())
