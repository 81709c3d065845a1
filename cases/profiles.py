"""How much generation a test session does: `pr` is the same every time and short, `nightly` is random and time-boxed.

Pure data; it must not draw scenarios.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Literal

from cases.strategies import BOOTS

Name = Literal["pr", "nightly"]

#: The pull-request profile's seed. Another number is another, equally good, set of scenarios.
PR_SEED = 26329


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """scenarios: at most so many a boot configuration, in blocks of `block`; seconds: a block's time box.

    pairs: scenario pairs a relation.
    """

    name: Name
    scenarios: int
    block: int
    pairs: int
    seconds: float


PROFILES: dict[str, Profile] = {
    "pr": Profile(name="pr", scenarios=24, block=12, pairs=4, seconds=240.0),
    "nightly": Profile(name="nightly", scenarios=400, block=50, pairs=40, seconds=480.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The scenarios of one test: `count` of boot configuration `boot`, drawn from `seed`."""

    boot: str
    seed: int
    count: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.boot}-{self.seed}"


def blocks(profile: Profile, seed: int) -> list[Block]:
    """Every block of a session, boot by boot."""
    return [
        Block(boot=boot, seed=seed + number, count=profile.block, seconds=profile.seconds)
        for boot in BOOTS
        for number in range(profile.scenarios // profile.block)
    ]


def seed_of(profile: Profile, given: int | None, run: str | None) -> int:
    """`given` if there is one; for `nightly` a random number, the same on every worker of one run."""
    if given is not None:
        return given
    if profile.name == "pr":
        return PR_SEED
    return secrets.randbelow(10**8) if run is None else int(run[:6], 16)
