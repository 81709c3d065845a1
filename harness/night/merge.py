"""Shards of one night put together again, with every planned shard and cell counted against what came back.

It must not repair anything: what is missing or there twice is said, and makes the night red.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from harness.archive.faults import StoreError
from harness.archive.run_folders import REPRODUCERS
from harness.contract import plain_files
from harness.contract.words import counted
from harness.night.records import CellResult, Night, NightPlan, unaccounted
from harness.night.store import Kept, begin, disk, finish, new_id, nights, with_what_is_left

#: What shards of one night have in common.
SHARED = (
    *("device", "revert", "settings", "seed", "seconds", "scenarios", "repeats", "planned", "costs"),
    *("eaglecheck", "git_head", "source"),
)


def merge(shards: Sequence[Kept], *, root: Path, now: str) -> tuple[Path, Night]:
    """(folder in the store, the night with its faults). Raises StoreError for shards of different nights.

    Shards of a night that is in the store, be it some new ones with them, make that night again and not a second one.
    """
    first = shards[0].plan
    for shard in shards[1:]:
        _same(first, shard.plan, shard.folder)
    ids = tuple(sorted({shard.plan.id for shard in shards}))
    before = _before(root, ids)
    plan = first.model_copy(
        update={
            "id": new_id() if before is None else before.plan.id,
            "created": min(one.plan.created for one in shards),
            "shard": (1, 1),
            "jobs": sum(shard.plan.jobs for shard in shards),
            "shards": ids,
        }
    )
    for shard in shards:
        _check_copied(shard)
    folder = begin(root, plan, again=before is not None)
    shutil.rmtree(folder / REPRODUCERS[0], ignore_errors=True)
    cells: list[CellResult] = []
    for shard in shards:
        if shard.night is not None:
            cells += [_taken_over(cell, shard, folder) for cell in shard.night.cells]
    order = {key: number for number, key in enumerate(plan.planned)}
    cells.sort(key=lambda cell: order.get(cell.key, len(order)))
    night = Night(plan=plan, finished=now, cells=tuple(cells), faults=tuple(faults(shards)))
    finish(folder, night)
    return folder, night


def _before(root: Path, ids: Sequence[str]) -> Kept | None:
    """The night of the store that any of these shards went into; StoreError if it holds more than these."""
    found = next((kept for kept in nights(root) if set(kept.plan.shards) & set(ids)), None)
    if found is not None and set(found.plan.shards) > set(ids):
        raise StoreError(
            f"{found.folder} was made of these shards and of more: {', '.join(sorted({*found.plan.shards} - {*ids}))}\n"
            "  name all of them, or another store:  --nights FOLDER"
        )
    return found


def faults(shards: Sequence[Kept]) -> list[str]:
    """What is missing or doubled, in whole sentences."""
    plan = shards[0].plan
    of = max(shard.plan.shard[1] for shard in shards)
    found = []
    numbers = Counter(shard.plan.shard[0] for shard in shards)
    for number in range(1, of + 1):
        if not numbers[number]:
            lost = len(plan.share(number, of))
            found.append(f"shard {number} of {of} is missing, and {counted(lost, 'cell')} with it: did its job run?")
        elif numbers[number] > 1:
            found.append(f"shard {number} of {of} is there {numbers[number]} times")
    for shard in shards:
        if shard.night is None:
            number, of = shard.plan.shard
            cells = counted(len(shard.plan.mine), "cell")
            found.append(f"shard {number} of {of}, {cells}, {shard.plan.cut_off}")
    reported = [cell.key for shard in shards if shard.night is not None for cell in shard.night.cells]
    excused = {key for shard in shards if shard.night is None for key in shard.plan.mine} | {
        key for number in range(1, of + 1) if not numbers[number] for key in plan.share(number, of)
    }
    return [*found, *unaccounted(plan.planned, reported, excused=excused)]


def _same(first: NightPlan, other: NightPlan, folder: Path) -> None:
    for name in SHARED:
        if getattr(first, name) != getattr(other, name):
            was, now = getattr(first, name), getattr(other, name)
            said = f": {now!r}, not {was!r}" if name != "planned" else ": other cells"
            raise StoreError(
                f"{folder} is a shard of another night: its {name} differs{said}\n"
                "  allowed: shards of one night, run with the same options and --seed"
            )
    if first.shard[1] != other.shard[1]:
        raise StoreError(
            f"{folder} is shard {other.shard[0]} of {other.shard[1]}, and others are of {first.shard[1]}\n"
            "  allowed: shards of one night"
        )


def _taken_over(cell: CellResult, shard: Kept, folder: Path) -> CellResult:
    """The cell with its reproducers copied into the merged night."""
    left = with_what_is_left(cell, shard.folder)
    for name in (one.reproducer for one in left.findings if one.reproducer):
        with disk(folder):
            shutil.copytree(shard.folder / name, folder / name, dirs_exist_ok=True)
    return left


def _check_copied(shard: Kept) -> None:
    """StoreError for a shard of which a reproducer holds what cannot be copied to an end."""
    cells = () if shard.night is None else shard.night.cells
    try:
        for one in (shard.folder / seen.reproducer for cell in cells for seen in cell.findings if seen.reproducer):
            if one.is_dir():
                plain_files.check_tree(one)
    except OSError as error:
        raise StoreError(
            f"cannot copy {error.filename}: {error.strerror}\n  move it away, or get the shard again, whole"
        ) from error
