"""`python -m harness.cli …` is `eaglecheck …`, for a checkout that is not installed."""

from harness.cli import app

app(prog_name="eaglecheck")
