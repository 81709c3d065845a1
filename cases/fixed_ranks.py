"""The fixed scenarios of several ranks: DP attention with every way to be idle, and TP ranks that share each request.

Pure data; it must not know which bugs exist, and must not import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cases.boots import Boot
from cases.fixed import DRAIN, abort, boot_program, chosen, request, shapes, steps, submit
from harness.contract.scenario import Scenario
from harness.contract.script import Op


def rank_shapes(boot: Boot, *, prefix: str = "", only: Sequence[str] = ()) -> list[Scenario]:
    """Each coverage point of ranks once; `only` some of them by name. Requests of even names are on rank 0."""

    program = boot.program(prefix)
    every = [
        program(
            "other-rank-idle",
            [request("a", 7, seed=111, new=12)],
            [submit("a"), DRAIN],
            wants=["idle_rank", "idle_from_the_start", "idle_beside_prefill", "idle_beside_verify"],
        ),
        program(
            "first-rank-idle",
            [request("a", 9, seed=112, new=12, dp_rank=1)],
            [submit("a"), DRAIN],
            wants=["idle_from_the_start"],
        ),
        program(
            "held-back",
            [request("a", 12, seed=113, new=24), request("b", 20, seed=114, new=10, dp_rank=1)],
            [submit("a"), steps(4), submit("b"), DRAIN],
            wants=["held_idle_by_prefill", "idle_from_the_start", "idle_beside_verify"],
        ),
        program(
            "idle-for-a-while",
            [
                request("a", 14, seed=115, new=30),
                request("b", 6, seed=116, new=4, dp_rank=1),
                request("c", 11, seed=117, new=8, dp_rank=1),
            ],
            [submit("a", "b"), steps(9), submit("c"), DRAIN],
            wants=["idle_between_requests"],
        ),
        program(
            "finish-together",
            [
                request("a", 16, seed=118, new=20),
                request("b", 8, seed=119, new=2, dp_rank=1),
                request("c", 13, seed=120, new=2, dp_rank=1),
            ],
            [submit("a", "b", "c"), DRAIN],
            wants=["idle_after_all_finished"],
        ),
        program(
            "every-rank-idle",
            [request("a", 9, seed=121, new=5), request("b", 14, seed=122, new=5, dp_rank=1)],
            [submit("a"), steps(16), submit("b"), DRAIN],
            wants=["every_rank_idle"],
        ),
        program(
            "uneven-batches",
            [
                request("a", 5, seed=123, new=10),
                request("b", 10, seed=124, new=14),
                request("c", 22, seed=125, new=12),
                request("d", 17, seed=126, new=16, dp_rank=1),
            ],
            [submit("a", "b", "c", "d"), DRAIN],
            wants=["uneven_ranks"],
        ),
        program(
            "idle-inside-chunks",
            [request("a", 70, seed=127, new=8), request("b", 6, seed=128, new=4, dp_rank=1)],
            [submit("b"), steps(2), submit("a"), DRAIN],
            wants=["idle_inside_chunked_prefill", "held_idle_by_prefill", "non_final_chunk"],
            chunk=16,
        ),
        program(
            "abort-leaves-idle",
            [request("a", 18, seed=129, new=20), request("b", 12, seed=130, new=40, dp_rank=1)],
            [submit("a", "b"), steps(4), abort("b"), DRAIN],
            wants=["idle_after_abort", "abort_in_decode"],
        ),
    ]
    return chosen(every, prefix=prefix, only=only)


def on_boot(boot: Boot, *, only: Sequence[str] = ()) -> list[Scenario]:
    """Every common batch shape on a boot, and a retraction; each named after the boot."""
    given: dict[str, Any] = {**boot.given, "prefix": f"{boot.name}-"}
    retracted = boot_program(
        "retracted",
        [request("a", 12, seed=33, new=14), request("b", 6, seed=34, new=15)],
        [submit("a", "b"), steps(4), Op(kind="retract"), DRAIN],
        wants=["retract_resume"],
        **given,
    )
    return chosen([*shapes(**given), retracted], prefix=f"{boot.name}-", only=only)


def joining(boot: Boot) -> Scenario:
    """Two requests run while the prompt of a third arrives in chunks."""
    return boot_program(
        "joining",
        [request("a", 5, seed=31, new=20), request("b", 9, seed=32, new=17), request("c", 40, seed=35, new=6)],
        [submit("a", "b"), steps(3), submit("c"), DRAIN],
        prefix=f"{boot.name}-",
        **boot.given,
        wants=["mixed_batch", "non_final_chunk"],
        chunk=16,
    )
