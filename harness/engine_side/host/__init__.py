"""The engine process itself, and the other programs that run in a release's environment."""
