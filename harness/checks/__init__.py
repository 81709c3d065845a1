"""Checks: pure functions of aligned traces. They must not run an engine, read disk or import torch.

To add a check, write a function in the module of its subject, or in a new module that `judge` imports (`Evidence` is in
`evidence`, `register` and `CheckResult` in `registry`, `Kind` and `Phase` in `harness.contract.types`). The id stands
in signatures and is never changed later:

    @register(id="drift", kinds=(Kind.POSITION,), reads=("engine",))  # "reference" too, if it asks for evidence.truth
    def check_drift(evidence: Evidence) -> CheckResult:
        '''What would go wrong unnoticed without it, in a sentence.'''
        result = CheckResult()
        for share, rows in evidence.table.each(Phase.DRAFT):  # (dp_rank, rid, attempt, committed), row numbers
            for row in rows:
                expected = share[3] + evidence.table.ints["step"][row]
                observed = evidence.table.ints["position"][row]
                result.count("positions", 1)
                if observed != expected:
                    result.divergences.append(
                        evidence.divergence(row, kind=Kind.POSITION, expected=expected, observed=observed, hint="why")
                    )
        return result

Then show that it can fail: a test in cases/meta/test_checks_*.py that breaks one field of a sound trace
(`cases/meta/handmade.py` makes those), and a mutant (see `harness.engine_side.mutants`) that it kills in
`eaglecheck mutants --only NAME`. What a check counts with `result.count` is listed under `compared` in docs/json.md.
"""

from harness.checks.describe import describe
from harness.checks.findings import Finding, group, kinds
from harness.checks.judge import judge
from harness.checks.registry import CHECKS, Check, CheckResult

__all__ = ["CHECKS", "Check", "CheckResult", "Finding", "describe", "group", "judge", "kinds"]
