"""The fixed scenarios of a hierarchical cache: what is evicted goes to the host, and is loaded back for who needs it.

The pool holds some two of these requests, so that every one evicts what came before. Pure data; it must not know which
bugs exist.
"""

from __future__ import annotations

from cases.boots import Boot
from harness.contract.scenario import Scenario

WANTS = "prefix_hit host_written_back host_hit"
#: Before: two that begin with the prompt everybody comes back to, 64@501, in which pages of 16 and of one token end.
TWO = "a 64@501+5@502 new=6, b 64@501+7@503 new=8"
#: Requests that fill device and host, also where a row goes to the host no sooner than it leaves the device.
_FILLERS = "uvwxyz"


def _each(rids: str) -> str:
    return "; ".join(f"submit {rid}; drain" for rid in rids)


def host_shapes(boot: Boot) -> list[Scenario]:
    """Hits from the host: a whole prefix, in chunks behind it, in part, by two at once, by one that was taken back.

    The last is taken back while another waits, which evicts its prefix before it comes back.

    Two requests have the common prompt before it is evicted: `write_through_selective` stores what was hit twice. Two
    share nothing with it, and need most of the pool each.
    """
    if boot.engine.server_args.get("hicache_storage_backend"):
        return _storage_shapes(boot)
    made = boot.program(f"{boot.name}-")
    apart = not boot.engine.disable_hybrid_swa_memory
    windows = "host_hit_in_windows" if apart else ""
    # With windows in a pool of their own a prefix ends where those of its last rows were kept, not inside it.
    shared = 64 if apart else 48

    def program(name: str, requests: str, script: str, wants: str = "", chunk: int | None = None) -> Scenario:
        before = f"{TWO}, x 96@510 new=5, y 94@511 new=9"
        return made(name, f"{before}, {requests}", script, wants=f"{WANTS} {wants}", chunk=chunk)

    again = "c 64@501+6@504 new=10, z 92@512 new=13, d 64@501+9@506 new=12"
    part = "h 32@501+20@507 new=11, k 32@501+16@517 new=7, c 64@501+6@504 new=12"
    together = f"c {shared}@501+6@508 new=4, d {shared}@501+9@509 new=24"
    back = "c 64@501+6@514 new=30, e 20@515 new=21, f 98@516 new=4"
    taken = f"{_each('abxy')}; submit c e; step 3; submit f; step 1; retract c"
    return [
        program("evicted", "c 64@501+6@504 new=12", _each("abxyc"), windows),
        program("chunks", "c 64@501+40@505 new=12", _each("abxyc"), "host_hit_in_chunks non_final_chunk", 16),
        program("again", again, _each("abxyczd")),
        program("part", part, _each("abhxkyc"), "host_hit_in_part"),
        program("together", together, f"{_each('abxy')}; submit c d", "batch_shrinks"),
        program("taken-back", back, taken, "partial_retraction host_hit_retracted"),
    ]


def _storage_shapes(boot: Boot) -> list[Scenario]:
    """Others fill the host as well: storage alone has the common prompt, which comes back, also in chunks."""
    program = boot.program(f"{boot.name}-")
    fillers = [f"{rid} {100 - 2 * place}@{510 + place} new={13 + place}" for place, rid in enumerate(_FILLERS)]
    before, wants = ", ".join([TWO, *fillers]), f"{WANTS} storage_hit"
    chunks = f"{before}, c 64@501+40@505 new=12, d 40@501+9@506 new=10"
    script = f"{_each('ab' + _FILLERS)}; submit c d"
    return [
        program("evicted", f"{before}, c 64@501+6@504 new=12", _each(f"ab{_FILLERS}c"), wants=wants),
        program("chunks", chunks, script, wants=f"{wants} host_hit_in_chunks", chunk=16),
    ]
