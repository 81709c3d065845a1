"""The `eaglecheck` command, a module a verb; `main` puts them together.

Nothing is imported here: `harness.driving.live` and others use single modules of this room, and the verbs use them.
"""
