"""Whose time it is: what each of our calls takes of a scheduler's thread, and what is left to SGLang between them.

Time is that of a processor: waiting for a socket is none, waiting for a device is, since CUDA looks again and again. So
what others do on the machine does not count. Each call that is watched costs about a microsecond more.

Engine side: standard library only.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]

#: Whose time it is outside of all calls of ours.
SGLANG = "SGLang"


class Clock:
    """Nanoseconds and calls by owner, of one thread. The innermost owner has the time."""

    def __init__(self) -> None:
        self._spent: dict[str, list[int]] = {}
        self._owner, self._since = SGLANG, time.thread_time_ns()

    def of(self, owner: str, call: Call) -> Call:
        """The call, whose time is this owner's."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = self._to(owner)
            self._spent[owner][1] += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._to(before)

        self._spent.setdefault(owner, [0, 0])
        return timed

    def watch(self, holder: Any, *names: str) -> None:
        """The same for methods of one object, by their names."""
        for name in names:
            setattr(holder, name, self.of(name.strip("_"), getattr(holder, name)))

    def taken(self) -> dict[str, list[int]]:
        """Owner -> [nanoseconds, calls] since the last time."""
        self._to(self._owner)
        found = {owner: list(spent) for owner, spent in self._spent.items()}
        for spent in self._spent.values():
            spent[:] = 0, 0
        return found

    def _to(self, owner: str) -> str:
        """From now on the time is this owner's; whose it was."""
        before, now = self._owner, time.thread_time_ns()
        self._spent.setdefault(before, [0, 0])[0] += now - self._since
        self._owner, self._since = owner, now
        return before
