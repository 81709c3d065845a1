"""The pytest plugin and what only it needs."""
