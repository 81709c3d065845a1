"""Fixtures of several test files of this folder."""

from __future__ import annotations

import pytest

from cases.meta.pretended_card import PretendedCards


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Cards that are not there, seen by this process and its children."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = PretendedCards(tmp_path / "cards")
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture(autouse=True)
def no_source_of_a_release(monkeypatch, request):
    """Lines of SGLang's source are those of what happens to be installed; a test that asks for them brings a source.

    The flags of a server are many and no test's business but that of an exported file.
    """
    monkeypatch.setattr("reports.blame.flags", lambda _arguments: ["--flag"])
    if "test_where_names" not in request.node.name:
        monkeypatch.setattr("reports.blame._functions", lambda _module, _release: {})
