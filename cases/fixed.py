"""The small fixed set of scenarios behind `eaglecheck run`: one boot configuration, every common batch shape once.

To add one: a `program` in `shapes` (batches), in `cases/fixed_ranks` or in `cases/fixed_handoff`. Pure data made from
seeds; it must not know which bugs exist, and must not import torch or sglang.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig, SpecConfig

CHECKPOINT = "eagle-tiny"
#: Pairs of 520 tokens; the others that `never` is asked about have 512.
OF_520 = ("eagle3-apart", "qwen3-apart")
VOCAB = 500  # prompts stay below the special ids of the tiny vocabularies


def tokens(*, seed: int, length: int) -> tuple[int, ...]:
    """`length` random prompt token ids, the same for the same seed on every machine."""
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCAB) for _ in range(length))


def request(
    rid: str, length: int, *, seed: int, new: int | None = None, stop_ids: Sequence[int] = (), dp_rank: int = 0
) -> RequestSpec:
    """A greedy request with a random prompt; without a limit one of 18 to 24 that nearby seeds do not share."""
    return RequestSpec(
        rid=rid,
        input_ids=tokens(seed=seed, length=length),
        max_new_tokens=24 - seed % 7 if new is None else new,
        stop_token_ids=tuple(stop_ids),
        dp_rank=dp_rank,
    )


def never(checkpoint: str) -> int:
    """An id that this pair never chooses, since its logit is 0.

    SGLang keeps room for all that a request may generate, unless it has a stop id, and then its pool never runs out:
    without a prefix cache, and 0.5.23 with one too.
    """
    return 519 if checkpoint in OF_520 else 511


def submit(*rids: str) -> Op:
    return Op(kind="submit", rids=rids)


def steps(count: int = 1) -> Op:
    return Op(kind="step", count=count)


def abort(*rids: str) -> Op:
    return Op(kind="abort", rids=rids)


def transfer(what: str, *rids: str) -> Op:
    return Op(kind="transfer", name=what, rids=rids)


DRAIN = Op(kind="drain")
#: The default boot configuration: a chain of three steps.
CHAIN, PLAIN = SpecConfig(num_steps=3, eagle_topk=1, num_draft_tokens=4), EngineConfig()


def boot_program(
    name: str,
    requests: Sequence[RequestSpec],
    script: Sequence[Op],
    *,
    prefix: str,
    checkpoint: str,
    spec: SpecConfig,
    engine: EngineConfig,
    wants: Sequence[str] = (),
    chunk: int | None = None,
) -> Scenario:
    """A scenario on a boot configuration, but for its prefill chunk; named with a prefix."""
    return Scenario(
        name=prefix + name,
        checkpoint=checkpoint,
        spec=spec,
        engine=engine.model_copy(update={"chunked_prefill_size": chunk}),
        requests=tuple(requests),
        script=tuple(script),
        wants=tuple(wants),
    )


def chosen(every: Sequence[Scenario], *, prefix: str, only: Sequence[str]) -> list[Scenario]:
    """Those called `only` behind the prefix, in that order; all where nothing is named."""
    by_name = {scenario.name.removeprefix(prefix): scenario for scenario in every}
    return [by_name[name] for name in only] if only else list(every)


def shapes(
    *,
    checkpoint: str = CHECKPOINT,
    spec: SpecConfig = CHAIN,
    engine: EngineConfig = PLAIN,
    chunk: int = 32,
    prefix: str = "",
    only: Sequence[str] = (),
) -> list[Scenario]:
    """Every common batch shape once, on one boot configuration; `only` some of them by name, each named with a prefix.

    Their coverage points hold for chunks of 32 tokens and pages that divide them.
    """

    program = partial(boot_program, prefix=prefix, checkpoint=checkpoint, spec=spec, engine=engine)
    every = [
        program("single", [request("a", 7, seed=11)], [submit("a"), DRAIN]),
        program(
            "four-together",
            [
                request(rid, length, seed=20 + i)
                for i, (rid, length) in enumerate(zip("abcd", (3, 12, 25, 60), strict=True))
            ],
            [submit(*"abcd"), DRAIN],
            wants=["batch_shrinks"],
        ),
        program(
            "chunked-long-prompt",
            [request("a", 100, seed=31)],
            [submit("a"), DRAIN],
            wants=["non_final_chunk"],
            chunk=chunk,
        ),
        program(
            "chunk-borders",
            [request("one-more", 33, seed=41), request("exact", 64, seed=42, new=16)],
            [submit("one-more"), steps(4), submit("exact"), DRAIN],
            wants=["non_final_chunk", "chunk_longer_by_one", "chunk_exact_multiple"],
            chunk=chunk,
        ),
        program(
            "shared-chunk-budget",
            [request("a", 20, seed=51), request("b", 28, seed=52), request("c", 9, seed=53)],
            [submit("a", "b", "c"), DRAIN],
            wants=["split_by_shared_budget"],
            chunk=chunk,
        ),
        program(
            "staggered-arrivals",
            [request(rid, 10 + 7 * i, seed=60 + i, new=20 - i) for i, rid in enumerate("abc")],
            [submit("a"), steps(3), submit("b"), steps(4), submit("c"), DRAIN],
            wants=["batch_grows", "batch_shrinks"],
        ),
        program(
            "finish-together",
            [request("a", 15, seed=71, new=1), request("b", 22, seed=72, new=1), request("c", 8, seed=73, new=2)],
            [submit("a", "b"), steps(3), submit("c"), DRAIN],
            wants=["all_finished_in_one_verify"],
        ),
        program(
            "idle-between",
            [request("a", 9, seed=81, new=8), request("b", 14, seed=82, new=7)],
            [submit("a"), steps(24), submit("b"), DRAIN],
            wants=["idle_tick"],
        ),
        program(
            "shared-prefix",
            [
                RequestSpec(rid="a", input_ids=tokens(seed=91, length=40), max_new_tokens=12),
                RequestSpec(
                    rid="b", input_ids=tokens(seed=91, length=30) + tokens(seed=92, length=9), max_new_tokens=11
                ),
            ],
            [submit("a"), steps(16), submit("b"), DRAIN],
            wants=["prefix_hit"],
        ),
        program(
            "abort-midway",
            [request("a", 50, seed=95), request("b", 18, seed=96)],
            [submit("a", "b"), steps(4), abort("a"), DRAIN],
            wants=["abort_in_decode"],
        ),
    ]
    return chosen(every, prefix=prefix, only=only)


def default_scenarios() -> list[Scenario]:
    """What `eaglecheck run` drives: ten programs, a few seconds each on a CPU."""
    return shapes()


def read_twice() -> Scenario:
    """Prompts that begin alike in one batch: each computes that part, and one gives its slots back for the other's.

    A third finds it in the prefix cache.
    """
    alike = tokens(seed=97, length=22)
    requests = [
        RequestSpec(rid=rid, input_ids=alike + tokens(seed=98 + i, length=8 - i), max_new_tokens=9 + 3 * i)
        for i, rid in enumerate("abc")
    ]
    script = [submit("a", "b"), steps(16), submit("c"), DRAIN]
    return boot_program(
        "read-twice", requests, script, prefix="", checkpoint=CHECKPOINT, spec=CHAIN, engine=PLAIN, wants=["prefix_hit"]
    )
