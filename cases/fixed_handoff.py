"""The fixed scenarios of disaggregation: every way for a hand-over to go, and to go wrong.

Pure data; it must not know which bugs exist, and must not import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cases.boots import PAIR, RANKED_PAIR, Boot
from cases.fixed import CHAIN, CHECKPOINT, DRAIN, abort, boot_program, chosen, request, steps, submit, transfer
from harness.contract.scenario import Scenario
from harness.contract.settings import EngineConfig, SpecConfig


def handoffs(
    *,
    checkpoint: str = CHECKPOINT,
    spec: SpecConfig = CHAIN,
    engine: EngineConfig = PAIR,
    prefix: str = "",
    only: Sequence[str] = (),
) -> list[Scenario]:
    """Each coverage point of hand-overs once; `only` some of them by name."""

    program = partial(boot_program, prefix=prefix, checkpoint=checkpoint, spec=spec, engine=engine)
    every = [
        program(
            "one",
            [request("a", 7, seed=211, new=14)],
            [submit("a"), DRAIN],
            wants=["handed_over", "handed_over_to_idle_side"],
        ),
        program(
            "together",
            [
                request("a", 7, seed=211, new=14),
                request("b", 12, seed=212, new=10),
                request("c", 19, seed=213, new=12),
            ],
            [submit("a", "b", "c"), DRAIN],
            wants=["handed_over_together"],
        ),
        program(
            "busy-side",
            [request("a", 9, seed=214, new=24), request("b", 15, seed=215, new=10)],
            [submit("a"), steps(5), submit("b"), DRAIN],
            wants=["handed_over_to_busy_side"],
        ),
        program(
            "full-side",
            [request(rid, 6 + place, seed=216 + place, new=8 + place) for place, rid in enumerate("abcdef")],
            [submit(*"abcdef"), DRAIN],
            wants=["decode_side_full"],
        ),
        program(
            "last-chunk-of-one",
            [request("a", 33, seed=222, new=10), request("b", 5, seed=223, new=8)],
            [submit("a"), steps(2), submit("b"), DRAIN],
            wants=["last_chunk_of_one", "non_final_chunk"],
            chunk=16,
        ),
        program(
            "ends-at-once",
            [request("a", 8, seed=224, new=1), request("b", 11, seed=225, new=10)],
            [submit("a", "b"), DRAIN],
            wants=["finished_at_hand_over"],
        ),
        program(
            "all-end-at-once",
            [request("a", 8, seed=226, new=1), request("b", 13, seed=227, new=1), request("c", 6, seed=228, new=9)],
            [submit("a", "b"), steps(4), submit("c"), DRAIN],
            wants=["finished_at_hand_over", "prebuilt_all_finished"],
        ),
        program(
            "delayed",
            [request("a", 10, seed=229, new=10), request("b", 7, seed=230, new=18)],
            [submit("a", "b"), transfer("hold", "a"), steps(5), transfer("release", "a"), DRAIN],
            wants=["delayed_transfer", "handed_over_to_busy_side"],
        ),
        program(
            "reordered",
            [request("a", 10, seed=231, new=10), request("b", 14, seed=232, new=9)],
            [
                submit("a", "b"),
                transfer("hold", "a", "b"),
                steps(3),
                transfer("release", "b"),
                steps(2),
                transfer("release", "a"),
                DRAIN,
            ],
            wants=["reordered_transfers", "delayed_transfer"],
        ),
        program(
            "failed-beside-good",
            [request("a", 10, seed=233, new=10), request("b", 9, seed=234, new=12)],
            [submit("a", "b"), transfer("hold", "a"), steps(2), transfer("fail", "a"), DRAIN],
            wants=["failed_transfer", "failed_beside_good"],
        ),
        program(
            "all-failed",
            [request("a", 10, seed=235, new=10), request("b", 9, seed=236, new=12), request("c", 8, seed=237, new=8)],
            [
                submit("a", "b"),
                transfer("hold", "a", "b"),
                steps(3),
                transfer("fail", "a", "b"),
                steps(2),
                submit("c"),
                DRAIN,
            ],
            wants=["failed_transfer", "empty_prebuilt_batch"],
        ),
        program(
            "abort-in-transfer",
            [request("a", 10, seed=238, new=10), request("b", 9, seed=239, new=14)],
            [submit("a", "b"), transfer("hold", "a"), steps(3), abort("a"), DRAIN],
            wants=["abort_in_transfer"],
        ),
        program(
            "all-aborted",
            [request("a", 10, seed=240, new=10), request("b", 9, seed=241, new=12), request("c", 8, seed=242, new=8)],
            [submit("a", "b"), transfer("hold", "a", "b"), steps(3), abort("a", "b"), steps(2), submit("c"), DRAIN],
            wants=["abort_in_transfer", "empty_prebuilt_batch"],
        ),
        program(
            "dropped",
            [request("a", 10, seed=243, new=10), request("b", 9, seed=244, new=12)],
            [submit("a", "b"), transfer("drop", "a"), steps(6), abort("a"), DRAIN],
            wants=["dropped_transfer", "abort_in_transfer"],
        ),
        program(
            "waiting-aborted",
            # Four that decode for long: under overlap scheduling KV arrives steps later than without.
            [request(rid, 6 + place, seed=245 + place, new=20 + place) for place, rid in enumerate("abcde")],
            [submit(*"abcd"), steps(1), submit("e"), steps(4), abort("e"), DRAIN],
            wants=["decode_side_full", "empty_prebuilt_batch"],
        ),
        program(
            "retracted",
            [request(rid, 20 + place, seed=251 + place, new=40 + place) for place, rid in enumerate("abc")],
            [submit(*"abc"), DRAIN],
            wants=["retracted_on_decode_side"],
        ),
        program(
            "retracted-aborted",
            # As above, and the one that was taken back is aborted before there is room for it again.
            [request(rid, 20 + place, seed=251 + place, new=40 + place) for place, rid in enumerate("abc")],
            [submit(*"abc"), steps(20), abort("c"), DRAIN],
            wants=["empty_prebuilt_batch"],
        ),
    ]
    return chosen(every, prefix=prefix, only=only)


def ranked_handoffs(*, boot: Boot = RANKED_PAIR, prefix: str = "ranks-") -> list[Scenario]:
    """A prebuilt batch on one rank of the decode side, whatever the other rank does: nothing, a verify, the same."""

    program = boot.program(prefix)
    return [
        program(
            "other-idle",
            [request("a", 9, seed=261, new=12, dp_rank=1)],
            [submit("a"), DRAIN],
            wants=["handed_over_beside_idle_rank"],
        ),
        program(
            "other-busy",
            [request("a", 7, seed=262, new=30), request("b", 12, seed=263, new=10, dp_rank=1)],
            [submit("a"), steps(6), submit("b"), DRAIN],
            wants=["handed_over_beside_busy_rank", "handed_over_beside_idle_rank"],
        ),
        program(
            "both",
            [
                request("a", 7, seed=264, new=12),
                request("b", 12, seed=265, new=10, dp_rank=1),
                request("c", 5, seed=266, new=15, dp_rank=1),
            ],
            [submit("a", "b", "c"), DRAIN],
            wants=["handed_over_on_each_rank"],
        ),
        program(
            "ends-at-once",
            [request("a", 8, seed=267, new=24), request("b", 6, seed=268, new=1, dp_rank=1)],
            [submit("a"), steps(5), submit("b"), DRAIN],
            wants=["prebuilt_all_finished", "handed_over_beside_busy_rank"],
        ),
        program(
            "empty-beside-busy",
            [
                request("a", 8, seed=269, new=30),
                request("b", 6, seed=270, new=8, dp_rank=1),
                request("c", 10, seed=271, new=9, dp_rank=1),
                request("d", 5, seed=272, new=10, dp_rank=1),
            ],
            [
                submit("a"),
                steps(4),
                submit("b", "c"),
                transfer("hold", "b", "c"),
                steps(3),
                transfer("fail", "b"),
                abort("c"),
                steps(3),
                submit("d"),
                DRAIN,
            ],
            wants=["empty_prebuilt_beside_busy_rank", "failed_transfer", "abort_in_transfer"],
        ),
    ]
