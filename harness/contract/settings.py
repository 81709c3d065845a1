"""What an engine is started with, called as SGLang calls its settings. This module must not import torch or sglang.

Symbols used in shapes: b live requests, k speculative steps (num_steps), t topk (eagle_topk), n draft tokens
(num_draft_tokens), e sum of extend lengths, h hidden width.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from harness.contract.requests import Strict

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
    environment variable of that name. enable_overlap_plan_stream: a verify is planned in a stream of its own, by
    another.

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
    enable_overlap_plan_stream: bool = False
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
