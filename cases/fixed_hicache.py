"""The fixed scenarios of a hierarchical cache: what is evicted goes to the host, and is loaded back for who needs it.

The pool holds some two of these requests, so that every one evicts what came before. Pure data; it must not know which
bugs exist.
"""

from __future__ import annotations

from cases.boots import Boot
from cases.fixed import DRAIN, request, steps, submit, tokens
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op

#: The prompt that everybody comes back to: pages of 16 and of one token end in it.
COMMON = tokens(seed=501, length=64)
WANTS = ("prefix_hit", "host_written_back", "host_hit")
#: Requests that fill device and host, also where a row goes to the host no sooner than it leaves the device.
_FILLERS = "uvwxyz"


def _behind(rid: str, seed: int, *, shared: int = len(COMMON), more: int, new: int) -> RequestSpec:
    """A request that begins as the common prompt."""
    return RequestSpec(rid=rid, input_ids=COMMON[:shared] + tokens(seed=seed, length=more), max_new_tokens=new)


def _each(*rids: str) -> list[Op]:
    return [op for rid in rids for op in (submit(rid), DRAIN)]


def host_shapes(boot: Boot) -> list[Scenario]:
    """Hits from the host: a whole prefix, in chunks behind it, in part, by two at once, by one that was taken back.

    The last is taken back while another waits, which evicts its prefix before it comes back.

    Two requests have the common prompt before it is evicted: `write_through_selective` stores what was hit twice. Two
    share nothing with it, and need most of the pool each.
    """
    if boot.engine.server_args.get("hicache_storage_backend"):
        return _storage_shapes(boot)
    program = boot.program(f"{boot.name}-")
    windows = () if boot.engine.disable_hybrid_swa_memory else ("host_hit_in_windows",)
    before = [
        _behind("a", 502, more=5, new=6),
        _behind("b", 503, more=7, new=8),
        request("x", 96, seed=510, new=5),
        request("y", 94, seed=511, new=9),
    ]
    return [
        program("evicted", [*before, _behind("c", 504, more=6, new=12)], _each(*"abxyc"), wants=[*WANTS, *windows]),
        program(
            "chunks",
            [*before, _behind("c", 505, more=40, new=12)],
            _each(*"abxyc"),
            wants=[*WANTS, "host_hit_in_chunks", "non_final_chunk"],
            chunk=16,
        ),
        program(
            "again",
            [
                *before,
                _behind("c", 504, more=6, new=10),
                request("z", 92, seed=512, new=13),
                _behind("d", 506, more=9, new=12),
            ],
            _each(*"abxyczd"),
            wants=WANTS,
        ),
        program(
            "part",
            [
                *before,
                _behind("h", 507, shared=32, more=20, new=11),
                _behind("k", 517, shared=32, more=16, new=7),
                _behind("c", 504, more=6, new=12),
            ],
            _each(*"abhxkyc"),
            wants=[*WANTS, "host_hit_in_part"],
        ),
        program(
            "together",
            [*before, _behind("c", 508, shared=48, more=6, new=4), _behind("d", 509, shared=48, more=9, new=24)],
            [*_each(*"abxy"), submit("c", "d"), DRAIN],
            wants=[*WANTS, "batch_shrinks"],
        ),
        program(
            "taken-back",
            [
                *before,
                _behind("c", 514, more=6, new=30),
                request("e", 20, seed=515, new=21),
                request("f", 98, seed=516, new=4),
            ],
            [
                *_each(*"abxy"),
                submit("c", "e"),
                steps(3),
                submit("f"),
                steps(1),
                Op(kind="retract", rids=("c",)),
                DRAIN,
            ],
            wants=[*WANTS, "partial_retraction", "host_hit_retracted"],
        ),
    ]


def _storage_shapes(boot: Boot) -> list[Scenario]:
    """Others fill the host as well: storage alone has the common prompt, which comes back, also in chunks."""
    program = boot.program(f"{boot.name}-")
    before = [
        _behind("a", 502, more=5, new=6),
        _behind("b", 503, more=7, new=8),
        *(request(rid, 100 - 2 * place, seed=510 + place, new=13 + place) for place, rid in enumerate(_FILLERS)),
    ]
    wants = [*WANTS, "storage_hit"]
    return [
        program("evicted", [*before, _behind("c", 504, more=6, new=12)], _each(*"ab", *_FILLERS, "c"), wants=wants),
        program(
            "chunks",
            [*before, _behind("c", 505, more=40, new=12), _behind("d", 506, shared=40, more=9, new=10)],
            [*_each(*"ab", *_FILLERS), submit("c", "d"), DRAIN],
            wants=[*wants, "host_hit_in_chunks"],
            chunk=16,
        ),
    ]
