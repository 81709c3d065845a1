"""The order of tests: engine tests first, so that a worker boots as few engines and imports as few releases as it can.

It must not know what a test does beyond its parameters and its `engine` mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cases.catalogue import Case
from harness.contract.scenario import Scenario


def arranged(items: Sequence[pytest.Item], *, release: str) -> list[pytest.Item]:
    """Engine tests by release, then those of one boot configuration together, what ends its engine last of them.

    Tests that look at many releases, and say so with `last`, come behind all others. release: the one under test.
    """
    order = {item: number for number, item in enumerate(items)}
    first_seen: dict[tuple[Any, ...], int] = {}
    for item in items:
        wanted = _configuration(item, release)
        for part in (wanted, wanted[:2], wanted[:1]):
            first_seen.setdefault(part, order[item])

    def place(item: pytest.Item) -> tuple[Any, ...]:
        mark = item.get_closest_marker("engine")
        if mark is None:
            return (1, order[item])
        wanted, last, ends = _configuration(item, release), mark.kwargs.get("last"), mark.kwargs.get("ends_it")
        groups = (first_seen[wanted[:1]], first_seen[wanted[:2]], first_seen[wanted])
        return (0, bool(last), *groups, bool(ends), order[item])

    return sorted(items, key=place)


def _configuration(item: pytest.Item, under_test: str) -> tuple[Any, ...]:
    """(release, revert, boot): which engine a test needs, from its parameters and the arguments of its `engine` mark.

    Parameters that count: release, revert, and the boot key of a Scenario or Case. Mark arguments: release, boot.
    """
    mark = item.get_closest_marker("engine")
    if mark is None:
        return ()
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    scenarios = [value for value in parameters.values() if isinstance(value, Scenario | Case)]
    boots = [(value.scenario if isinstance(value, Case) else value).boot_key() for value in scenarios]
    release = parameters.get("release") or mark.kwargs.get("release") or under_test
    boot = boots[0] if boots else mark.kwargs.get("boot", "")
    return (release, parameters.get("revert"), boot)
