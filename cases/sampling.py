"""Programs that sample: requests over a table pair whose law is known, and requests among greedy ones.

Pure data; it must not import torch or run an engine.
"""

from __future__ import annotations

from collections.abc import Iterator

from cases.table_weights import token_of
from harness.contract.types import EngineConfig, Op, RequestSpec, Scenario, SpecConfig

CHECKPOINT = "table-tiny"
#: Fewer than the table is long with a whole round more, so that no request visits a cell twice (see cases.laws).
NEW = 4
TOGETHER = 8
#: Drafts that differ in what verifying does: one branch, several, and a token that no branch can hold.
DRAFTS = {
    "chain": SpecConfig(k=3, t=1, n=4),
    "tree": SpecConfig(k=2, t=2, n=6),
    "whole-tree": SpecConfig(k=2, t=3, n=13),
}


def law_scenarios(
    draft: str, *, count: int, temperature: float = 1.0, engine: EngineConfig | None = None
) -> Iterator[Scenario]:
    """`count` scenarios of TOGETHER requests each, the same prompt in all: only coins differ."""
    rids = tuple(f"r{i}" for i in range(TOGETHER))
    requests = tuple(
        RequestSpec(rid=rid, prompt=(token_of(0, 0), token_of(1, 1)), max_new_tokens=NEW, temperature=temperature)
        for rid in rids
    )
    for number in range(count):
        yield Scenario(
            name=f"law-{draft}",
            seed=number,
            checkpoint=CHECKPOINT,
            spec=DRAFTS[draft],
            engine=engine or EngineConfig(),
            requests=requests,
            script=(Op(kind="submit", rids=rids), Op(kind="drain")),
        )
