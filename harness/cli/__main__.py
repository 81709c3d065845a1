"""`python -m harness.cli`: the `eaglecheck` command where it is not installed."""

from harness.cli.main import app

app(prog_name="eaglecheck")
