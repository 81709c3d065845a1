"""Why a scenario is not driven: what a release does not do, and what neither a reference nor a witness follows.

Each function says it with what to do instead, and nothing where there is no reason. It must not import torch.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path

from packaging.version import Version

from cases.pairs import CHAINED, DRAFT_LAYERS
from harness.contract.finding_pages import issues
from harness.contract.requests import CUTTING
from harness.contract.scenario import Scenario
from harness.contract.settings import BFLOAT16, EngineConfig, SpecConfig
from harness.contract.usage import UsageError
from harness.driving.checkpoint_files import CheckpointFiles
from harness.driving.own_pair import OwnPair
from harness.engines.envs import EngineEnv
from harness.engines.launch import BACKENDS, DTYPES
from harness.engines.served_models import cannot_be_drafted_for, has_no_class
from harness.engines.server_args import not_taken

#: What not every release has.
SETTINGS: tuple[dict[str, str], ...] = tuple(
    tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).values()
)
#: Before it, the v2 worker runs under overlap scheduling only, and trees on the v1 worker only.
FIRST_V2_ONLY = Version("0.5.13")
#: Pairs of ours on a device, that were first driven on these; earlier ones end at their boot.
FIRST_WITH_PAIR = {
    **{("hybrid-tiny", device): Version("0.5.17") for device in BACKENDS},
    ("hybrid-mamba", "cpu"): Version("0.5.23"),  # 0.5.17 refuses these targets on triton attention
    ("hybrid-mamba", "cuda"): Version("0.5.17"),
    **{(name, device): Version("0.5.23") for name in ("hybrid-dense", "hybrid-mamba-next") for device in BACKENDS},
}
#: Types of models -> our pair of that kind.
OURS_OF_TYPE = {"qwen3_next": "hybrid-tiny", "qwen3_5_text": "hybrid-dense"}
#: Up to here the kernel that lays out pages (alloc_extend) takes powers of two only, as it still does on a GPU; what
#: lies between this and 0.5.23, which has another way on a CPU, was not tried.
LAST_WITH_POWERS = Version("0.5.17")
#: From here on a decode side whose requests are all taken back has the prompts read again on the prefill side, by
#: reading of 0.5.15 (which lacks it) and 0.5.16 (which has it); seen on 0.5.17 and 0.5.23.
FIRST_WITH_RECOMPUTE = Version("0.5.16")
#: Up to here new weights are those of the target, or of both by one list; 0.5.23 takes those of a draft alone, and what
#: lies between was not tried.
LAST_WITHOUT_DRAFT_UPDATES = Version("0.5.17")


#: What flashinfer compiles its attention from, at first use.
ATTENTION_SOURCE = "flashinfer/data/csrc/batch_decode.cu"
#: Arguments of SGLang's that change what a row of the target or the draft holds, and that only a witness has too.
CHANGING = frozenset(
    (
        *("speculative_draft_window_size", "speculative_draft_sink_size", "speculative_draft_model_quantization"),
        *("speculative_draft_kv_cache_dtype", "speculative_draft_load_format", "quantization", "kv_cache_dtype"),
        *("load_format", "model_impl", "torchao_config", "json_model_override_args", "quantization_param_path"),
    )
)


def check_possible(
    scenarios: Sequence[Scenario], *, version: str, device: str = "cpu", files: Sequence[Path | None] = ()
) -> None:
    """UsageError for the first scenario that this release refuses, or would run otherwise than asked.

    files: where the user wrote each of them, as for `called`.
    """
    if why := first_refusal(scenarios, files, partial(refusal, version=version, device=device)):
        raise UsageError(why)


def first_refusal(scenarios: Sequence[Scenario], files: Sequence[Path | None], of: Callable[[Scenario], str]) -> str:
    """What is said `of` the first scenario of which anything is; else empty."""
    for scenario, file in zip_longest(scenarios, files[: len(scenarios)]):
        if why := of(scenario):
            return f"{called(scenario, file)}: {why}"
    return ""


def called(scenario: Scenario, file: Path | None) -> str:
    """What a message calls a scenario; file: where the user wrote it, None for one of ours."""
    return f"scenario {scenario.name!r}" + (f" of {file}" if file is not None else "")


def refusal(scenario: Scenario, *, version: str, device: str) -> str:
    """Why the scenario is not driven there, with what to do instead; empty if it is."""
    own = _of_pair(scenario, version, device), _of_script(scenario, version)
    return impossible(scenario.spec, scenario.engine, version=version, device=device) or next(chain(*own), "")


def impossible(spec: SpecConfig, engine: EngineConfig, *, version: str, device: str = "cpu") -> str:
    """Why SGLang `version` does not run this, with what to do instead; empty if it does."""
    if why := impossible_on(engine, device=device):
        return why
    old = Version(version) < FIRST_V2_ONLY
    if old and spec.eagle_topk > 1 and engine.overlap_schedule:
        return (
            f"spec.eagle_topk is {spec.eagle_topk} with engine.overlap_schedule on, "
            f"and SGLang {version} runs trees without overlap only\n"
            f"  allowed: --disable-overlap-schedule, spec.eagle_topk 1, or a release from {FIRST_V2_ONLY} on"
        )
    if old and spec.eagle_topk > 1 and engine.page_size > 1 and engine.attention_backend != "flashinfer":
        return (
            f"spec.eagle_topk is {spec.eagle_topk} with engine.page_size {engine.page_size} "
            f"on {engine.attention_backend}, which SGLang {version} refuses\n"
            f"  allowed: --page-size 1, --attention-backend flashinfer, or a release from {FIRST_V2_ONLY} on"
        )
    if engine.page_size & (engine.page_size - 1) and (device != "cpu" or Version(version) <= LAST_WITH_POWERS):
        return (
            f"engine.page_size is {engine.page_size}, and SGLang {version} "
            f"lays out pages of a power of two on {device}\n"
            f"  allowed: {', '.join(str(2**power) for power in range(10))}"
        )
    return next(_not_there(spec, engine, version), "")


def impossible_on(engine: EngineConfig, *, device: str) -> str:
    """Why no release runs this on a device, with what to do instead; empty if some do."""
    if device != "cpu":
        return ""
    if engine.dtype not in DTYPES[device]:
        return (
            f"engine.dtype is {engine.dtype!r}, which kernels on a CPU do not compute in here\n"
            f"  allowed: {', '.join(DTYPES[device])}, or add  --device cuda"
        )
    if engine.enable_overlap_plan_stream:
        return (
            "engine.enable_overlap_plan_stream is on, and there are no streams on a CPU\n"
            "  allowed: --disable-overlap-plan-stream, or add  --device cuda"
        )
    backend = engine.server_args.get("hicache_io_backend", "kernel")
    if engine.server_args.get("enable_hierarchical_cache") and backend != "direct":
        return (
            f"engine.server_args has enable_hierarchical_cache with hicache_io_backend {backend!r}, whose kernels no "
            "CPU has\n  allowed: hicache_io_backend direct"
        )
    return ""


def _not_there(spec: SpecConfig, engine: EngineConfig, version: str) -> Iterator[str]:
    """Settings that SGLang `version` does not have."""
    for row in SETTINGS:
        if spec.algorithm not in row.get("algorithms", spec.algorithm).split():
            continue
        old = Version(version) < Version(row.get("first", "0")) or Version(version) <= Version(
            row.get("last_without", "0")
        )
        old |= spec.algorithm in row.get("other_algorithms", "").split()
        if old and all(_set(name, spec, engine) for name in (row["setting"], row.get("where", row["setting"]))):
            told = {"version": version, "first": row.get("first"), "spec": spec, "engine": engine}
            yield f"{row['says']}\n  allowed: {row['allowed']}".format(**told)


def _set(name: str, spec: SpecConfig, engine: EngineConfig) -> bool:
    """name: as `engine.server_args.KEY`."""
    owner, setting, *key = name.split(".")
    value = getattr(spec if owner == "spec" else engine, setting)
    return bool(value.get(key[0]) if key else value)


def _of_pair(scenario: Scenario, version: str, device: str) -> Iterator[str]:
    """What one of our pairs is not driven through: too old a release, more steps than it has layers, and where the
    reference has no answer.

    In CUDA graphs some releases run MTP rows once more (F-020). The reference follows that for layers that read the
    target.
    """
    name, first = scenario.checkpoint, FIRST_WITH_PAIR.get((scenario.checkpoint, device))
    if first is not None and Version(version) < first:
        yield (
            f"checkpoint is {name!r}, which is not driven on SGLang {version} on {device}\n"
            f"  allowed: another checkpoint, or a release from {first} on"
        )
    if scenario.spec.num_steps > (most := DRAFT_LAYERS.get(name, math.inf)):
        yield (
            f"spec.num_steps is {scenario.spec.num_steps}, and each step needs a layer of its own in {name!r}\n"
            f"  allowed: 1 to {most}"
        )
    refused = issues()["F-020"].releases
    if scenario.engine.cuda_graph and name in CHAINED and refused.has(version):
        yield (
            f"the layers of {name!r} read each other's output, and in CUDA graphs SGLang {version} runs some of their "
            "rows once more, which the reference does not follow\n"
            f"  allowed: --disable-cuda-graph, or a release behind {refused.last}"
        )


def _of_script(scenario: Scenario, version: str) -> Iterator[str]:
    """What a release, or what stands in for the network between two engines, does not serve of a script."""
    if Version(version) <= LAST_WITHOUT_DRAFT_UPDATES and any(
        (op.kind, op.source, op.selector) == ("update", "tensor", "draft") for op in scenario.script
    ):
        yield (
            f"op 'update' of the draft alone, which SGLang {version} does not have\n"
            "  allowed: selector target or all, or a newer release such as 0.5.23; or other scenarios, by --scenario"
        )
    taken_back = any(op.kind == "retract" and op.everybody for op in scenario.script)
    if scenario.engine.disaggregation and taken_back and Version(version) >= FIRST_WITH_RECOMPUTE:
        yield (
            f"op 'retract' with engine.disaggregation, of every request: SGLang {version} then has prompts read again "
            "on the prefill side, which the transfers of this version do not serve\n"
            "  allowed: rids of op 'retract', which the decode side takes back by itself as when its pool runs out; "
            f"engine.disaggregation false; or a release before {FIRST_WITH_RECOMPUTE}"
        )


def check_pair(own: OwnPair | None, env: EngineEnv, *, device: str) -> None:
    """UsageError for a pair of the user's that a release does not serve, or not there; one not there says nothing."""
    if own is None:
        return
    target, draft, version, package = own.target, own.draft, env.version, env.package
    undrafted = cannot_be_drafted_for(target.architecture, own.algorithm, version=version, package=package)
    for option, one, why in (
        ("--target", target, undrafted),
        ("--draft", draft, has_no_class(draft.architecture, version=version, package=package)),
        ("--target", target, next(_of_model(target, version, device), "")),
        ("--draft", draft, next(_of_model(draft, version, device), "")),
    ):
        if why:
            raise UsageError(f"{option} {one.folder}: {why}")


def _of_model(one: CheckpointFiles, version: str, device: str) -> Iterator[str]:
    """What SGLang `version` does not run of a model, or only on a GPU: engines on a CPU compute in float32 here."""
    kind = str(one.of_text("model_type"))
    first = FIRST_WITH_PAIR.get((OURS_OF_TYPE.get(kind, ""), device))
    if first is not None and Version(version) < first:
        yield (
            f"model_type is {kind!r} in config.json, which is not driven on SGLang {version} on {device}\n"
            f"  allowed: a release from {first} on"
        )
    if device != "cpu":
        return
    gpu = "run it on a GPU:  --device cuda --dtype bfloat16"
    if quantised := one.of_text("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        yield (
            f"quantization_config is {method!r} in config.json, and SGLang has no float32 for quantised weights\n"
            f"  {gpu}"
        )
    if one.of_text("index_topk"):
        yield (
            "index_topk in config.json asks for a sparse attention indexer, for which SGLang asks a GPU's capability "
            f"before anything else\n  {gpu}"
        )
    if one.linear_attention:
        yield (
            f"{one.linear_attention} in config.json asks for linear attention, which SGLang computes in bfloat16 "
            f"alone\n  {gpu}"
        )


def undrawn(scenario: Scenario, env: EngineEnv, *, device: str) -> str:
    """Why this release, as it was unpacked, cannot draw tokens that are asked for; empty if it can.

    On a GPU it cuts by `top_k`, which greedy requests set for a whole batch, and draws from the target's distribution
    by flashinfer's kernels; rejection sampling alone is its own. Grammars are xgrammar's, which older bundles lack.
    """
    backend = scenario.engine.grammar_backend
    if (
        env.unpacked
        and backend != "none"
        and not any((part / backend / "grammar.py").is_file() for part in env.pythonpath)
    ):
        return (
            f"engine.grammar_backend is {backend}, which is not in the bundle that SGLang {env.version} came out of\n"
            "  allowed: requests without grammars and engine.grammar_backend none; a bundle packed anew; or an engine "
            "installed from an index"
        )
    whole = device == "cpu" or not env.unpacked or any((part / "flashinfer").is_dir() for part in env.pythonpath)
    drawing = next((one for one in scenario.requests if not one.greedy), None)
    if whole or drawing is None:
        return ""
    rejects = scenario.engine.rejection_sampling
    if rejects and not any(one.greedy or set(CUTTING) & set(one.asked) for one in scenario.requests):
        return ""
    return (
        f"request {drawing.rid!r} samples, and SGLang {env.version} draws by flashinfer's kernels, which are not in "
        "its bundle\n  allowed: temperature 0; engine.rejection_sampling where all requests sample without cuts; a "
        "bundle made --with flashinfer; or an engine installed from an index"
    )


def unattended(scenario: Scenario, env: EngineEnv) -> str:
    """Why attention through flashinfer is not to be had of this release, as it was unpacked; empty if it is."""
    asked = scenario.engine.attention_backend == "flashinfer"
    if not (asked and env.unpacked) or any((part / ATTENTION_SOURCE).is_file() for part in env.pythonpath):
        return ""
    why, instead = "", "a bundle of --part flashinfer unpacked beside it"
    if env.own_torch:
        why, instead = ", which imports a compiler that it has a stub of", "an engine installed from an index"
    return (
        f"engine.attention_backend is flashinfer, and the bundle that SGLang {env.version} came out of has none of "
        f"flashinfer's attention{why}\n"
        f"  allowed: --attention-backend triton, or fa3 where the bundle has it; or {instead}"
    )


def untaken(scenario: Scenario, env: EngineEnv) -> str:
    """Which argument of SGLang's own this release does not take, or not with that value; empty if it takes all."""
    return not_taken(scenario.engine.server_args, version=env.version, package=env.package)


def unpredicted(scenario: Scenario) -> str:
    """Why only a witness says something of this scenario, with what to do instead; empty if others do too."""
    if asked := next((name for name in scenario.engine.server_args if name in CHANGING), None):
        return (
            f"engine.server_args has {asked}, which changes what rows hold in a way that no reference of ours follows\n"
            f"  allowed: --reference witness, or leave {asked} out"
        )
    return ""


def unwitnessed(scenario: Scenario, *, assumed: Sequence[str] = ()) -> str:
    """Why a witness says nothing of this scenario, with what to do instead; empty if it does."""
    if scenario.spec.algorithm == "MTP":
        return (
            "spec.algorithm is MTP: what its deeper layers hold depends on when their rows ran, not on the text alone, "
            "so no other request is a witness of it\n  allowed: --reference paper, or EAGLE and EAGLE3"
        )
    if scenario.spec.adaptive is not None or any(op.kind in ("update", "memory") for op in scenario.script):
        return (
            "a number of steps, or weights, that change while SGLang serves are not driven with a witness\n"
            "  allowed: --reference paper, or leave spec.adaptive and ops 'update' and 'memory' out"
        )
    if scenario.engine.lora_paths:
        return "engine.lora_paths: adapters are not driven with a witness\n  allowed: --reference paper"
    for name in ("kv_cache_dtype", "speculative_draft_kv_cache_dtype"):
        asked = scenario.engine.server_args.get(name)
        follows = name.startswith("speculative_draft") or scenario.engine.dtype == "bfloat16"
        if asked not in (None, "auto") and not (asked in BFLOAT16 and follows):
            return (
                f"engine.server_args has {name} {asked}: what a cache keeps more coarsely than its engine computes is "
                "rounded one way or the other from batch to batch, and no limit was measured for that\n"
                f"  allowed: leave it out; {BFLOAT16[0]} for a draft, or for all with engine.dtype bfloat16"
            )
    predicted = [one for one in assumed if issues()[one].assume == "predicted"]
    if predicted:
        return (
            f"--assume {predicted[0]}: a witness is SGLang itself, and predicts nothing\n"
            f"  allowed: --reference paper, or leave --assume {predicted[0]} out"
        )
    return ""
