"""What is generated for a card: boot configurations and the engine options that only a GPU has. It runs nothing."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from cases.strategies import Boot
from harness.contract.types import Scenario, SpecConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """A boot configuration of the generator with the engine options that only a GPU has."""

    boot: str
    dtype: str = "float16"
    backend: str = "triton"
    graphs: bool = True
    overlap: bool | None = None
    page: int = 0

    def of(self, scenario: Scenario, asked: argparse.Namespace) -> Scenario:
        if asked.device == "cpu":  # a rehearsal
            return scenario
        options = {name: getattr(self, name) for name in ("dtype", "backend", "graphs", "overlap")}
        if self.page:
            options["page"] = self.page
        return scenario.model_copy(update={"engine": scenario.engine.model_copy(update=options)})


#: Two steps: with three, every release drafts trees in a way that is a finding of its own (docs/findings/F-003.md).
TREES = {
    boot.name: boot
    for boot in (
        Boot(name="short-tree", why="two candidates a step, five nodes", spec=SpecConfig(k=2, t=2, n=5)),
        Boot(name="short-four-tree", why="four candidates a step", spec=SpecConfig(k=2, t=4, n=8)),
        Boot(name="four-tree", why="with three steps", spec=SpecConfig(k=3, t=4, n=8)),
        Boot(name="short-wide-tree", why="eight candidates a step", spec=SpecConfig(k=2, t=8, n=16)),
    )
}

COMBINATIONS: dict[str, Combination] = {
    "plain-graphs": Combination(boot="plain"),
    "plain-eager": Combination(boot="plain", graphs=False),
    "plain-graphs-bf16": Combination(boot="plain", dtype="bfloat16"),
    "plain-graphs-normal-loop": Combination(boot="plain", overlap=False),
    "pages-graphs": Combination(boot="pages"),
    "pages-eager-normal-loop": Combination(boot="pages", graphs=False, overlap=False),
    "small-pool-graphs": Combination(boot="small-pool"),
    "no-cache-graphs": Combination(boot="no-cache"),
    "long-draft-graphs-bf16": Combination(boot="long-draft", dtype="bfloat16"),
    "one-step-graphs": Combination(boot="one-step"),
    "tree-graphs": Combination(boot="short-tree"),
    "tree-eager-bf16": Combination(boot="short-tree", graphs=False, dtype="bfloat16"),
    "four-tree-graphs": Combination(boot="short-four-tree"),
    "four-tree-graphs-bf16": Combination(boot="short-four-tree", dtype="bfloat16"),
    "wide-tree-graphs": Combination(boot="short-wide-tree"),
    "wide-tree-graphs-bf16": Combination(boot="short-wide-tree", dtype="bfloat16"),
    "wide-tree-eager": Combination(boot="short-wide-tree", graphs=False),
    "plain-graphs-flashinfer": Combination(boot="plain", backend="flashinfer"),
    "wide-tree-graphs-flashinfer": Combination(boot="short-wide-tree", backend="flashinfer"),
    "plain-graphs-fa3": Combination(boot="plain", backend="fa3"),
    "tree-pages-graphs-fa3": Combination(boot="short-four-tree", backend="fa3", page=4),
    "tree-pages-graphs-triton": Combination(boot="short-four-tree", page=4),
    "deeper-tree-pages-graphs-fa3": Combination(boot="four-tree", backend="fa3", page=4),
    "plain-eager-normal-loop": Combination(boot="plain", graphs=False, overlap=False),
}
