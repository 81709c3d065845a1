"""Leases: who may use how much of which card. A lease is a lock that the engine host itself holds, so it ends with it.

Both sides: standard library only. The host takes a lease (`take`) before it imports anything of SGLang; the control
side asks for one (`request`) and says what there is (`describe`, `open_count`). It must not end any process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .gpus import VISIBLE, App, Card, CardError, read_apps, read_cards, visible
from .lease_files import EVERYBODYS, FOLDER, Holder, gate, hold, holders

#: One lease's share of a card where nobody names another. An engine of the tiny checkpoints is CUDA's own context,
#: workspaces of the attention backends and a cache of 4096 tokens; the trace header says what it really used.
SHARE_GIB = 4.0
#: How long to wait while other engines hold every lease. Shorter than the time limit of a test.
WAIT_SECONDS = 300.0
#: An engine that was just ended is listed a moment longer; what is still there after that is somebody else's.
ENDING_SECONDS = 10.0
LOOK_SECONDS = 1.0
#: While another engine looks at a card, which takes as long as nvidia-smi does: how often to try, and how long.
GATE_LOOK_SECONDS, GATE_SECONDS = 0.1, 45.0

SHARE, WAIT = "EAGLECHECK_GPU_SHARE", "EAGLECHECK_GPU_WAIT"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for: so many MiB on one of the cards `visible` leaves (None: any), waiting so many seconds."""

    share: int
    wait: float
    folder: str
    visible: str | None = None

    def plain(self) -> dict[str, Any]:
        """JSON-ready, for the boot record."""
        return {"share": self.share, "wait": self.wait, "folder": self.folder, "visible": self.visible}

    @property
    def gib(self) -> str:
        return _gib(self.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Held as long as `lock` is open in this process."""

    card: Card
    share: int
    slot: int
    lock: int

    def plain(self) -> dict[str, Any]:
        return {"uuid": self.card.uuid, "card": self.card.name, "slot": self.slot, "share_mib": self.share}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One card at one moment. foreign: what computes there and is no engine of ours, in words."""

    card: Card
    holders: tuple[Holder, ...]
    foreign: tuple[str, ...]

    @property
    def promised(self) -> int:
        return sum(holder.share for holder in self.holders)

    @property
    def left(self) -> int:
        """MiB neither used nor promised: an engine that boots has its share, although it does not use it yet."""
        return self.card.capacity - max(self.card.used, self.promised)


def request(share: float | None = None) -> Request:
    """From what was typed (GiB), the environment and the defaults. CardError for what cannot be on any card here."""
    gib = share if share is not None else _number(SHARE, SHARE_GIB)
    named = "--gpu-share" if share is not None else SHARE
    largest = max(card.capacity for card in visible(read_cards()))
    if not 0 < gib * 1024 <= largest:
        raise CardError(
            f"{named} {gib:g}: no GPU here has a share of that size\n"
            f"  allowed: GiB above 0, at most {largest / 1024:.1f}"
        )
    return Request(
        share=round(gib * 1024),
        wait=_number(WAIT, WAIT_SECONDS),
        folder=os.environ.get(FOLDER) or EVERYBODYS,
        visible=os.environ.get(VISIBLE),
    )


def _number(name: str, usual: float) -> float:
    text = os.environ.get(name) or str(usual)
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise CardError(f"{name} is {text!r}, not a number\n  allowed: 0 and above; or leave it out for {usual:g}")
    return number


def take(asked: Request, *, say: Say) -> Lease:
    """A lease for as long as this process lives; CardError, with what to do, when there is none to be had.

    Waits while other engines hold every lease, and a few seconds for a process that may only be ending.
    """
    start = time.monotonic()
    end, taken_since = start + asked.wait, None
    cards = visible(read_cards(), asked.visible)  # once: many that wait and ask the driver each time keep it busy
    while True:
        found = _try_each(asked, cards)
        if isinstance(found, Lease):
            return found
        now = time.monotonic()
        if all(state is not None and _is_taken(state, asked.share) for state in found):
            taken_since = now if taken_since is None else taken_since
        else:
            taken_since = None
        until = end if taken_since is None else min(end, taken_since + ENDING_SECONDS)
        if None in found:  # not seen yet, so nothing can be said about it
            until = max(end, start + GATE_SECONDS)
        if now >= until:
            raise CardError(_refusal(asked, found, now - start))
        say(f"waiting for a GPU lease ({now - start:.0f} s, at most {until - start:.0f} s): {_blocked(found)}")
        time.sleep(GATE_LOOK_SECONDS if None in found else LOOK_SECONDS)


def take_each(asked: Request, *, count: int, say: Say) -> list[Lease]:
    """`count` leases, one a card: of one, whichever is emptiest; of several, the first cards in order of their index.

    Always in that order, so that two engines never hold what the other waits for. CardError as in `take`, and where
    there are fewer cards.
    """
    if count == 1:
        return [take(asked, say=say)]
    cards = sorted(visible(read_cards(), asked.visible), key=lambda card: card.index)
    if len(cards) < count:
        names = ", ".join(f"{card.index} ({card.uuid})" for card in cards)
        raise CardError(f"an engine of {count} ranks needs {count} GPUs, one a rank\n  here: {names}")
    return [take(replace(asked, visible=card.uuid), say=say) for card in cards[:count]]


def hold_cards(asked: Request, *, count: int, say: Say) -> list[Lease]:
    """`take_each`, after which this process and what it starts see no other card."""
    held = take_each(asked, count=count, say=say)
    os.environ[VISIBLE] = ",".join(lease.card.uuid for lease in held)
    return held


def _try_each(asked: Request, cards: Sequence[Card]) -> Lease | list[State | None]:
    """The first card with room, the emptiest first; else what every card looks like (None: another one is looking)."""
    seen: list[State | None] = []
    for card in sorted(cards, key=lambda card: len(holders(asked.folder, card.uuid))):
        with gate(asked.folder, card.uuid) as mine:
            if not mine:
                seen.append(None)
                continue
            state = _look(asked.folder, card.uuid)
            if not state.foreign and state.left >= asked.share:
                return _lock(asked, state)
            seen.append(state)
    return seen


def _is_taken(state: State, share: int) -> bool:
    """Not by engines with leases, which end: by something else, or by memory that no lease accounts for."""
    return bool(state.foreign) or state.promised + share <= state.card.capacity


def _look(folder: str, uuid: str) -> State:
    """The card as it is now; memory is read after the processes, so that it is not older than they are."""
    engines, apps = holders(folder, uuid), [app for app in read_apps() if app.uuid == uuid]
    card = next((card for card in read_cards() if card.uuid == uuid), None)
    if card is None:
        raise CardError(f"GPU {uuid} is gone: nvidia-smi lists it no longer\n  see what it says:  nvidia-smi")
    return State(card=card, holders=engines, foreign=tuple(_foreign(apps, engines)))


def _foreign(apps: Sequence[App], engines: Sequence[Holder]) -> Iterator[str]:
    """Processes of no engine, and of no reference, that holds a lease.

    In a container the driver may name processes by numbers that mean nothing here. Beside engines of ours such a one
    is not called foreign, since it may be theirs; its memory counts in any case.
    """
    sessions = {holder.pid for holder in engines}
    for app in apps:
        session = _session(app.pid)
        if session is None and engines:
            continue
        if session is None or (session not in sessions and app.pid not in sessions):
            size = "" if app.used is None else f", {_gib(app.used)}"
            yield f"process {app.pid} ({app.name}{size})"


def _session(pid: int) -> int | None:
    """The process's session, which our engines lead; None if there is no such process to be seen from here."""
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _lock(asked: Request, state: State) -> Lease:
    """The lowest slot that nobody holds. Called with the gate held, so nobody else takes one meanwhile."""
    used = {holder.slot for holder in state.holders}
    slot = next(number for number in range(len(used) + 1) if number not in used)
    lock = hold(asked.folder, state.card.uuid, slot, share=asked.share)
    return Lease(card=state.card, share=asked.share, slot=slot, lock=lock)


def _refusal(asked: Request, states: Sequence[State | None], waited: float) -> str:
    lines = [f"no GPU lease of {asked.gib} after {waited:.0f} s: {_blocked(states)}"]
    known = [state for state in states if state is not None]
    if any(state.foreign for state in known):
        lines.append(f"wait until it is over, or choose another card:  export {VISIBLE}=UUID")
    if any(not state.foreign and _is_taken(state, asked.share) for state in known):
        lines.append(f"see what uses the memory:  nvidia-smi; or ask for less:  --gpu-share GIB (now {asked.gib})")
    if any(not _is_taken(state, asked.share) for state in known):
        lines.append(f"wait longer:  export {WAIT}=1800; or smaller shares:  --gpu-share GIB (now {asked.gib})")
    return "\n  ".join(lines)


def _blocked(states: Sequence[State | None]) -> str:
    return "; ".join("another engine is taking one" if state is None else _words(state) for state in states)


def _words(state: State) -> str:
    card = state.card
    parts = [f"{_gib(state.left if state.left > 0 else 0)} of {_gib(card.capacity)} left"]
    if state.holders:
        held = ", ".join(f"engine process {holder.pid} ({_gib(holder.share)})" for holder in state.holders)
        parts.append(f"leased to {held}")
    if state.foreign:
        ours = "which is no engine of ours" if len(state.foreign) == 1 else "which are no engines of ours"
        parts.append(f"taken by {', '.join(state.foreign)}, {ours}")
    return f"GPU {card.index} ({card.name}, {card.uuid}): {', '.join(parts)}"


def _gib(mib: int) -> str:
    return f"{mib / 1024:.1f}".removesuffix(".0") + " GiB"


def states(asked: Request) -> list[State]:
    """Every card that may be used, as it is now."""
    return [_look(asked.folder, card.uuid) for card in visible(read_cards(), asked.visible)]


def open_count(asked: Request) -> int:
    """Leases of this size that could be taken now, over all cards that nothing foreign uses."""
    return sum(max(state.left, 0) // asked.share for state in states(asked) if not state.foreign)


def describe(asked: Request | None = None) -> list[str]:
    """One line a card: how many leases are left, who holds the others, what is foreign. CardError as in `request`."""
    asked = asked or request()
    lines = []
    for state in states(asked):
        count = 0 if state.foreign else max(state.left, 0) // asked.share
        lines.append(f"{_words(state)}; {count} lease{'' if count == 1 else 's'} of {asked.gib} to be had")
    return lines


def used_mib(lease: Lease, session: int) -> int | None:
    """What this engine's processes have on the card; None where the driver does not say."""
    mine = [app for app in read_apps() if app.uuid == lease.card.uuid and _session(app.pid) == session]
    known = [app.used for app in mine if app.used is not None]
    return sum(known) if known and len(known) == len(mine) else None
