"""The judging room: pure functions of aligned traces. It must not run an engine, read disk or import torch."""

from harness.checks.describe import describe
from harness.checks.findings import Finding, group, kinds
from harness.checks.judge import judge
from harness.checks.registry import CHECKS, Check, CheckResult

__all__ = ["CHECKS", "Check", "CheckResult", "Finding", "describe", "group", "judge", "kinds"]
