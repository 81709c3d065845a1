"""Traces of real engines that are kept in cases/recorded, and what reference and checks say of them today."""

from __future__ import annotations

from pathlib import Path

from cases.checkpoints import Checkpoint
from cases.meta.speculating import answered
from harness.archive.store import read_case
from harness.checks.judge import judge
from harness.contract.types import Divergence, Verdict

RECORDED = Path(__file__).parents[1] / "recorded"
MTP, GPU, RECURRENT = RECORDED / "mtp", RECORDED / "gpu", RECORDED / "recurrent"


def gpu_run(case: str, release: str, mode: str, revert: bool) -> Path:
    """The run of a corpus case on a GPU."""
    return GPU / f"{case}-{release}-{mode}{'-reverted' if revert else ''}"


def judged_anew(folder: Path, pair: Checkpoint, *assumed: str) -> tuple[Verdict, list[Divergence]]:
    """The verdict on a recorded trace, with some findings taken for granted."""
    case = read_case(folder)
    return judge(case.scenario, case.engine, answered(pair, case.scenario, case.engine, assumed=assumed))
