"""Retraction of some running requests: asked for by a scenario, done by SGLang itself, and told of whenever it happens.

SGLang takes requests back when its pool runs out: one after the other, in an order of its own, never the last one. So
asking means to pretend that the pool is full while one of the named runs, or to turn on SGLang's own test switch, for
one batch. Engine side: standard library and SGLang's objects only. It must not choose who is kept, nor in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..hooks import HookRegistry, Original, around
from ..probes.recorder import plain_rid

#: SGLang's own switch, and every how many forwards it then takes requests back.
SWITCH = {"TEST_RETRACT": True, "TEST_RETRACT_INTERVAL": 1}


def forget_retractions(scheduler: Any) -> None:
    """Whoever comes next is admitted as at the start. What SGLang keeps free for those that run rises with each that it
    takes back, until it is idle: the overlap loop is not, between a scenario's last step and the next one's first.
    """
    tracker = getattr(scheduler, "new_token_ratio_tracker", None)
    if tracker is not None:
        tracker.reset()
    else:  # before 0.5.13
        scheduler.new_token_ratio = scheduler.init_new_token_ratio


class Retraction:
    """What the scenario asked of the next batch that would decode, and what SGLang did since the last step."""

    def __init__(self) -> None:
        self._asked: frozenset[str] | None = None
        self._acting = False
        self._done: list[dict[str, Any]] = []

    def install(self, hooks: HookRegistry, scheduler: Any, batch: Any) -> None:
        """scheduler, batch: SGLang's modules. Who goes first can be named from the release on that has an order."""
        hooks.wrap(scheduler, "Scheduler.update_running_batch", lambda original: self._decoding(original, scheduler))
        hooks.wrap(batch, "ScheduleBatch.check_decode_mem", self._memory)
        hooks.wrap(batch, "ScheduleBatch.retract_decode", around(self._told))
        owner = batch.ScheduleBatch
        if (order := getattr(owner, "_get_decode_retraction_order", None)) is not None:
            owner._get_decode_retraction_order = staticmethod(self._order(order))

    def ask(self, rids: list[str] | None) -> None:
        """Of the next batch that would decode, the named are taken back; none named: SGLang's switch. None: nothing."""
        self._asked = None if rids is None else frozenset(rids)

    def take(self) -> list[dict[str, Any]]:
        """What happened since the last call: rids, in the order they were taken back; kept: places in the old batch."""
        done, self._done = self._done, []
        return done

    def _decoding(self, original: Original, module: Any) -> Original:
        def update_running_batch(owner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            with self._acts(module):
                result = original(owner, batch, *args, **kwargs)
            if result is not None:  # else SGLang waits for requests that are about to end
                self._asked = None
            return result

        return update_running_batch

    @contextmanager
    def _acts(self, module: Any) -> Iterator[None]:
        before = {name: getattr(module, name) for name in SWITCH}
        self._acting = bool(self._asked)
        if self._asked is not None and not self._asked:
            vars(module).update(SWITCH)
        try:
            yield
        finally:
            self._acting = False
            vars(module).update(before)

    def _memory(self, original: Original) -> Callable[..., bool]:
        def check_decode_mem(batch: Any, selected_indices: list[int] | None = None, *args: Any, **kwargs: Any) -> bool:
            enough = bool(original(batch, selected_indices, *args, **kwargs))
            left = batch.reqs if selected_indices is None else [batch.reqs[i] for i in selected_indices]
            return enough and not (self._acting and len(left) > 1 and any(self._named(req) for req in left))

        return check_decode_mem

    def _order(self, original: Callable[..., list[int]]) -> Callable[..., list[int]]:
        """SGLang's order of who stays longest, the named behind all others."""

        def order(reqs: list[Any], *args: Any, allow_policy_sort: bool = True) -> list[int]:
            if not allow_policy_sort:  # of 0.5.16, under speculation: requests go from the back only
                return original(reqs, *args, allow_policy_sort=False)
            # 0.5.17 gives its arguments too
            return sorted(original(reqs, *args), key=lambda i: self._acting and self._named(reqs[i]))

        return order

    def _named(self, req: Any) -> bool:
        return plain_rid(req.rid) in (self._asked or ())

    def _told(self, original: Original, batch: Any, *args: Any, **kwargs: Any) -> Any:
        before = [plain_rid(req.rid) for req in batch.reqs]
        result = original(batch, *args, **kwargs)
        kept = [before.index(plain_rid(req.rid)) for req in batch.reqs]
        reason = "pool" if self._asked is None else "asked" if self._asked else "test"
        self._done.append({"rids": [plain_rid(req.rid) for req in result[0]], "kept": kept, "reason": reason})
        return result
