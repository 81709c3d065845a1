"""Loads the pytest plugin; everything it offers is in harness/suite/plugin.py."""

pytest_plugins = ["harness.suite.plugin"]
