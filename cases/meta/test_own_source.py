"""The digest that tells two states of eaglecheck apart where there is no commit."""

from __future__ import annotations

import pytest

from harness.driving.own_source import source_digest

FILES = ("harness/cli/night.py", "reference/model.py", "cases/fixed.toml", "cases/meta/test_night.py", "docs/F-001.md")


@pytest.fixture
def tree(tmp_path):
    for name in (*FILES, "harness/__pycache__/night.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def digest(tree):
    return source_digest(tree, tree / "docs")


@pytest.mark.parametrize("name", [name for name in FILES if "meta" not in name])
def test_another_byte_of_what_drives_and_judges_is_another_state(tree, name):
    before = digest(tree)
    (tree / name).write_text("other")
    assert digest(tree) != before


def test_a_file_of_another_name_is_another_state(tree):
    before = digest(tree)
    (tree / "reference/model.py").rename(tree / "reference/models.py")
    assert digest(tree) != before


@pytest.mark.parametrize("name", ["cases/meta/test_night.py", "harness/__pycache__/night.pyc", "README.md"])
def test_tests_and_what_python_leaves_behind_are_none_of_it(tree, name):
    before = digest(tree)
    (tree / name).write_text("other")
    assert digest(tree) == before


def test_the_same_files_elsewhere_are_the_same_state(tree, tmp_path):
    before = digest(tree)
    moved = tree.rename(tmp_path.with_name("moved"))
    assert digest(moved) == before


def test_this_checkout_has_one():
    assert source_digest() == source_digest()
    assert len(source_digest()) == 64
