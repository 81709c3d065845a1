"""The fixed scenarios of targets that keep recurrent states.

Every common shape of a batch refuses tokens; beside those, requests go on behind states that the prefix cache kept.
Pure data; it must not know which bugs exist.
"""

from __future__ import annotations

from cases.boots import Boot
from cases.fixed import DRAIN, abort, request, shapes, steps, submit, tokens
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op

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
    program = boot.program(prefix)
    requests = [request("a", 14, seed=441, new=16), request("b", 11, seed=442), request("c", 9, seed=443, new=9)]
    script = [submit("a", "b"), steps(5), abort("b"), steps(1), submit("c"), DRAIN]
    return program("slot-given-on", requests, script, wants=["abort_in_decode", "state_behind_abort"])


def _taken_back(boot: Boot, prefix: str) -> Scenario:
    """Taken back once before it decodes, where the cache has all of its prompt's states, and once in a verify."""
    program = boot.program(prefix)
    requests = [request("a", 20, seed=451, new=12), request("b", 27, seed=452, new=9)]
    script = [submit("a", "b"), steps(3), Op(kind="retract"), steps(5), Op(kind="retract"), DRAIN]
    wants = ["retract_resume", "state_from_cache", "state_after_retraction"]
    return program("taken-back", requests, script, wants=wants, chunk=16)


def _goes_on(boot: Boot, prefix: str) -> Scenario:
    """A text that ended, or a chunk of it that did, has states in the cache: others go on there, and beyond it."""
    program = boot.program(prefix)
    shared = tokens(seed=430, length=40)
    requests = [
        RequestSpec(rid="a", input_ids=shared, max_new_tokens=18),
        RequestSpec(rid="b", input_ids=shared[:32] + tokens(seed=431, length=9), max_new_tokens=14),
        RequestSpec(rid="c", input_ids=shared + tokens(seed=432, length=3), max_new_tokens=11),
    ]
    script = [submit("a"), steps(24), submit("b"), steps(6), submit("c"), DRAIN]
    return program("goes-on", requests, script, wants=["state_from_cache", "non_final_chunk"], chunk=32)
