"""Scenarios: what an engine is started with, which requests it gets, and when.

This module must not import torch, sglang or any other room. Settings are called as SGLang calls its own.

Symbols used in shapes: b live requests, k speculative steps (num_steps), t topk (eagle_topk), n draft tokens
(num_draft_tokens), e sum of extend lengths, h hidden width.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from harness.contract import scenario_v1
from harness.contract.requests import NO_NUMBER, SEED_IS, RequestSpec, Strict

SCENARIO_SCHEMA: Literal[2] = 2

#: Why a number is not allowed to be larger: what a message about it says behind what is allowed.
LONGEST = 2**20
CONTEXT_IS = "no checkpoint has a longer context"
PAGE_IS = "SGLang's backends have no larger pages"
RUNNING_IS = "an engine keeps room for each of them"
POOL = 2**24
POOL_IS = f"{POOL} tokens are 16 of the longest contexts, and memory is taken for all of them at boot"
#: Tokens a request may grow to where nothing else is asked for; the tiny checkpoints have as many positions.
CONTEXT_LENGTH = 512
MOST_STEPS = 16
STEPS_ARE = "512 scheduler steps end any request, and each is waited for"


Algorithm = Literal["EAGLE", "EAGLE3", "MTP"]


class SpecConfig(Strict):
    """SGLang's `speculative_*` settings: steps, candidates a step, nodes of the verified tree (its root included).

    MTP: num_steps layers of a multi-layer MTP draft, each proposing one token; a chain only.

    adaptive: what SGLang reads from the file of `speculative_adaptive_config`: batch sizes, each with candidate_steps
    between which it changes while it serves, 0 for rounds that do not speculate; num_steps is what it starts with.

    token_map: target ids that an EAGLE draft may propose (FR-Spec), which SGLang reads from the file of
    `speculative_token_map`; None: all.

    plugin: EAGLE as an algorithm that a plugin of SGLang registers (see harness.both_sides.plugin_algorithm), which of
    a hand-over makes no draft input (none) or one of its own class (own); bare: with nothing but what SGLang asks of a
    plugin.
    """

    algorithm: Algorithm = "EAGLE"
    num_steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 3
    eagle_topk: Annotated[int, Field(ge=1, le=16)] = 1
    num_draft_tokens: Annotated[int, Field(ge=2, le=256)] = 4
    plugin: Literal["bare", "none", "own"] | None = None
    adaptive: dict[str, Any] | None = None
    token_map: tuple[int, ...] | None = None

    @model_validator(mode="after")
    def _tree_is_possible(self) -> SpecConfig:
        if self.eagle_topk == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise ValueError(
                f"num_draft_tokens must be num_steps + 1 = {self.num_steps + 1} where eagle_topk is 1, not "
                f"{self.num_draft_tokens}\n  allowed: that, or an eagle_topk above 1"
            )
        if self.algorithm == "MTP" and self.eagle_topk != 1:
            raise ValueError(f"eagle_topk {self.eagle_topk} of MTP, whose layers propose one chain\n  allowed: 1")
        most = 1 + self.eagle_topk + (self.num_steps - 1) * self.eagle_topk * self.eagle_topk
        if self.num_draft_tokens > most:
            raise ValueError(
                f"num_draft_tokens {self.num_draft_tokens} exceeds the {most} nodes that num_steps {self.num_steps} "
                f"and eagle_topk {self.eagle_topk} can propose\n  allowed: at most {most}"
            )
        if self.token_map is not None and (
            self.algorithm != "EAGLE" or not self.eagle_topk <= len(set(self.token_map)) == len(self.token_map)
        ):
            raise ValueError(
                "token_map does not fit\n  allowed: with algorithm EAGLE, at least eagle_topk different token ids"
            )
        if self.adaptive is not None:
            self._check_adaptive(self.adaptive)
        return self

    def _check_adaptive(self, adaptive: dict[str, Any]) -> None:
        if self.algorithm == "MTP" or self.eagle_topk != 1 or self.plugin:
            raise ValueError("adaptive needs a chain of EAGLE or EAGLE3\n  allowed: eagle_topk 1, and no plugin")
        listed = [entry.get("candidate_steps") for size, entry in adaptive.items() if size.isdigit()]
        if not listed or not all(
            isinstance(steps, list) and steps and all(type(one) is int and 0 <= one <= MOST_STEPS for one in steps)
            for steps in listed
        ):
            raise ValueError(
                "adaptive needs a batch size with candidate_steps\n  allowed: for example "
                f'{{"1": {{"candidate_steps": [0, 1, 3]}}}}, each of them 0 to {MOST_STEPS}'
            )

    @property
    def candidate_steps(self) -> tuple[int, ...]:
        """Every number of steps that a round may have."""
        sizes = (self.adaptive or {}).items()
        found = {step for size, entry in sizes if size.isdigit() for step in entry["candidate_steps"]}
        return tuple(sorted(found)) or (self.num_steps,)

    @property
    def most_steps(self) -> int:
        return max(self.num_steps, *self.candidate_steps)

    def of_round(self, num_steps: int) -> SpecConfig:
        """That of a round of so many steps, none included; -1: the same in every round."""
        if num_steps in (-1, self.num_steps):
            return self
        return self.model_copy(update={"num_steps": num_steps, "num_draft_tokens": num_steps + 1})

    @property
    def layers(self) -> int:
        """Draft forwards that catch up with a chunk or a verify, each over the same rows: one, or one a layer."""
        return self.num_steps if self.algorithm == "MTP" else 1

    @property
    def draft_steps(self) -> int:
        """Draft forwards of a round before its verify: layers propose the whole chain while they catch up."""
        return 0 if self.algorithm == "MTP" else max(0, self.num_steps - 1)


#: What SGLang calls that dtype of a cache.
BFLOAT16 = ("bf16", "bfloat16")


class EngineConfig(Strict):
    """Server settings. All are fixed at boot but chunked_prefill_size and running_limit, which a scenario may change.

    running_limit lowers max_running_requests for one scenario. priority_scheduling: requests of higher priority go
    first, and one that is higher by more than ten takes the place of a running one. tp_size: ranks that share each
    request. dp_size above 1 is DP attention: tp_size / dp_size ranks share a request, and chunked_prefill_size,
    max_running_requests and running_limit hold for each DP rank.

    overlap_schedule, cuda_graph, prefill_cuda_graph and radix_cache are SGLang's `disable_*` flags, said the other way
    round; prompts run in graphs beside decodes only.
    overlap_schedule None: what the release does by default for this speculation on this device. cuda_graph_max_bs None:
    graphs of a few small batches (see harness.engines.launch), else those SGLang captures up to that size.
    schedule_conservativeness: below 1 SGLang admits more than its pool holds at the end, and takes requests back then.
    mem_fraction_static None: half of the device, of which max_total_tokens takes what it needs.

    enable_dp_lm_head: each DP rank computes the logits of its own requests alone. dp_spec_prefill_coordination: a DP
    rank verifies beside another's prefill instead of waiting, by SGLang's environment variable of that name.

    enable_mixed_chunk: requests that run join a batch of prompt chunks, with a plain decode of one token each.

    disaggregation: prompts run on one engine and decoding on another, each with these settings (running_limit and
    dp_size: the decode side's, whose prefill side then has one rank). disaggregation_decode_radix_cache: the decode
    side keeps a prefix cache; releases before 0.5.23 refuse that beside speculation. disaggregation_prefill: what of
    max_total_tokens and radix_cache the prefill side has otherwise, and dp_size, if it is to have those ranks too.

    deterministic_inference: a request's seed decides what it samples, whoever shares its batch. rejection_sampling:
    drafts are drawn from the draft's distribution and verified against it, instead of the draft's best.

    disable_hybrid_swa_memory: models with sliding windows keep all their KV in one pool; false: layers with a window
    have a pool of their own, whose slots are given back once no window reaches them.

    enable_unified_radix_tree: the prefix cache is the unified tree also where a release has others, by SGLang's
    environment variable of that name.

    server_args: further arguments of SGLang's own, which go to it as they are (see harness.engines.server_args).

    lora_paths: LoRA adapters that requests may name; on the tiny pairs those of cases.adapters, by their names.

    skip_tokenizer_init false: the engine has the checkpoint's tokenizer, which stop strings and grammars need.
    """

    dp_size: Annotated[int, Field(ge=1, le=8)] = 1
    tp_size: Annotated[int, Field(ge=1, le=8)] = 1
    page_size: Annotated[int, Field(ge=1, le=512, description=PAGE_IS)] = 1
    overlap_schedule: bool | None = None
    cuda_graph: bool = False
    prefill_cuda_graph: bool = False
    attention_backend: str = "triton"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    radix_cache: bool = True
    context_length: Annotated[int, Field(ge=16, le=LONGEST, description=CONTEXT_IS)] = CONTEXT_LENGTH
    max_running_requests: Annotated[int, Field(ge=1, le=4096, description=RUNNING_IS)] = 8
    priority_scheduling: bool = False
    max_total_tokens: Annotated[int, Field(ge=16, le=POOL, description=POOL_IS)] = 4096
    schedule_conservativeness: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    trust_remote_code: bool = False
    mem_fraction_static: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    cuda_graph_max_bs: Annotated[int, Field(ge=1, le=4096)] | None = Field(default=None, description=RUNNING_IS)
    chunked_prefill_size: Annotated[int, Field(ge=1, le=LONGEST)] | None = Field(default=None, description=CONTEXT_IS)
    running_limit: Annotated[int, Field(ge=1, le=4096)] | None = Field(default=None, description=RUNNING_IS)
    enable_dp_lm_head: bool = False
    dp_spec_prefill_coordination: bool = False
    enable_mixed_chunk: bool = False
    disaggregation: bool = False
    disaggregation_decode_radix_cache: bool = False
    disaggregation_prefill: dict[Literal["max_total_tokens", "radix_cache", "dp_size"], int | bool] = Field(default={})
    disable_hybrid_swa_memory: bool = True
    enable_unified_radix_tree: bool = False
    deterministic_inference: bool = False
    rejection_sampling: bool = False
    skip_tokenizer_init: bool = True
    grammar_backend: Literal["none", "xgrammar"] = "none"
    reasoning_parser: str | None = None
    enable_custom_logit_processor: bool = False
    enable_return_hidden_states: bool = False
    max_queued_requests: Annotated[int, Field(ge=1, le=4096)] | None = None
    lora_paths: tuple[str, ...] = ()
    server_args: dict[str, Any] = Field(default={})

    @property
    def attention_tp_size(self) -> int:
        """TP ranks of each DP rank, which share its requests: 1 where every rank has its own."""
        return self.tp_size // self.dp_size

    @property
    def draft_rounding(self) -> str:
        """The budget whose rounding the draft's rows have: that of the KV cache, where it is the coarser."""
        if self.server_args.get("speculative_draft_kv_cache_dtype") not in BFLOAT16:
            return self.dtype
        return "bfloat16 cache" if self.dtype == "float32" else "bfloat16"

    @property
    def prefill_side(self) -> EngineConfig:
        """What the prefill side of a pair has."""
        return self.model_copy(update={str(name): value for name, value in self.disaggregation_prefill.items()})

    def boot(self) -> dict[str, Any]:
        """The part that needs a reboot to change, as JSON-ready data."""
        return self.model_dump(exclude={"chunked_prefill_size", "running_limit"})


class Op(Strict):
    """One instruction of a scenario script.

    submit   rids arrive at the next scheduler step, in this order
    step     `count` steps of the scheduler loop
    abort    rids are aborted at the next step
    retract  every running request goes back to the waiting queue at the next step, and generation goes on. With rids:
             these alone, at the next batch that would decode, as SGLang does when its pool runs out: in its own order
             and never the last one (a release that only takes from the end of a batch takes those behind them too).
             With name "test": those that SGLang's own switch for testing takes
    pause    the loop runs on without batches from the next step; submit nothing before resume
    resume   the end of a pause
    flush    the prefix cache is emptied now; does nothing while requests are alive
    update   SGLang is given weights of the pair `name` while it serves: of its `selector` target, draft or all; from
             `source` disk (one folder, which every model reads) or tensor (an update session). Behind a drain; with
             mode "retract" every running request goes back first, and generation goes on then
    memory   SGLang's release_memory_occupation or resume_memory_occupation, by `name` release or resume; behind a
             drain, and nothing arrives in between
    transfer hand-overs of rids between prefill and decode side, as `name` says from now on: hold (nothing arrives),
             release (what is held arrives, in the order of these ops), fail (both sides are told so), drop (the prefill
             side is done, and nothing arrives), late (as hold, and nobody can take back what was sent), land (what was
             sent of a late one is written where the decode side asked for it, whatever became of its request), fake
             (said before the submit: SGLang's own backend of that name, which moves nothing)
    mutant   arm the mutant `name` (see harness.both_sides.mutants), from the `count`-th batch of the scenario on
    drain    steps until nothing is left; how many at most follows from the tokens asked for

    Where prefill and decode are two engines, `name` "prefill" or "decode" lets only that side know of an abort or a
    submit; each side must be given every request once.
    """

    kind: Literal[
        "submit",
        "step",
        "abort",
        "retract",
        "pause",
        "resume",
        "flush",
        "update",
        "memory",
        "transfer",
        "mutant",
        "drain",
    ]
    rids: tuple[str, ...] = ()
    count: Annotated[int, Field(ge=1, le=10_000, description=STEPS_ARE)] = 1
    name: str | None = None
    source: Literal["disk", "tensor"] = "disk"
    selector: Literal["target", "draft", "all"] = "target"
    mode: Literal["retract"] | None = None

    @property
    def everybody(self) -> bool:
        """Of a retraction: whether it is one of every running request."""
        return not (self.rids or self.name)


class Scenario(Strict):
    """A batch program: pure data, the same scenario gives the same batches.

    `id` is derived from the content (see `Scenario.id`), so it is stable across machines and years.
    """

    schema_version: Literal[2] = SCENARIO_SCHEMA
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,60}$")]
    seed: Annotated[int, Field(ge=0, le=2**63 - 1, description=SEED_IS)] = 0
    checkpoint: str = "eagle-tiny"
    spec: SpecConfig = SpecConfig()
    engine: EngineConfig = EngineConfig()
    requests: Annotated[tuple[RequestSpec, ...], Field(min_length=1)]
    script: Annotated[tuple[Op, ...], Field(min_length=1)]
    wants: tuple[str, ...] = ()

    @field_validator("requests")
    @classmethod
    def _numbers(cls, requests: tuple[RequestSpec, ...], info: ValidationInfo) -> tuple[RequestSpec, ...]:
        engine = info.data.get("engine")
        return requests if engine is None else numbered(requests, engine)

    @model_validator(mode="after")
    def _names_resolve(self) -> Scenario:
        rids = [request.rid for request in self.requests]
        if len(set(rids)) != len(rids):
            twice = sorted({rid for rid in rids if rids.count(rid) > 1})
            raise ValueError(f"rid {', '.join(twice)}: used twice\n  allowed: a name of its own for each request")
        for op in self.script:
            unknown = sorted(set(op.rids) - set(rids))
            if unknown:
                raise ValueError(f"op {op.kind!r} names unknown rid {unknown[0]!r}\n  allowed: {', '.join(rids)}")
        for side in ("prefill", "decode") if self.engine.disaggregation else ("",):
            given = [op for op in self.script if op.kind == "submit" and (op.name or side) == side]
            sent = [rid for op in given for rid in op.rids]
            if wrong := [f"{rid} is submitted {sent.count(rid)} times" for rid in rids if sent.count(rid) != 1]:
                where = f" to the {side} side" if side else ""
                raise ValueError(f"{', '.join(wrong)}\n  allowed: exactly once{where}, by an op 'submit' with its rid")
        _check_sides(self)
        _check_served(self)
        _check_samples(self)
        _check_updates(self)
        if self.script[-1].kind != "drain":
            raise ValueError('the script must end with a drain op\n  allowed: {"kind": "drain"} at its end')
        ranked = [request.rid for request in self.requests if request.priority is not None]
        if ranked and not self.engine.priority_scheduling:
            raise ValueError(
                f"request {ranked[0]!r} has a priority\n  allowed: none, or engine.priority_scheduling true"
            )
        limit = self.engine.running_limit
        if limit is not None and limit > self.engine.max_running_requests:
            raise ValueError(
                f"running_limit {limit} is above max_running_requests {self.engine.max_running_requests}\n"
                "  allowed: 1 to that"
            )
        _check_pauses(self.script)
        if self.engine.rejection_sampling and self.spec.eagle_topk > 1:
            raise ValueError("engine.rejection_sampling draws chains\n  allowed: with spec.eagle_topk 1")
        return self

    @property
    def id(self) -> str:
        """Content hash (12 hex digits of SHA-256 over canonical JSON), independent of field order.

        Defaults are left out, so that a field added later changes no id; names are those of schema version 1, so that
        the second one changed none either.
        """
        content = scenario_v1.downgrade(self.model_dump(mode="json", exclude_defaults=True))
        for request, one in zip(self.requests, content["requests"], strict=True):
            if request.unlimited:  # as it was written before null was
                one |= {"max_new_tokens": request.max_new_tokens, "unlimited": True}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def boot_key(self) -> str:
        """Scenarios with one boot key can share one engine process."""
        parts = {"checkpoint": self.checkpoint, "spec": self.spec.model_dump(), "engine": self.engine.boot()}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def updates(self) -> int:
        """How often its engine is given other weights."""
        return sum(op.kind == "update" for op in self.script)

    def request(self, rid: str) -> RequestSpec:
        """The request called `rid`, or the one of a request's samples; KeyError if there is none."""
        for request in (*self.requests, *self.sampled.requests):
            if request.rid == rid:
                return request
        raise KeyError(rid)

    @property
    def sampled(self) -> Scenario:
        """With the requests that SGLang runs: those with n > 1 are several. Its id is another then."""
        runs = {request.rid: request.runs for request in self.requests}
        if all(len(one) == 1 for one in runs.values()):
            return self
        ops = (
            op.model_copy(update={"rids": tuple(one.rid for rid in op.rids for one in runs[rid])}) for op in self.script
        )
        return self.model_copy(
            update={"requests": tuple(one for run in runs.values() for one in run), "script": tuple(ops)}
        )


def room(prompt: int, engine: EngineConfig) -> int:
    """New tokens that SGLang lets a request write that asks for no number: all but two of the context, or the pool."""
    return min(engine.context_length, engine.max_total_tokens) - 2 - prompt


def numbered(requests: tuple[RequestSpec, ...], engine: EngineConfig) -> tuple[RequestSpec, ...]:
    """Those that ask for no number of new tokens with the one that SGLang comes to; 0 where the prompt leaves none."""
    return tuple(
        one.model_copy(update={"max_new_tokens": max(0, room(len(one.input_ids), engine)), "unlimited": True})
        if one.unlimited or one.max_new_tokens == NO_NUMBER
        else one
        for one in requests
    )


TRANSFERS = ("hold", "release", "fail", "drop", "late", "land", "fake")


def _check_sides(scenario: Scenario) -> None:
    """What only a pair of engines can do, and what it cannot."""
    given = set[str]()
    for op in scenario.script:
        given |= set(op.rids) if op.kind == "submit" else set()
        if op.kind == "transfer" and op.name == "fake" and given & set(op.rids):
            raise ValueError(
                "op 'transfer' with name 'fake' comes after the submit of its request\n  allowed: before it"
            )
        if op.kind == "transfer" and op.name not in TRANSFERS:
            raise ValueError(f"op 'transfer' has name {op.name!r}\n  allowed: {', '.join(TRANSFERS)}")
        if op.kind == "transfer" and not scenario.engine.disaggregation:
            raise ValueError("op 'transfer' needs two engines\n  allowed: with engine.disaggregation true")
        if op.kind in ("submit", "abort") and op.name not in (
            None,
            *(("prefill", "decode") * scenario.engine.disaggregation),
        ):
            raise ValueError(
                f"op {op.kind!r} has name {op.name!r}\n  allowed: prefill or decode with engine.disaggregation, or none"
            )
        if op.kind == "retract" and (op.name not in (None, "test") or (op.name and op.rids)):
            raise ValueError(
                f"op 'retract' has name {op.name!r}{' beside rids' * bool(op.rids)}\n"
                "  allowed: rids, name test, or none"
            )
    if scenario.engine.disaggregation_decode_radix_cache and not scenario.engine.disaggregation:
        raise ValueError(
            "engine.disaggregation_decode_radix_cache needs engine.disaggregation\n  allowed: both, or neither"
        )
    if scenario.engine.disaggregation_prefill and not scenario.engine.disaggregation:
        raise ValueError("engine.disaggregation_prefill needs engine.disaggregation\n  allowed: both, or neither")
    if scenario.engine.prefill_side.dp_size != scenario.engine.dp_size:
        raise ValueError(
            f"engine.disaggregation_prefill has another dp_size than engine\n  allowed: {scenario.engine.dp_size}"
        )
    if scenario.engine.prefill_cuda_graph and not scenario.engine.cuda_graph:
        raise ValueError("engine.prefill_cuda_graph needs engine.cuda_graph\n  allowed: both, or neither")
    for name in ("enable_dp_lm_head", "dp_spec_prefill_coordination"):
        if getattr(scenario.engine, name) and scenario.engine.dp_size == 1:
            raise ValueError(f"engine.{name} needs engine.dp_size above 1, as SGLang does\n  allowed: both, or neither")
    if scenario.engine.lora_paths and (scenario.engine.disaggregation or scenario.engine.dp_size > 1):
        raise ValueError(
            "engine.lora_paths is driven on one engine of one DP rank\n"
            "  allowed: engine.disaggregation false and engine.dp_size 1"
        )
    if scenario.spec.adaptive is not None and (scenario.engine.disaggregation or scenario.engine.dp_size > 1):
        raise ValueError(
            "spec.adaptive is driven on one engine, and SGLang refuses it with DP attention\n"
            "  allowed: engine.disaggregation false and engine.dp_size 1"
        )
    if scenario.spec.plugin and (not scenario.engine.disaggregation or scenario.spec.algorithm != "EAGLE"):
        raise ValueError(
            "spec.plugin needs engine.disaggregation and algorithm EAGLE\n  allowed: both, or no spec.plugin"
        )


#: What a request asks for -> the server setting it needs, and to what.
NEEDED = {
    **dict.fromkeys(("stop", "stop_regex", "min_new_tokens"), ("skip_tokenizer_init", False)),
    **dict.fromkeys(("json_schema", "regex", "ebnf"), ("grammar_backend", "xgrammar")),
    "custom_logit_processor": ("enable_custom_logit_processor", True),
    "return_hidden_states": ("enable_return_hidden_states", True),
}


def _check_served(scenario: Scenario) -> None:
    """Each request's keys need the server settings that let SGLang take them."""
    if scenario.engine.grammar_backend != "none" and scenario.engine.skip_tokenizer_init:
        raise ValueError("engine.grammar_backend needs a tokenizer\n  allowed: engine.skip_tokenizer_init false")
    for request in scenario.requests:
        if request.require_reasoning and scenario.engine.reasoning_parser is None:
            raise ValueError(
                f"request {request.rid!r}: require_reasoning needs engine.reasoning_parser\n  allowed: both, or neither"
            )
        if request.lora_path is not None and request.lora_path not in scenario.engine.lora_paths:
            raise ValueError(
                f"request {request.rid!r}: lora_path {request.lora_path!r} is not in engine.lora_paths\n"
                f"  allowed: {', '.join(scenario.engine.lora_paths) or 'none'}"
            )
        for key in request.asked:
            name, value = NEEDED.get(key, ("", None))
            if name and getattr(scenario.engine, name) != value:
                raise ValueError(
                    f"request {request.rid!r}: {key} needs engine.{name} {json.dumps(value)}\n"
                    f"  allowed: set it so, or leave {key} out"
                )


#: Ops that leave an engine without requests as it is.
QUIET = ("step", "flush", "update", "memory", "mutant")


def _check_samples(scenario: Scenario) -> None:
    """What is driven with n > 1."""
    several = [request.rid for request in scenario.requests if request.n > 1]
    names = [request.rid for request in scenario.sampled.requests]
    if len(set(names)) != len(names):
        raise ValueError(
            f"request {several[0]!r}: its samples are called {several[0]}.0, {several[0]}.1, …, as another is"
        )
    if several and (scenario.engine.disaggregation or scenario.engine.dp_size > 1):
        raise ValueError(f"request {several[0]!r}: n above 1 is driven on one engine of one rank\n  allowed: n 1")
    for request in scenario.requests:
        if request.n > 1 and request.expect != "answer":
            raise ValueError(f"request {request.rid!r}: expect {request.expect!r} with n above 1\n  allowed: n 1")
    alone = True
    for op in scenario.script:
        if named := [rid for rid in op.rids if op.kind != "submit" and rid in several]:
            raise ValueError(
                f"op {op.kind!r} names request {named[0]!r}, whose samples SGLang knows by names of its own\n"
                "  allowed: requests with n 1, or an op 'retract' without rids"
            )
        beside = [rid for rid in op.rids if op.kind == "submit" and rid in several]
        if beside and not (alone and len(op.rids) == 1):
            raise ValueError(
                f"request {beside[0]!r}: n above 1 is submitted where nothing else is alive\n"
                f"  allowed: an op 'submit' with {beside[0]!r} alone, first or behind a drain"
            )
        alone = op.kind == "drain" or (alone and op.kind in QUIET)


def _check_updates(scenario: Scenario) -> None:
    """SGLang waits with new weights until nothing runs, and whatever steps it would wait for ever."""
    idle, released = True, False
    for op in scenario.script:
        if op.kind == "update" and (not op.name or not (idle or op.mode)):
            raise ValueError(
                "op 'update' out of place\n"
                '  allowed: with the name of a pair, first or behind a drain, or with mode "retract"'
            )
        if op.kind == "update" and scenario.engine.lora_paths:
            raise ValueError("op 'update' is not driven with engine.lora_paths\n  allowed: one of them")
        if op.kind == "update" and op.source == "disk" and op.selector == "draft":
            raise ValueError(
                "op 'update' from disk: SGLang gives one folder to all\n  allowed: source tensor, or selector all"
            )
        if op.kind == "memory":
            if op.name != ("resume" if released else "release") or not idle:
                raise ValueError(
                    "op 'memory' out of place\n"
                    "  allowed: name release behind a drain, then name resume before anything arrives"
                )
            released = not released
        if released and op.kind in ("submit", "update", "drain"):
            raise ValueError(
                f"op {op.kind!r} while memory is released\n  allowed: behind an op 'memory' with name resume"
            )
        idle = op.kind == "drain" or (idle and op.kind in QUIET)


def _check_pauses(script: tuple[Op, ...]) -> None:
    """SGLang holds arrivals back while paused, and a paused engine never drains."""
    paused = False
    for op in script:
        if paused and op.kind in ("submit", "drain", "pause", "retract", "update"):
            raise ValueError(f"op {op.kind!r} inside a pause\n  allowed: behind an op 'resume'")
        if not paused and op.kind == "resume":
            raise ValueError("op 'resume' without a pause before it\n  allowed: behind an op 'pause'")
        if op.kind in ("pause", "resume"):
            paused = op.kind == "pause"
