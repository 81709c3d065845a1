"""Whether threads have done all that was put into the queues from which they take their work.

A thread that asks for more has done what it took before. Engine side: standard library only; it must not take from a
queue or put anything there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import Queue
from typing import Any
from weakref import WeakKeyDictionary

#: Stands for whoever took what was already gone when a queue was first looked at.
UNKNOWN = threading.main_thread()


class WorkQueues:
    """The queues that an object has under these names: each before those that its work may lead to."""

    def __init__(self, owner: Any, names: Sequence[str]) -> None:
        self._owner, self._names = owner, names
        #: threads that took something from a queue and have not asked it for more
        self._busy: WeakKeyDictionary[Queue[Any], set[threading.Thread]] = WeakKeyDictionary()

    def undone(self) -> list[str]:
        """Names of the queues where something waits, or somebody works, and who that is; empty at rest."""
        found = []
        for name in self._names:
            queue = getattr(self._owner, name, None)
            if queue is not None and (said := self._of(queue)):
                found.append(f"{name}: {said}")
        return found

    def _of(self, queue: Queue[Any]) -> str:
        with queue.mutex:
            if queue not in self._busy:
                self._watch(queue)
            waiting, busy = queue._qsize(), self._busy[queue]
            busy -= {one for one in busy if not one.is_alive()}  # whoever is told to stop never asks for more
            takers = " and ".join(sorted("somebody" if one is UNKNOWN else one.name for one in busy))
        return f"{waiting} wait, {takers or 'nobody'} at work" if waiting or takers else ""

    def _watch(self, queue: Queue[Any]) -> None:
        """Under its lock. `unfinished_tasks` counts what was ever put there, since SGLang never says a task is done."""
        busy = self._busy[queue] = {UNKNOWN} if queue.unfinished_tasks > queue._qsize() else set()
        taken, get = queue._get, queue.get

        def take() -> Any:
            item = taken()
            busy.add(threading.current_thread())
            return item

        def ask(*args: Any, **kwargs: Any) -> Any:
            with queue.mutex:
                busy.difference_update({UNKNOWN, threading.current_thread()})
            return get(*args, **kwargs)

        queue._get, queue.get = take, ask  # type: ignore[method-assign]
