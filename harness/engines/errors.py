"""Errors of engines: crash, hang, or ended from outside. It must not decide which of them happened."""

from __future__ import annotations

from typing import Any

import numpy as np

Frame = tuple[dict[str, Any], dict[str, np.ndarray]]
#: what the probe of one rank reported, in order
Messages = list[Frame]

#: How the reason begins when our side of the engine failed.
DEFECT = "harness defect, which says nothing about SGLang"


class EngineError(Exception):
    """The engine cannot be used (would not start, wrong release): UNKNOWN, not a finding."""


class NoLease(EngineError):
    """No share of a GPU could be had within the time allowed, or a card is taken by something else."""


class EngineNotClean(EngineError):
    """The previous scenario left something behind, so that the next one would not start from a clean slate."""


class EngineCrashed(Exception):
    """A scheduler rank died; `report` has site, error, phase, round and rank, `messages` what it had not reported."""

    def __init__(self, report: dict[str, Any], messages: Messages | None = None) -> None:
        super().__init__(f"{report.get('error', 'engine died')} at {report.get('site', 'unknown site')}")
        self.report = report
        self.messages = messages or []


class EngineLost(Exception):
    """Somebody ended or stopped the engine: UNKNOWN. `report`: what is known of that, and where a rank was."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(report["what"])
        self.report = report


class EngineHung(Exception):
    """A step passed its deadline; `report` names the rank and what it did last."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(f"no answer from rank {report['dp_rank']} within {report['seconds']:.0f} s")
        self.report = report
