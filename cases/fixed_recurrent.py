"""The fixed scenarios of targets that keep recurrent states.

Every common shape of a batch refuses tokens; beside those, requests go on behind states that the prefix cache kept.
Pure data; it must not know which bugs exist.
"""

from __future__ import annotations

from cases.boots import Boot
from cases.fixed import shapes
from harness.contract.scenario import Scenario

#: Of the common shapes; the boots beside the plainest have some of them.
SHAPES = (
    *("four-together", "chunked-long-prompt", "staggered-arrivals", "chunk-borders", "shared-chunk-budget"),
    *("finish-together", "abort-midway"),
)
FEW = SHAPES[:3]
#: What shapes with long prompts in chunks have seen, and with drafts that are refused.
SEEN = {
    "chunked-long-prompt": "state_behind_chunk",
    "chunk-borders": "state_behind_chunk",
    "four-together": "state_behind_refused",
}


def recurrent_shapes(boot: Boot, *, only: tuple[str, ...] = FEW) -> list[Scenario]:
    """Each named by its boot; with a prefix cache those that hit it, too."""
    prefix = f"{boot.name}-"
    found = shapes(**boot.given, prefix=prefix, only=only)
    every = [
        one.model_copy(update={"wants": (*one.wants, SEEN[name])}) if name in SEEN else one
        for name, one in zip(only, found, strict=True)
    ]
    every.append(_slot_given_on(boot, prefix))
    return [*every, _goes_on(boot, prefix), _taken_back(boot, prefix)] if boot.engine.radix_cache else every


def _slot_given_on(boot: Boot, prefix: str) -> Scenario:
    """One of two is aborted between verifies; the other goes on, and the next to come gets the slot of its states."""
    requests = "a 14@441 new=16, b 11@442, c 9@443 new=9"
    script = "submit a b; step 5; abort b; step 1; submit c"
    return boot.program(prefix)("slot-given-on", requests, script, wants="abort_in_decode state_behind_abort")


def _taken_back(boot: Boot, prefix: str) -> Scenario:
    """Taken back once before it decodes, where the cache has all of its prompt's states, and once in a verify."""
    requests, script = "a 20@451 new=12, b 27@452 new=9", "submit a b; step 3; retract; step 5; retract"
    wants = "retract_resume state_from_cache state_after_retraction"
    return boot.program(prefix)("taken-back", requests, script, wants=wants, chunk=16)


def _goes_on(boot: Boot, prefix: str) -> Scenario:
    """A text that ended, or a chunk of it that did, has states in the cache: others go on there, and beyond it."""
    requests = "a 40@430 new=18, b 32@430+9@431 new=14, c 40@430+3@432 new=11"
    script = "submit a; step 24; submit b; step 6; submit c"
    return boot.program(prefix)("goes-on", requests, script, wants="state_from_cache non_final_chunk", chunk=32)
