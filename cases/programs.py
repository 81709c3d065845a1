"""Short scenarios made by hand: for tests, and the exercises that give a mutant something to break.

Pure data; it must not know which mutants there are, and must not import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cases.boots import BY_NAME, HEADS, MTP, OUTGROWN, SETTINGS
from cases.fixed import (
    CHAIN,
    CHECKPOINT,
    boot_program,
    default_scenarios,
    of_table,
    ops_of,
    request,
    requests_of,
    submit,
)
from cases.fixed_hicache import host_shapes
from cases.fixed_parts import joining, on_boot
from cases.fixed_weights import adapter_shapes, weight_shapes
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig, SpecConfig

#: The default scenarios by name.
DEFAULT = {scenario.name: scenario for scenario in default_scenarios()}
#: Two steps and not more: with three, SGLang's draft steps attend to their own branch instead of their parent's, which
#: is a finding of its own in every release.
TREE = SpecConfig(num_steps=2, eagle_topk=2, num_draft_tokens=5)


def program(
    name: str,
    requests: str | Sequence[RequestSpec],
    script: str | Sequence[Op],
    *,
    spec: SpecConfig = CHAIN,
    wants: str = "",
    checkpoint: str = CHECKPOINT,
    chunk: int | None = None,
    **engine: Any,
) -> Scenario:
    """`engine` are fields of EngineConfig, and cost a boot of their own."""
    boot: dict[str, Any] = {"spec": spec, "checkpoint": checkpoint, "engine": EngineConfig(**engine)}
    return boot_program(name, requests, script, prefix="", wants=wants, chunk=chunk, **boot)


#: Chunks, a shared budget and a growing batch, in as few steps as that takes.
CHUNKED_BATCH = program(
    "chunked-batch",
    "a 19@1 new=6, b 23@2 new=6, c 5@3 new=4",
    "submit a b; step 4; submit c",  # three steps of prefill, one verify, then c
    wants="non_final_chunk batch_grows",
    chunk=16,
)


#: Three requests of different lengths in one batch, which end one after another.
_TOGETHER = ("a 7@11 new=7, b 12@21 new=11, c 5@22 new=14", "submit a b c")
#: A fourth request that arrives while others run, takes over freed slots, and outlives them.
_JOINED = (
    "a 7@11 new=7, b 12@21 new=11, d 19@23 new=12, e 3@24 new=16",
    "submit a b; step 3; submit d; step 2; submit e",
)


def _together(name: str, **boot: Any) -> Scenario:
    return program(name, *_TOGETHER, wants="batch_shrinks", **boot)


def _joined(name: str, **boot: Any) -> Scenario:
    return program(name, *_JOINED, wants="batch_grows", **boot)


_CHUNK = program("chunked", "a 40@31 new=8, b 9@32 new=8", "submit a b", wants="non_final_chunk", chunk=16)

_UPDATED = program(
    "updated",
    "a 12@41 new=14, b 20@43 new=12, c 12@41 new=10",
    [
        *ops_of("submit a; drain"),
        Op(kind="update", name="eagle-next"),
        *ops_of("submit b c"),
    ],  # a and c are the same prompt
    wants="weights_updated",
)

_WEIGHTS = weight_shapes(BY_NAME["weights"])

_RETRACTION = program(
    "retracted", "a 12@33 new=14, b 6@34 new=15", "submit a b; step 4; retract", wants="retract_resume"
)

#: Of four that grow unevenly the second goes: the others stay in another order than they had, where SGLang has one.
_PART = program(
    "taken-back-in-part",
    "a 23@35 new=20, b 17@36 new=21, c 11@37 new=22, d 5@38 new=23",
    "submit a b c d; step 5; retract b",
    wants="partial_retraction",
)

_STOP = program(
    "stopped",
    "a 7@11 new=16 stop=160, b 12@21 new=12",  # 160: a's seventh token
    "submit a b",
    wants="stop_inside_accepted_run",
)

_ABORT = program("aborted", "a 7@11 new=30, b 12@21 new=12", "submit a b; step 3; abort a", wants="abort_in_decode")

#: A queue and a pool that a few requests fill.
_SMALL: dict[str, Any] = {"max_queued_requests": 3, **OUTGROWN}
_QUEUE = program(
    "queued",
    [
        *requests_of("q0 10@20 new=12, q1 10@21 new=12, q2 10@22 new=12, q3 10@23 new=12"),
        request("q4", 10, seed=24, new=12).model_copy(update={"expect": "refusal"}),
    ],
    "submit q0; step 2; submit q1 q2 q3 q4",
    wants="full_queue_refused",
    **_SMALL,
)

_POOL = program(
    "outgrown-together",
    "a 30@321 new=38 stop=511, b 27@322 new=39 stop=511, c 22@323 new=40 stop=511",
    "submit a b c",
    wants="pool_exhausted",
    **_SMALL,
)

_WINDOWS = program(
    "windows",
    "a 40@401 new=36, b 9@402 new=30",
    "submit a b",
    spec=HEADS,
    wants="window_evicted non_final_chunk",
    checkpoint="oss-tiny",
    chunk=16,
    disable_hybrid_swa_memory=False,
)


def _recurrent(name: str, checkpoint: str, *, longer: int, **engine: Any) -> Scenario:
    boot: dict[str, Any] = {"checkpoint": checkpoint, "radix_cache": False, **engine}
    requests = f"a 19@411 new=14, b 9@412 new={longer}"
    return program(name, requests, "submit a b", wants="batch_shrinks", **boot)


_SAMPLED = program(
    "sampled",
    [
        request(rid, 5 + 2 * i, seed=41 + i, new=16).model_copy(update={"temperature": 1.0 - 0.2 * i})
        for i, rid in enumerate("abc")
    ],
    "submit a b c",
)

#: Engines whose requests are texts.
TEXTS: dict[str, Any] = {"skip_tokenizer_init": False, "grammar_backend": "xgrammar"}


def _held(rid: str, length: int, seed: int, **keys: Any) -> RequestSpec:
    return RequestSpec.model_validate(request(rid, length, seed=seed, new=24).model_dump() | keys)


_GRAMMAR = program(
    "constrained",
    [_held("a", 7, 11, regex="[0-9]([a-z]|[0-9])+[;]"), _held("b", 12, 21, regex="[^0-9]{30,60}"), _held("c", 5, 22)],
    "submit a b c",
    **TEXTS,
)

_STRINGS = program(
    "strings",
    [_held("a", 7, 11, stop=("i",)), _held("b", 12, 21, stop=("tt",)), _held("c", 5, 22, stop_regex=("[0-9]{3}",))],
    "submit a b c",
    **TEXTS,
)

#: By their names.
_ASKING: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {"7": 8.0, "30": 8.0, "300": -4.0}},
    "other-bias": {"logit_bias": {"9": 4.0, "77": 4.0, "200": -4.0}},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "other-k": {"temperature": 0.6, "top_k": 12},
    "top-p": {"temperature": 1.0, "top_p": 0.2},
}

_RULES = program(
    "ruled",
    [
        request(rid, 5 + 2 * i, seed=41 + i, new=16).model_copy(update=asked)
        for i, (rid, asked) in enumerate(_ASKING.items())
    ],
    [submit(*_ASKING)],
)

_RETURNED = (
    {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0},
    {"return_logprob": True, "temperature": 0.8},
    {"return_logprob": True, "stream": True},
)

_ANSWERS = program(
    "answers",
    [request(rid, 7 + i, seed=51 + i, new=9).model_copy(update=_RETURNED[i]) for i, rid in enumerate("abc")],
    "submit a b c",
)

#: Alone, since another request beside it ends some releases (F-040).
_NAMED = program(
    "named-ids",
    [
        request("a", 8, seed=57, new=9).model_copy(
            update={"return_logprob": True, "token_ids_logprob": (3, 30, 300), "logprob_start_len": 0}
        )
    ],
    "submit a",
)

_STATES = program(
    "states",
    [
        request(rid, 7 + i, seed=54 + i, new=9).model_copy(update={"return_hidden_states": True})
        for i, rid in enumerate("ab")
    ],
    "submit a b",
    enable_return_hidden_states=True,
)

#: Rank 1 has a request, then none while rank 0 goes on.
_IDLE_BESIDE = program(
    "idle-beside",
    "a 7@11 new=20, b 12@21 new=4 rank=1",
    "submit a b",
    spec=HEADS,
    wants="idle_rank",
    checkpoint="qwen3-tiny",
    dp_size=2,
    tp_size=2,
)
_OF_ITS_OWN_LOGITS = _IDLE_BESIDE.engine.model_copy(update={"enable_dp_lm_head": True})

#: Rank 1 reads a prompt while rank 0 decodes.
_COORDINATED = program(
    "verify-beside-prefill",
    "a 7@11 new=20, b 12@21 new=8 rank=1",
    "submit a; step 3; submit b",
    spec=HEADS,
    wants="verify_beside_prefill",
    checkpoint="qwen3-tiny",
    dp_size=2,
    tp_size=2,
    dp_spec_prefill_coordination=True,
)

#: Need of a mutant -> what to drive, in this order.
EXERCISES: dict[str, tuple[Scenario, ...]] = {
    "chain": (_together("together"), _joined("joined")),
    "eagle3": (_together("together-eagle3", spec=HEADS, checkpoint="eagle3-tiny"),),
    "token-map": (_together("together-token-map", spec=BY_NAME["hot-tokens"].spec),),
    "own-head": (_together("together-own-head", spec=HEADS, checkpoint="eagle3-apart"),),
    "layers": (_together("together-layers", spec=MTP, checkpoint="mtp-tiny", radix_cache=False),),
    "chained": (_together("together-chained", spec=MTP, checkpoint="mtp-chained", radix_cache=False),),
    "chunk": (_CHUNK,),
    "mixed": (joining(BY_NAME["mixed"]),),
    "update": (_UPDATED,),
    "adapters": tuple(adapter_shapes(BY_NAME["lora"])[:1]),
    "draft-update": tuple(one for one in _WEIGHTS if one.name == "weights-tensor-draft"),
    "memory": tuple(one for one in _WEIGHTS if one.name == "weights-memory"),
    "retraction": (_RETRACTION,),
    "partial-retraction": (_PART,),
    "stop": (_STOP,),
    "abort": (_ABORT,),
    "queue": (_QUEUE,),
    "pool": (_POOL,),
    "window": (_WINDOWS,),
    "recurrent": (_recurrent("recurrent", "hybrid-tiny", longer=17),),
    "mamba": (_recurrent("recurrent-mamba", "hybrid-mamba", longer=40, **SETTINGS["nemotron"]),),
    "host": tuple(one for one in host_shapes(BY_NAME["hicache"]) if one.name == "hicache-again"),
    "storage": tuple(host_shapes(BY_NAME["hicache-storage"])[:1]),
    "pages": (_together("together-paged", page_size=16), _joined("joined-paged", page_size=16)),
    "paged-tree": (_together("together-paged-tree", spec=TREE, page_size=4),),
    "dp": (_IDLE_BESIDE,),
    "dp-layers": tuple(
        of_table("ranks", **BY_NAME["dp-layers-head"].given, prefix="layers-head-", only=("held-back",))
    ),
    "dp-lm-head": (_IDLE_BESIDE.model_copy(update={"engine": _OF_ITS_OWN_LOGITS}),),
    "coordinated": (_COORDINATED,),
    "adaptive": tuple(on_boot(BY_NAME["adaptive"], only=("four-together",))),
    "tp": (_together("together-tp", tp_size=2),),
    "handoff": (_together("together-handed-over", disaggregation=True, max_running_requests=4, max_total_tokens=160),),
    "sampled": (_SAMPLED,),
    "grammar": (_GRAMMAR,),
    "strings": (_STRINGS,),
    "rules": (_RULES,),
    "answers": (_ANSWERS, _NAMED),
    "states": (_STATES,),
    "tree": (_together("together-tree", spec=TREE), _joined("joined-tree", spec=TREE)),
}
