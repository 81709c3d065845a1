"""Which SGLang names to hook in which release: compat.toml, which changes when a release is added.

Engine side: standard library only. It must hold data and look-ups, no behaviour.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

#: (module, what, argument); `what` names one of patches.PATCHES or cpu_ops.KERNELS.
Patch = tuple[str, str, str]


def parse(version: str) -> tuple[int, int, int, int]:
    """'0.5.12.post1' -> (0, 5, 12, 1); development suffixes are dropped. ValueError if it is no version."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", version)
    if match is None:
        raise ValueError(f"not an SGLang version: {version!r} (expected something like 0.5.23)")
    major, minor, patch, post = match.groups()
    return int(major), int(minor), int(patch), int(post or 0)


@dataclass(frozen=True)
class Release:
    """Hook targets of one range of releases.

    gate: where the scheduler asks for requests. worker/draft: module and class of the EAGLE worker that drives a
    round and of the one that drafts (one class in the v1 worker). sample: (module, name) that returns
    (predict, accept_lens, accept_index), or None where the worker's `verify` result is read instead. greedy: the
    module whose `verify_tree_greedy_func` walks the tree for it. alarm: where SGLang checks its own pool when idle.
    dp_patches: what DP attention needs on a CPU as well. idle_patches: what lets an idle rank past its crash, F-007.
    mtp_patches: what the multi-layer worker needs on a CPU. mtp_plan_patches: what plans each eager forward, F-011.
    room_is_chunk: an eager batch has room for as many tokens as the chunk of the boot, whatever the pool holds.
    """

    first: str
    gate: tuple[str, str]
    worker_module: str
    worker: str
    draft: str
    draft_prefill: str
    draft_extend: str
    sample: tuple[str, str] | None
    greedy: str
    alarm: str
    patches: tuple[Patch, ...]
    dp_patches: tuple[Patch, ...]
    idle_patches: tuple[Patch, ...]
    truncates_at_finish: bool
    room_is_chunk: bool = False
    overlap: bool | None = None  # the scheduling this row is for; None: either
    mtp_patches: tuple[Patch, ...] = ()
    mtp_plan_patches: tuple[Patch, ...] = ()
    # of `multi_layer` alone:
    plan_patches: tuple[Patch, ...] = ()
    layered: bool = False  # proposals come from one draft forward a layer instead of draft steps

    @property
    def generation(self) -> str:
        return "v1" if self.sample is None else "v2"


_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
#: What a CPU needs, by a word.
PATCHES: dict[str, tuple[Patch, ...]] = {
    word: tuple((*line.split(), "")[:3] for line in lines) for word, lines in _TABLES["patches"].items()
}


def _release(*, like: str, **row: Any) -> Release:
    given = {"sample": None, **_TABLES["worker"][like], **row}
    for key, value in given.items():
        if key.endswith("patches"):
            given[key] = tuple(patch for word in value.split() for patch in PATCHES[word])
        elif isinstance(value, list):
            given[key] = tuple(value)
    return Release(**given)


#: Newest first; a release belongs to the first row whose `first` is not newer than it.
RELEASES: tuple[Release, ...] = tuple(_release(**row) for row in _TABLES["release"])


def lookup(version: str, *, overlap: bool) -> Release:
    """The hook table of `version`; LookupError for releases older than the oldest row."""
    wanted = parse(version)
    for release in RELEASES:
        if wanted >= parse(release.first) and release.overlap in (None, overlap):
            return release
    raise LookupError(f"SGLang {version} is older than {RELEASES[-1].first}, the oldest release with a hook table")


def multi_layer(release: Release) -> Release:
    """`release` with the multi-layer worker as its worker; LookupError where only the v1 scheduling was asked for."""
    if release.generation == "v1":
        raise LookupError("the v1 multi-layer worker has no hook table; leave overlap at the release's default")
    layered, sample = _TABLES["worker"]["multi_layer"], release.sample
    if sample is not None and sample[0] == release.worker_module:  # each worker imports the name for itself
        sample = (layered["worker_module"], sample[1])
    return replace(
        release,
        **layered,
        sample=sample,
        patches=(*release.patches, *release.mtp_patches),
        plan_patches=release.mtp_plan_patches,
        layered=True,
    )


def default_overlap(version: str, *, topk: int, device: str) -> bool:
    """The scheduling a user of `version` gets without asking.

    On a CPU, 0.5.13 and later run without overlap (0.5.17 and later force it off there); before, the default worker of
    a chain (topk = 1) needs it, and trees force it off.
    """
    if parse(version) >= parse("0.5.13"):
        return device != "cpu"
    return topk == 1
