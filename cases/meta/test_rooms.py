"""ARCHITECTURE.md says where everything is: a module that it does not name, or names in vain, is found here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HARNESS = sorted(path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "harness").rglob("*/__init__.py"))


def named(room: str) -> set[str]:
    """What stands in backticks in the list of modules of one room; folders end in a slash."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    items = re.findall(rf"^ *- (?:\*\*)?`{room}/`(?:.(?!^ *- |^## ))*", text, flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([a-z0-9_*]+/?)`", " ".join(items))) - {f"{room}/"}


def held(room: str) -> set[str]:
    """Modules and packages of a room, as `named` spells them."""
    modules = {path.stem for path in (ROOT / room).glob("*.py") if path.stem not in ("__init__", "__main__")}
    return modules if room.startswith("harness") else modules | packages(room)


def packages(room: str) -> set[str]:
    return {f"{path.parent.name}/" for path in (ROOT / room).glob("*/__init__.py")}


@pytest.mark.parametrize("room", [*HARNESS, "reference", "reports"])
def test_every_module_of_a_room_is_named_and_every_name_is_one(room: str) -> None:
    folders = {f"{path.name}/" for path in (ROOT / room).iterdir() if path.is_dir()}
    assert sorted(held(room) - named(room)) == []
    assert sorted(named(room) - held(room) - folders) == []


def test_every_module_of_the_harness_is_in_one_of_its_rooms() -> None:
    assert {"harness/contract", "harness/engine_side/host"} <= set(HARNESS)
    assert [path.name for path in (ROOT / "harness").glob("*.py")] == ["__init__.py"]
