"""The `eaglecheck` command. One word a verb; every failure ends with what to type next.

Exit codes: 0 pass, 1 divergence, 2 usage error, 3 unknown, 4 our own fault.
"""

from __future__ import annotations

import typer

from harness.cli import bisect, diff, environments, matrix, mutants, night, recheck, replay, report, run

app = typer.Typer(
    name="eaglecheck",
    help="Differential correctness harness for EAGLE speculative decoding in SGLang.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("run")(run.command)
app.command("recheck")(recheck.command)
app.command("replay")(replay.command)
app.command("matrix")(matrix.command)
app.command("mutants")(mutants.command)
app.command("bisect")(bisect.command)
app.command("report")(report.command)
app.command("diff")(diff.command)
app.command("night")(night.command)
app.command("doctor")(environments.doctor)
app.add_typer(environments.engines, name="engines")

__all__ = ["app"]
