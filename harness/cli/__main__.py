"""`python -m harness.cli`: the `eaglecheck` command where it is not installed."""

from harness.launcher import main

main()
