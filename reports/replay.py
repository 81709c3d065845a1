"""The answer of `eaglecheck replay`: FAILED, FIXED or ERROR. It must not run anything, nor import torch or sglang."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich.console import Console

from harness.contract.types import Outcome
from harness.driving.results import RunResult
from reports.findings import render_assume, render_findings
from reports.prose import say


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Whether the failure is still there. others: the failure is gone, but something else is wrong."""

    word: Literal["FAILED", "FIXED", "ERROR"]
    text: str
    others: bool = False


def answer(result: RunResult, signature: str) -> Answer:
    """The same signature again is FAILED, a verdict without it FIXED, no verdict ERROR."""
    where = f"SGLang {result.engine}"
    if signature in {finding.signature for one in result.results for finding in one.findings}:
        return Answer(word="FAILED", text=f"FAILED: {signature} is still there on {where}")
    if result.verdict.outcome is Outcome.UNKNOWN:
        return Answer(word="ERROR", text=f"ERROR: cannot say whether {signature} is still there on {where}")
    if result.verdict.outcome is Outcome.FAIL:
        kinds = ", ".join(result.verdict.root_kinds)
        return Answer(
            word="FIXED",
            text=f"FIXED: {signature} is gone on {where}, but it diverges otherwise ({kinds})",
            others=True,
        )
    return Answer(word="FIXED", text=f"FIXED: {signature} is gone on {where}")


def render_replay(console: Console, result: RunResult, said: Answer) -> None:
    """Findings, reasons for a missing verdict, where it lies, and the answer as the last line."""
    render_findings(console, result.results)
    render_assume(console, result.results)
    say(console)
    if said.word == "ERROR":
        for reason in result.verdict.reasons:
            say(console, f"because: {reason}")
    say(console, f"run folder: {result.folder}")
    say(console)
    style = {"FAILED": "bold red", "FIXED": "bold green", "ERROR": "bold yellow"}[said.word]
    say(console, said.text, style="bold red" if said.others else style)
