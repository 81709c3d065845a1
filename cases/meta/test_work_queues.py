"""Threads that take their work from queues: whether they have done all of it."""

from __future__ import annotations

import threading
from queue import Empty, Queue
from types import SimpleNamespace

from harness.engine_side.probes.work_queues import WorkQueues


class Worker(threading.Thread):
    """Takes from a queue as SGLang's threads do; at work on what it took until it is let on."""

    def __init__(self, owner: SimpleNamespace, name: str) -> None:
        super().__init__(daemon=True, name=name)
        self.owner, self.took, self.on, self.stop = owner, threading.Event(), threading.Event(), False

    def run(self) -> None:
        while not self.stop:
            try:
                item = self.owner.work.get(block=True, timeout=0.01)
            except Empty:
                continue
            if item is not None:
                self.took.set()
                self.on.wait()


def rests(queues: WorkQueues) -> bool:
    """In the end; the test's own limit ends it otherwise."""
    while queues.undone():
        pass
    return True


def test_a_thread_has_done_its_work_when_it_asks_for_more():
    owner = SimpleNamespace(work=Queue())
    queues, worker = WorkQueues(owner, ("work", "absent")), Worker(owner, "reader")
    assert queues.undone() == []
    owner.work.put(1)
    assert queues.undone() == ["work: 1 wait, nobody at work"]
    worker.start()
    worker.took.wait()
    assert queues.undone() == ["work: 0 wait, reader at work"]
    worker.on.set()
    assert rests(queues)


def test_another_thread_that_asks_does_not_end_the_work_of_the_first():
    """0.5.17 may leave an old reader beside the new one when it resets."""
    owner = SimpleNamespace(work=Queue())
    queues, first = WorkQueues(owner, ("work",)), Worker(owner, "first")
    first.start()
    queues.undone()
    owner.work.put(1)
    first.took.wait()
    second = Worker(owner, "second")
    second.on.set()
    second.start()
    owner.work.put(2)
    second.took.wait()
    while queues.undone() != ["work: 0 wait, first at work"]:
        pass
    first.on.set()
    assert rests(queues)


def test_work_that_was_begun_before_anybody_looked_is_work():
    owner = SimpleNamespace(work=Queue())
    worker = Worker(owner, "reader")
    owner.work.put(1)
    worker.start()
    worker.took.wait()
    queues = WorkQueues(owner, ("work",))
    assert queues.undone() == ["work: 0 wait, somebody at work"]
    worker.on.set()
    assert rests(queues)


def test_what_is_cleared_and_who_was_told_to_stop_are_no_work():
    owner = SimpleNamespace(work=Queue())
    queues, worker = WorkQueues(owner, ("work",)), Worker(owner, "reader")
    queues.undone()
    owner.work.put(1)
    owner.work.queue.clear()
    assert queues.undone() == []
    worker.stop = True
    worker.start()
    worker.join()
    owner.work.put(None)
    stopped = threading.Thread(target=owner.work.get)
    stopped.start()
    stopped.join()
    later = threading.Event()
    others = [threading.Thread(target=later.wait, daemon=True) for _ in range(3)]  # one of them gets its number
    for one in others:
        one.start()
    assert queues.undone() == []
    later.set()
