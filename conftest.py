"""Loads the pytest plugin; everything it offers is in harness/plugin.py."""

pytest_plugins = ["harness.plugin"]
