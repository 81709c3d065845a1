"""The `eaglecheck` command, a module a verb; `main` puts them together.

Nothing is imported here: the pytest plugin uses single modules of this room, and a verb loads what it needs.
"""
