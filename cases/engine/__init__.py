"""Tests that drive a real SGLang engine. Those that need none are in `cases/meta`."""
