"""Fixed scenarios: read from the tables of `fixed.toml`, or spelled as they are there, on any boot configuration.

The small set behind `eaglecheck run` is its table `shapes`. It must not import torch or sglang.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig, SpecConfig

CHECKPOINT = "eagle-tiny"
#: Pairs of 520 tokens; the others that `never` is asked about have 512, or are trained on bytes.
OF_520 = ("eagle3-apart", "qwen3-apart")
VOCAB = 500  # prompts stay below the special ids of the tiny vocabularies
TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SNIPPETS: dict[str, str] = TABLES["snippets"]


def tokens(*, seed: int, length: int) -> tuple[int, ...]:
    """`length` random prompt token ids, the same for the same seed on every machine."""
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCAB) for _ in range(length))


def request(rid: str, length: int, *, seed: int, new: int | None = None) -> RequestSpec:
    """A greedy request with a random prompt."""
    return RequestSpec(
        rid=rid, input_ids=tokens(seed=seed, length=length), max_new_tokens=_unasked(seed) if new is None else new
    )


def _unasked(seed: int) -> int:
    """Of a request without a limit: one of 18 to 24 that nearby seeds do not share."""
    return 24 - seed % 7


def window(*, seed: int, length: int) -> tuple[int, ...]:
    """`length` bytes of the snippets, read round and round from a random place; the first tells nearby seeds apart."""
    text = "\n\n".join(SNIPPETS.values()).encode()
    start = random.Random(seed).randrange(len(text))
    first = ord("!") + seed % 90
    return (first, *(text[(start + at) % len(text)] for at in range(1, length)))[:length]


def never(checkpoint: str) -> int:
    """An id that this pair never chooses: its logit is 0, or, of a trained pair, it is a byte that no text has.

    SGLang keeps room for all that a request may generate, unless it has a stop id, and then its pool never runs out:
    without a prefix cache, and 0.5.23 with one too.
    """
    if checkpoint.startswith("trained-"):
        return 0
    return 519 if checkpoint in OF_520 else 511


def submit(*rids: str) -> Op:
    return Op(kind="submit", rids=rids)


def steps(count: int = 1) -> Op:
    return Op(kind="step", count=count)


DRAIN = Op(kind="drain")
#: The default boot configuration: a chain of three steps.
CHAIN, PLAIN = SpecConfig(num_steps=3, eagle_topk=1, num_draft_tokens=4), EngineConfig()


def requests_of(text: str) -> list[RequestSpec]:
    """Greedy requests as `fixed.toml` spells them."""
    found = []
    for rid, prompt, *more in map(str.split, text.split(",")):
        keys = {name: int(value) for name, value in (one.split("=") for one in more)}
        found.append(_request_of(rid, prompt, **keys))
    return found


def _request_of(rid: str, prompt: str, *, new: int = 0, stop: int | None = None, rank: int = 0) -> RequestSpec:
    return RequestSpec(
        rid=rid,
        input_ids=tuple(token for part in prompt.split("+") for token in _part_of(part)),
        max_new_tokens=new or _unasked(int(prompt.partition("+")[0].partition("@")[2])),
        stop_token_ids=() if stop is None else (stop,),
        dp_rank=rank,
    )


def _part_of(prompt: str) -> Sequence[int]:
    """LENGTH@SEED: tokens that are drawn. NAME, NAME:LENGTH: a snippet, or how it begins."""
    name, _, length = prompt.partition(":")
    if name in SNIPPETS:
        return SNIPPETS[name].encode()[: int(length) if length else None]
    size, _, seed = prompt.partition("@")
    return tokens(seed=int(seed), length=int(size))


def ops_of(text: str) -> list[Op]:
    """Ops as `fixed.toml` spells them."""
    return [_op_of(*one.split()) for one in text.split(";")]


def _op_of(kind: str, *rids: str) -> Op:
    if kind == "step":
        return steps(*map(int, rids))
    if kind in ("hold", "release", "fail", "drop"):
        return Op(kind="transfer", name=kind, rids=rids)
    if kind == "update":
        return Op(kind="update", name=rids[0])
    return Op.model_validate({"kind": kind, "rids": rids})


def boot_program(
    name: str,
    requests: str | Sequence[RequestSpec],
    script: str | Sequence[Op],
    *,
    prefix: str,
    checkpoint: str,
    spec: SpecConfig,
    engine: EngineConfig,
    wants: str | Sequence[str] = "",
    chunk: int | None = None,
) -> Scenario:
    """A scenario on a boot configuration, but for its prefill chunk; named with a prefix.

    requests, script: spelled as in `fixed.toml`, or made; a script ends with a drain. wants: coverage points.
    """
    ops = ops_of(script) if isinstance(script, str) else list(script)
    return Scenario(
        name=prefix + name,
        checkpoint=checkpoint,
        spec=spec,
        engine=engine.model_copy(update={"chunked_prefill_size": chunk}),
        requests=tuple(requests_of(requests) if isinstance(requests, str) else requests),
        script=tuple(ops if ops[-1] == DRAIN else [*ops, DRAIN]),
        wants=tuple(wants.split() if isinstance(wants, str) else wants),
    )


def of_table(
    *tables: str,
    checkpoint: str = CHECKPOINT,
    spec: SpecConfig = CHAIN,
    engine: EngineConfig = PLAIN,
    prefix: str = "",
    only: Sequence[str] = (),
    chunk: int = 0,
) -> list[Scenario]:
    """The scenarios of tables of `fixed.toml` on one boot configuration; `only` some of them, in that order.

    prefix: how their names begin. chunk: instead of the chunks that are asked for there.
    """
    rows: dict[str, dict[str, Any]] = {name: row for table in tables for name, row in TABLES[table].items()}
    program = partial(boot_program, prefix=prefix, checkpoint=checkpoint, spec=spec, engine=engine)
    chunks = {name: {"chunk": chunk} if chunk and "chunk" in row else {} for name, row in rows.items()}
    return [program(name, **rows[name] | chunks[name]) for name in only or rows]


#: Every common batch shape once. Their coverage points hold for chunks of 32 tokens and pages that divide them.
shapes = partial(of_table, "shapes")


def default_scenarios() -> list[Scenario]:
    """What `eaglecheck run` drives: ten programs, a few seconds each on a CPU."""
    return shapes()
