"""The fixed scenarios of a hierarchical cache: what is evicted goes to the host, and is loaded back for who needs it.

The pool holds some two of these requests, so that every one evicts what came before. Pure data; it must not know which
bugs exist.
"""

from __future__ import annotations

from functools import partial

from cases.boots import Boot
from cases.fixed import DRAIN, boot_program, request, steps, submit, tokens
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Op, Scenario

#: The prompt that everybody comes back to: pages of 16 and of one token end in it.
COMMON = tokens(seed=501, length=64)
WANTS = ("prefix_hit", "host_written_back", "host_hit")


def _behind(rid: str, seed: int, *, shared: int = len(COMMON), more: int = 5, new: int = 6) -> RequestSpec:
    """A request that begins as the common prompt."""
    return RequestSpec(rid=rid, input_ids=COMMON[:shared] + tokens(seed=seed, length=more), max_new_tokens=new)


def _evicting(name: str, seed: int) -> RequestSpec:
    """One that shares nothing and needs most of the pool."""
    return request(name, 96, seed=seed, new=6)


def _each(*rids: str) -> list[Op]:
    return [op for rid in rids for op in (submit(rid), DRAIN)]


def host_shapes(boot: Boot) -> list[Scenario]:
    """Hits from the host: a whole prefix, in chunks behind it, in part, by two at once, by one that was taken back.

    The last is taken back while another waits, which evicts its prefix before it comes back.

    Two requests have the common prompt before it is evicted: `write_through_selective` stores what was hit twice.
    """
    program = partial(
        boot_program, prefix=f"{boot.name}-", checkpoint=boot.checkpoint, spec=boot.spec, engine=boot.engine
    )
    first = [_behind("a", 502), _behind("b", 503)]
    evicting = [_evicting("x", 510), _evicting("y", 511)]
    return [
        program("evicted", [*first, *evicting, _behind("c", 504, new=12)], _each(*"abxyc"), wants=WANTS),
        program(
            "chunks",
            [*first, *evicting, _behind("c", 505, more=40, new=12)],
            _each(*"abxyc"),
            wants=[*WANTS, "host_hit_in_chunks", "non_final_chunk"],
            chunk=16,
        ),
        program(
            "again",
            [*first, *evicting, _behind("c", 504), _evicting("z", 512), _behind("d", 506, new=12)],
            _each(*"abxyczd"),
            wants=WANTS,
        ),
        program(
            "part",
            [*first, *evicting, _behind("h", 507, shared=32, more=20), _behind("c", 504)],
            _each(*"abxhyc"),
            wants=[*WANTS, "host_hit_in_part"],
        ),
        program(
            "together",
            [*first, *evicting, _behind("c", 508, shared=48), _behind("d", 509, shared=48, more=7, new=14)],
            [*_each(*"abxy"), submit("c", "d"), DRAIN],
            wants=[*WANTS, "batch_shrinks"],
        ),
        program(
            "taken-back",
            [*first, *evicting, _behind("c", 514, new=30), request("e", 20, seed=515, new=20), _evicting("f", 516)],
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
