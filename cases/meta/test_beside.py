"""A forked child answers what is asked while this process goes on."""

import os
import pickle
from importlib import metadata

import pytest

from harness.engine_side.host.beside import Beside, installed_packages


def test_a_child_answers():
    assert Beside(os.getppid, about="its parent").answer() == os.getpid()


def test_what_the_child_could_not_do_is_said():
    with pytest.raises(RuntimeError, match="could not ask for a quotient: ZeroDivisionError"):
        Beside(lambda: 1 / 0, about="a quotient").answer()
    with pytest.raises(RuntimeError, match="without a word"):
        Beside(lambda: os._exit(1), about="nothing").answer()


def test_half_an_answer_is_none(monkeypatch):
    whole = pickle.dumps(("found", ""))
    monkeypatch.setattr(pickle, "dumps", lambda _answer: whole[: len(whole) // 2])
    with pytest.raises(RuntimeError, match="without a word"):
        Beside(os.getpid, about="its id").answer()


def test_installed_packages_are_those_that_the_library_finds():
    original = metadata.packages_distributions
    with installed_packages():
        kept = metadata.packages_distributions
        assert kept is not original
        assert kept() == kept() == original()
        assert metadata.packages_distributions is original
    with installed_packages():
        pass
    assert metadata.packages_distributions is original


def test_without_the_childs_answer_the_library_is_asked(monkeypatch):
    parent = os.getpid()
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"found": 1} if os.getpid() == parent else 1 / 0)
    with installed_packages():
        assert metadata.packages_distributions() == {"found": 1}
