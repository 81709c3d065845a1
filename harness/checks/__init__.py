"""The judging room: pure functions of aligned traces. It must not run an engine, read disk or import torch.

To add a check, write a function in the module of its subject, or in a new module that `judge` imports:

    @register(
        id="drift",  # stands in signatures: never changed later
        kinds=(Kind.POSITION,),
        reads=("engine",),  # "reference" too, if it compares with one
        protects="what would go wrong unnoticed without it, in a sentence",
    )
    def check_drift(evidence: Evidence) -> CheckResult:
        result = CheckResult()
        for share, rows in evidence.table.each(Phase.DRAFT):
            for row in rows:
                expected, observed = ..., evidence.table.ints["position"][row]
                result.count("positions", 1)
                if observed != expected:
                    result.divergences.append(
                        evidence.divergence(row, kind=Kind.POSITION, expected=expected, observed=observed, hint="why")
                    )
        return result

Then show that it can fail: a test in cases/meta/test_checks_*.py, and a mutant in harness/both_sides/faults.toml.
"""

from harness.checks.describe import describe
from harness.checks.findings import Finding, group, kinds
from harness.checks.judge import judge
from harness.checks.registry import CHECKS, Check, CheckResult

__all__ = ["CHECKS", "Check", "CheckResult", "Finding", "describe", "group", "judge", "kinds"]
