"""Where in SGLang: the call that made the value first seen wrong, the call that read it, and the flags of the server.

By the hook table of the release and, where that release is installed, its source. It must not judge, and must not
import sglang: sources are read, never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from harness.both_sides import compat
from harness.contract.scenario import Scenario
from harness.contract.types import Divergence, Kind, Phase
from harness.driving.around import CHOICE, HEAD, Around
from harness.engines import envs
from harness.engines.launch import build_launch

RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner.forward"
BATCH = "sglang.srt.managers.schedule_batch"
_ATTENTION = "sglang.srt.layers.attention"
#: Backend -> its module, the class that plans the draft's steps, and the one that runs.
BACKENDS = {
    "triton": ("triton_backend", "TritonMultiStepDraftBackend", "TritonAttnBackend"),
    "flashinfer": ("flashinfer_backend", "FlashInferMultiStepDraftBackend", "FlashInferAttnBackend"),
    "fa3": ("flashattention_backend", "FlashAttentionMultiStepBackend", "FlashAttentionBackend"),
}
#: Checks of which slots attention reads, as the backend plans it.
PLANNED = ("reads", "beams")
#: How hints begin of what a model computed, and of a wrong map of KV slots.
OUT, MAP = "hidden_out-", "prefix-"
#: Calls that have moved between releases, the newest name first.
DRAFT_INDICES = tuple(
    f"sglang.{module}:generate_draft_decode_kv_indices"
    for module in ("kernels.ops.speculative.cache_locs", "srt.speculative.triton_ops.cache_locs",
                   "srt.speculative.spec_utils")
)  # fmt: skip
KV_MAP = tuple(
    f"sglang.srt.{module}:assign_req_to_token_pool"
    for module in ("mem_cache.allocation", "speculative.triton_ops.cache_locs", "speculative.spec_utils")
)
#: Of checks of what the user gets: the part, and who makes it.
_PROCESSOR = ("scheduler_components.batch_result_processor", "scheduler_output_processor_mixin")
RESULT = tuple(f"sglang.srt.managers.{module}:*.process_batch_result_" for module in _PROCESSOR)
ANSWERS = {
    "finish": ("end of a request", (f"{BATCH}:Req.update_finish_state", f"{BATCH}:Req.check_finished")),
    "retraction": ("retraction", (f"{BATCH}:ScheduleBatch.retract_decode",)),
    "aborts": ("abort of a request", ("sglang.srt.managers.scheduler:Scheduler.abort_request",)),
}
RETURNED = ("returned_states", "logprobs", "streamed", "counts")
STATES_KEPT = f"{_ATTENTION}.hybrid_linear_attn_backend:HybridLinearAttnBackend.update_mamba_state_after_mtp_verify"
STATES_READ = f"{_ATTENTION}.linear.gdn_backend:GDNAttnBackend.forward_extend"
TREE = ("sglang.srt.speculative.eagle_utils:build_tree_kernel_efficient",)
LOGITS = "sglang.srt.layers.logits_processor:LogitsProcessor.forward"
#: What makes a cached prefix one of a draft, whose rows know the next token; then what looks it up.
PREFIX = tuple(
    f"sglang.srt.mem_cache.radix_cache:{name}" for name in ("RadixKey.maybe_to_bigram_view", "RadixCache.match_prefix")
)
BACKUP = (f"{BATCH}:Req.offload_kv_cache",)
HANDED = ("sglang.srt.disaggregation.prefill:PrefillBootstrapQueue._init_kv_manager",)
SENT = ("sglang.srt.disaggregation.utils:MetadataBuffers.set_buf",)
COMMITTED = ("sglang.srt.disaggregation.decode:DecodeTransferQueue._commit_transfer_to_req",)
DRAFT_INPUT = (
    "sglang.srt.speculative.eagle_disaggregation:build_eagle_disagg_draft_input",
    "sglang.srt.disaggregation.decode_schedule_batch_mixin:ScheduleBatchDisaggregationDecodeMixin.process_prebuilt",
)
SIDES = ("prefill", "decode")
ASSIGNMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign)
#: Lines that are named of a function.
MOST_LINES = 4
UNKNOWN = Around()
#: Arguments that say where and not how.
NOT_FLAGS = ("model_path", "speculative_draft_model_path", "random_seed", "log_level", "mem_fraction_static")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """component: the part of SGLang where what goes in is right and what comes out is not. made, read: calls, as
    module:function, the likeliest name first; writes: what the maker writes there, as SGLang's variables are named.
    """

    component: str
    made: Sequence[str]
    read: Sequence[str] = ()
    writes: tuple[str, ...] = ()

    def fed(self, writes: tuple[str, ...]) -> Place:
        """Read by a model's forward where nothing else reads it."""
        return replace(self, read=self.read or [RUNNER], writes=writes)


def where(found: Divergence, scenario: Scenario, release: str, around: Around = UNKNOWN) -> tuple[str, str, str]:
    """(Component, who made the value, who read it), the latter two by file, line and function of the release.

    Empty for what says itself where it is, or belongs to no row; or of a release that has no hook table.
    """
    if found.kind in (Kind.CRASH, Kind.HANG, Kind.LEAK, Kind.LOCKSTEP) or not found.key.rid or found.check == "cached":
        return "", "", ""  # who wrote over a cached row, nobody saw
    place = _known_place(found, scenario, release, around)
    made, read = _first(place.made, release, place.writes), _first(place.read, release)
    return (place.component, made, read if read != made else "") if made else ("", "", "")


def where_lines(found: Divergence, scenario: Scenario, release: str, around: Around = UNKNOWN) -> list[str]:
    """The same in one line, and what is known of the row in another; none where nothing is known."""
    component, made, read = where(found, scenario, release, around)
    lines = [f"in SGLang: {component}: made by {made}" + (f"; read by {read}" if read else "")] if made else []
    return lines + ([f"what is known: {'; '.join(around.facts)}"] if around.facts else [])


def files(found: Divergence, scenario: Scenario, release: str, around: Around = UNKNOWN) -> tuple[str, ...]:
    """The files of the calls that made and read the value, as sglang/srt/…; none where no call is known."""
    place = _known_place(found, scenario, release, around)
    return tuple(dict.fromkeys(f"sglang/{_file(call.partition(':')[0])}" for call in (*place.made, *place.read)))


def _known_place(found: Divergence, scenario: Scenario, release: str, around: Around) -> Place:
    try:
        return _place(found, scenario, release, around)
    except (LookupError, ValueError):
        return Place(component="", made=())


def server_flags(scenario: Scenario, release: str, device: str) -> str:
    """The server flags of the engine that ran a scenario, of either side where there are two; empty if not known."""
    env = envs.EngineEnv(version=release, python=Path("python"), pythonpath=(), torch="", ready=True)
    try:
        launch = build_launch(
            env=env, spec=scenario.spec, engine=scenario.engine, target=Path("t"), draft=Path("d"), device=device
        )
    except (LookupError, ValueError):
        return ""
    said = [" ".join(flags(as_served(one.boot["arguments"], scenario))) for one in (launch, launch.beside) if one]
    return (
        said[0] if len(said) == 1 else "; ".join(f"{side} side {each}" for side, each in zip(SIDES, said, strict=True))
    )


def as_served(arguments: Mapping[str, Any], scenario: Scenario) -> dict[str, Any]:
    """The arguments of a server that is what the gate makes of the engine for one scenario."""
    engine = scenario.engine
    own: dict[str, Any] = {"chunked_prefill_size": engine.chunked_prefill_size or -1}
    if engine.running_limit is not None:
        own["max_running_requests"] = engine.running_limit
    return {**arguments, **own}


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """As they are typed for `sglang.launch_server`, those that are set."""
    named = {key: value for key, value in arguments.items() if key not in NOT_FLAGS}
    return [
        f"--{key.replace('_', '-')}{'' if value is True else f' {value}'}"
        for key, value in named.items()
        if value not in (None, False, "")
    ]


def _place(found: Divergence, scenario: Scenario, release: str, around: Around) -> Place:
    spec, engine = scenario.spec, scenario.engine
    overlap = engine.overlap_schedule
    if overlap is None:
        overlap = compat.default_overlap(release, topk=spec.eagle_topk, device="cpu")
    row = compat.lookup(release, overlap=overlap)
    row = compat.multi_layer(row) if spec.algorithm == "MTP" else row
    if found.check in ANSWERS:
        component, made = ANSWERS[found.check]
        return Place(component=component, made=made)
    if found.check in RETURNED:
        sort = "prefill" if found.key.phase == Phase.PREFILL else "decode"
        return Place(component="what is returned", made=[f"{call}{sort}" for call in RESULT])
    if found.key.phase == Phase.PREBUILT:
        return _seam(found, row, around)
    if found.check in PLANNED:
        return _plan(found, engine.attention_backend)
    if found.kind is Kind.NUMERIC and found.hint.startswith(OUT):
        return _model(found, row, engine.attention_backend, around)
    if found.kind in (Kind.NUMERIC, Kind.TOKEN) and found.hint.startswith((*HEAD, CHOICE)):
        return _head(found, row, engine.attention_backend, around)
    return _seam(found, row, around)


def _plan(found: Divergence, backend: str) -> Place:
    """Which KV slots attention reads: the requests' map of them, or what a backend makes of it."""
    module, plan, attention = BACKENDS.get(backend, ("", "", ""))
    run, draft = f"{_ATTENTION}.{module}:{attention}", found.key.phase == Phase.DRAFT
    read = [f"{run}.{'forward_decode' if draft else 'forward_extend'}"]
    if found.hint.startswith(MAP):
        return Place(component="request's row of the KV map (req_to_token)", made=KV_MAP, read=read)
    planned = [f"{_ATTENTION}.{module}:{plan}.init_forward_metadata"] if draft else [f"{run}.init_forward_metadata"]
    own = [*DRAFT_INDICES, *planned] if found.check == "beams" else planned
    return Place(component="attention's plan", made=own, read=read)


def _model(found: Divergence, row: compat.Release, backend: str, around: Around) -> Place:
    """A state that is wrong where what goes into its row is not: what the row attends, or else the model."""
    key, side = found.key, _side(found)
    read = [_caller(found, row)]
    if around.handed_over and side == "draft" and around.attempt:
        return Place(component="draft's KV, which a retraction does not back up", made=BACKUP, read=read)
    if around.handed_over and side == "draft":
        return Place(component="draft's KV, as it was handed over", made=HANDED, read=read)
    if around.prefix and (key.phase != Phase.PREFILL or around.chunk is None or around.chunk[0] == around.prefix):
        made = PREFIX if side == "draft" else PREFIX[1:]
        return Place(component=f"{side}'s KV behind a cached prefix", made=made, read=read)
    if key.phase in (Phase.DRAFT, Phase.VERIFY, Phase.EXTEND) and "KV slots read" not in around.right:
        plan = _plan(found, backend)
        return replace(plan, component=f"{side} model's forward, or the plan of its attention, which was not recorded")
    model = around.models.get(side, "")
    if not model:
        return Place(component=f"{side} model's forward", made=[RUNNER], read=read)
    return Place(component=f"{side} model's forward", made=_forwards(model), read=read)


def _head(found: Divergence, row: compat.Release, backend: str, around: Around) -> Place:
    """Logits or a choice: who chooses, the map of a draft's vocabulary, the head; the model where its state is off."""
    side = _side(found)
    boot = [f"{row.worker_module}:{row.draft}.init_lm_head", f"{row.worker_module}:{row.draft}.__init__"]
    if side == "draft" and around.elsewhere:
        return Place(
            component="map of the draft's vocabulary", made=boot, read=[_caller(found, row)], writes=("hot_token_id",)
        )
    if around.logits:
        return Place(component=f"choice by the {side}'s logits", made=[_caller(found, row)])
    if not around.state:
        return _model(found, row, backend, around)
    if side == "draft" and around.weights:
        return Place(component="draft's output head", made=boot, read=[_caller(found, row)])
    return Place(component=f"{side}'s output head", made=[LOGITS], read=[_caller(found, row)])


def _seam(found: Divergence, row: compat.Release, around: Around) -> Place:
    """What a forward is fed, a tree, a walk: the call at whose seam it is seen."""
    draft = f"{row.worker_module}:{row.draft}"
    verify = [f"{row.worker_module}:{row.worker}.verify"]
    fed = {Kind.POSITION: ("positions",), Kind.EXTEND_INPUT: ("input_ids",), Kind.TOKEN: ("input_ids",)}
    writes = fed.get(found.kind, ("hidden_states",) if found.hint.startswith("hidden_in") else ())
    if found.kind is Kind.STATE:
        return Place(component="recurrent states", made=[STATES_KEPT], read=[STATES_READ])
    if found.key.phase == Phase.PREBUILT and around.attempt:
        component = "draft state kept since the hand-over, which a retraction does not renew"
        return Place(component=component, made=COMMITTED, read=DRAFT_INPUT, writes=("hidden_states_tensor",))
    return {
        Phase.PREFILL: Place(component="target's prompt", made=[f"{BATCH}:ScheduleBatch.prepare_for_extend"]),
        Phase.DRAFT_PREFILL: Place(component="draft prefill's input", made=[f"{draft}.{row.draft_prefill}"]),
        Phase.DRAFT: Place(component="draft step's input", made=[f"{draft}.draft_forward"]),
        Phase.VERIFY: Place(component="draft tree", made=TREE, read=verify),
        Phase.ACCEPT: Place(
            component="verify walk", made=[":".join(row.sample)] if row.sample else verify, read=verify
        ),
        Phase.EXTEND: Place(component="draft extend's input", made=[f"{draft}.{row.draft_extend}"]),
        Phase.PREBUILT: Place(component="draft state that is handed over", made=SENT, read=DRAFT_INPUT),
    }[Phase(found.key.phase)].fed(writes)


def _side(found: Divergence) -> str:
    return "target" if found.key.phase in (Phase.PREFILL, Phase.VERIFY) else "draft"


def _caller(found: Divergence, row: compat.Release) -> str:
    """The worker's function that has a model run for a phase."""
    draft = {Phase.DRAFT_PREFILL: row.draft_prefill, Phase.DRAFT: "draft_forward", Phase.EXTEND: row.draft_extend}
    name = draft.get(Phase(found.key.phase))
    if name is not None:
        return f"{row.worker_module}:{row.draft}.{name}"
    verifies = found.key.phase == Phase.VERIFY
    return f"{row.worker_module}:{row.worker}.{'verify' if verifies else 'forward_batch_generation'}"


def _forwards(model: str) -> list[str]:
    """The forwards of a model's module: that of the class, of the model inside it, or of whom it inherits from."""
    module, _, name = model.partition(":")
    return [f"{module}:*Model*.forward", f"{module}:{name}.forward", RUNNER]


def _first(calls: Sequence[str], release: str, writes: Sequence[str] = ()) -> str:
    """The first that the release's source has, with its line; the first of all where there is no source."""
    for call in calls:
        module, _, function = call.partition(":")
        there = _functions(module, release)
        name = next((each for each in there if fnmatchcase(each, function)), "")
        if name:
            at = [str(line) for each, lines in there[name].writes.items() if each in writes for line in lines]
            wrote = f" ({writes[0]} at line{'s' * (len(at) > 1)} {', '.join(at[:MOST_LINES])})" if at else ""
            return f"{there[name].place} {name}{wrote}"
    named = next((call for call in calls if "*" not in call), calls[0].replace("*.", "") if calls else ":")
    return f"{_file(named.partition(':')[0])} {named.partition(':')[2]}" if calls else ""


def _file(module: str) -> str:
    return f"{module.removeprefix('sglang.').replace('.', '/')}.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """place: file and line of a function. writes: name of a variable or attribute -> lines that give it a value."""

    place: str
    writes: Mapping[str, Sequence[int]] = field(default_factory=dict)


def _functions(module: str, release: str) -> Mapping[str, Function]:
    """Qualified name -> each function of one module of an installed release and what it imports; empty without it."""
    own, imported = _parsed(module, release)
    there = {name: _parsed(other, release)[0].get(name) for name, other in imported.items() if name not in own}
    return {**own, **{name: place for name, place in there.items() if place}}


@cache
def _parsed(module: str, release: str) -> tuple[Mapping[str, Function], Mapping[str, str]]:
    """(function by its name, imported name -> its module of SGLang) of a module; empty without its source."""
    here = envs.current()
    env = here if here is not None and here.version == release else envs.state(release)
    path = None if env.package is None else env.package.parent / f"{module.replace('.', '/')}.py"
    if path is None or not path.is_file():
        return {}, {}
    body = ast.parse(path.read_text(encoding="utf-8")).body
    own = {
        name: Function(place=f"{_file(module)}:{node.lineno}", writes=_writes(node)) for name, node in _named(body, "")
    }
    imports = [node for node in body if isinstance(node, ast.ImportFrom) and not node.level]
    return own, {each.name: str(node.module) for node in imports for each in node.names}


def _named(body: Sequence[ast.stmt], within: str) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{within}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _named(node.body, f"{within}{node.name}.")


def _writes(function: ast.stmt) -> dict[str, list[int]]:
    """Name -> lines of assignments to it, and of calls of its methods that work in place."""
    found: dict[str, list[int]] = {}
    for node in ast.walk(function):
        targets = getattr(node, "targets", [getattr(node, "target", None)]) if isinstance(node, ASSIGNMENTS) else []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
            targets = [node.func.value]
        for target in [each for one in targets for each in getattr(one, "elts", [one])]:
            inner = target.value if isinstance(target, ast.Subscript) else target
            if name := getattr(inner, "attr", getattr(inner, "id", "")):
                found.setdefault(name, []).append(target.lineno)
    return {name: sorted(set(lines)) for name, lines in found.items()}
