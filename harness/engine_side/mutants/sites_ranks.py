"""Where mutants of what ranks exchange act: parts that are summed or gathered over TP ranks.

Engine side: standard library, torch and SGLang only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .armed import ArmedMutants
from .registry import around

Original = Callable[..., Any]


class RankSites:
    """The wrappers of one scheduler process."""

    def __init__(self, mutants: ArmedMutants) -> None:
        self._mutants, self._recorder = mutants, mutants.recorder

    def install(self) -> list[str]:
        """Wrap every site; returns those this release does not have."""
        hooks = self._mutants.probe.hooks
        known, parallel = len(hooks.missing), sys.modules["sglang.srt.distributed.parallel_state"]
        for name, site in (("all_reduce", self._reduced), ("all_gather", self._gathered)):
            hooks.wrap(parallel, f"GroupCoordinator.{name}", around(site), innermost=True)
        return hooks.missing[known:]

    def _reduced(self, original: Original, ranks: Any, part: Any, *args: Any, **kwargs: Any) -> Any:
        """The part is written over by the sum."""
        phase = self._recorder.last.get("phase", "")
        own = part.clone() if ranks.world_size > 1 and self._mutants.at("reduced", phase) else None
        whole = original(ranks, part, *args, **kwargs)
        if own is None:
            return whole
        return self._mutants.apply("reduced", {"part": own, "sum": whole}, phase=phase).get("sum", whole)

    def _gathered(self, original: Original, ranks: Any, part: Any, *args: Any, **kwargs: Any) -> Any:
        phase, whole = self._recorder.last.get("phase", ""), original(ranks, part, *args, **kwargs)
        if ranks.world_size == 1 or not self._mutants.at("gathered", phase):
            return whole
        values = {"part": part, "whole": whole}
        return self._mutants.apply("gathered", values, phase=phase).get("whole", whole)
