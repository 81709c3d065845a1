"""The script of a scenario, and what it, requests and settings need of one another.

The checks raise ValueError. This module must not import torch, sglang or any other room.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field

from harness.contract.requests import RequestSpec, Strict
from harness.contract.settings import STEPS_ARE, EngineConfig, SpecConfig


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


TRANSFERS = ("hold", "release", "fail", "drop", "late", "land", "fake")


def check_sides(script: tuple[Op, ...], *, spec: SpecConfig, engine: EngineConfig) -> None:
    """What only a pair of engines can do, and what it cannot."""
    given = set[str]()
    for op in script:
        given |= set(op.rids) if op.kind == "submit" else set()
        if op.kind == "transfer" and op.name == "fake" and given & set(op.rids):
            raise ValueError(
                "op 'transfer' with name 'fake' comes after the submit of its request\n  allowed: before it"
            )
        if op.kind == "transfer" and op.name not in TRANSFERS:
            raise ValueError(f"op 'transfer' has name {op.name!r}\n  allowed: {', '.join(TRANSFERS)}")
        if op.kind == "transfer" and not engine.disaggregation:
            raise ValueError("op 'transfer' needs two engines\n  allowed: with engine.disaggregation true")
        if op.kind in ("submit", "abort") and op.name not in (None, *(("prefill", "decode") * engine.disaggregation)):
            raise ValueError(
                f"op {op.kind!r} has name {op.name!r}\n  allowed: prefill or decode with engine.disaggregation, or none"
            )
        if op.kind == "retract" and (op.name not in (None, "test") or (op.name and op.rids)):
            raise ValueError(
                f"op 'retract' has name {op.name!r}{' beside rids' * bool(op.rids)}\n"
                "  allowed: rids, name test, or none"
            )
    if engine.disaggregation_decode_radix_cache and not engine.disaggregation:
        raise ValueError(
            "engine.disaggregation_decode_radix_cache needs engine.disaggregation\n  allowed: both, or neither"
        )
    if engine.disaggregation_prefill and not engine.disaggregation:
        raise ValueError("engine.disaggregation_prefill needs engine.disaggregation\n  allowed: both, or neither")
    if engine.prefill_side.dp_size != engine.dp_size:
        raise ValueError(f"engine.disaggregation_prefill has another dp_size than engine\n  allowed: {engine.dp_size}")
    if engine.prefill_cuda_graph and not engine.cuda_graph:
        raise ValueError("engine.prefill_cuda_graph needs engine.cuda_graph\n  allowed: both, or neither")
    for name in ("enable_dp_lm_head", "dp_spec_prefill_coordination"):
        if getattr(engine, name) and engine.dp_size == 1:
            raise ValueError(f"engine.{name} needs engine.dp_size above 1, as SGLang does\n  allowed: both, or neither")
    if engine.lora_paths and (engine.disaggregation or engine.dp_size > 1):
        raise ValueError(
            "engine.lora_paths is driven on one engine of one DP rank\n"
            "  allowed: engine.disaggregation false and engine.dp_size 1"
        )
    if spec.adaptive is not None and (engine.disaggregation or engine.dp_size > 1):
        raise ValueError(
            "spec.adaptive is driven on one engine, and SGLang refuses it with DP attention\n"
            "  allowed: engine.disaggregation false and engine.dp_size 1"
        )
    if spec.plugin and (not engine.disaggregation or spec.algorithm != "EAGLE"):
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


def check_served(requests: tuple[RequestSpec, ...], *, engine: EngineConfig) -> None:
    """Each request's keys need the server settings that let SGLang take them."""
    if engine.grammar_backend != "none" and engine.skip_tokenizer_init:
        raise ValueError("engine.grammar_backend needs a tokenizer\n  allowed: engine.skip_tokenizer_init false")
    for request in requests:
        if request.require_reasoning and engine.reasoning_parser is None:
            raise ValueError(
                f"request {request.rid!r}: require_reasoning needs engine.reasoning_parser\n  allowed: both, or neither"
            )
        if request.lora_path is not None and request.lora_path not in engine.lora_paths:
            raise ValueError(
                f"request {request.rid!r}: lora_path {request.lora_path!r} is not in engine.lora_paths\n"
                f"  allowed: {', '.join(engine.lora_paths) or 'none'}"
            )
        for key in request.asked:
            name, value = NEEDED.get(key, ("", None))
            if name and getattr(engine, name) != value:
                raise ValueError(
                    f"request {request.rid!r}: {key} needs engine.{name} {json.dumps(value)}\n"
                    f"  allowed: set it so, or leave {key} out"
                )


#: Ops that leave an engine without requests as it is.
QUIET = ("step", "flush", "update", "memory", "mutant")


def check_samples(
    script: tuple[Op, ...], *, asked: tuple[RequestSpec, ...], sampled: tuple[RequestSpec, ...], engine: EngineConfig
) -> None:
    """What is driven with n > 1. sampled: asked, with every sample as a request of its own."""
    several = [request.rid for request in asked if request.n > 1]
    names = [request.rid for request in sampled]
    if len(set(names)) != len(names):
        raise ValueError(
            f"request {several[0]!r}: its samples are called {several[0]}.0, {several[0]}.1, …, as another is"
        )
    if several and (engine.disaggregation or engine.dp_size > 1):
        raise ValueError(f"request {several[0]!r}: n above 1 is driven on one engine of one rank\n  allowed: n 1")
    for request in asked:
        if request.n > 1 and request.expect != "answer":
            raise ValueError(f"request {request.rid!r}: expect {request.expect!r} with n above 1\n  allowed: n 1")
    alone = True
    for op in script:
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


def check_updates(script: tuple[Op, ...], *, engine: EngineConfig) -> None:
    """SGLang waits with new weights until nothing runs, and whatever steps it would wait for ever."""
    idle, released = True, False
    for op in script:
        if op.kind == "update" and (not op.name or not (idle or op.mode)):
            raise ValueError(
                "op 'update' out of place\n"
                '  allowed: with the name of a pair, first or behind a drain, or with mode "retract"'
            )
        if op.kind == "update" and engine.lora_paths:
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


def check_pauses(script: tuple[Op, ...]) -> None:
    """SGLang holds arrivals back while paused, and a paused engine never drains."""
    paused = False
    for op in script:
        if paused and op.kind in ("submit", "drain", "pause", "retract", "update"):
            raise ValueError(f"op {op.kind!r} inside a pause\n  allowed: behind an op 'resume'")
        if not paused and op.kind == "resume":
            raise ValueError("op 'resume' without a pause before it\n  allowed: behind an op 'pause'")
        if op.kind in ("pause", "resume"):
            paused = op.kind == "pause"
