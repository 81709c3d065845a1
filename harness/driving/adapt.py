"""The engine options of a command line put into scenarios, and the combinations that no engine can run.

An option changes the scenario, so that what is stored says what ran. It must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from cases.checkpoints import CHAINED, DRAFT_LAYERS
from harness.contract.known_issues import issues
from harness.contract.types import EngineConfig, Scenario, SpecConfig
from harness.contract.usage import UsageError, unknown
from harness.engines.launch import BACKENDS, CONTEXT_LENGTH, DTYPES

DEVICES = tuple(BACKENDS)
MOST_PAGE = CONTEXT_LENGTH
#: Before it, the v2 worker runs under overlap scheduling only, and trees on the v1 worker only.
FIRST_V2_ONLY = Version("0.5.13")
#: The first release with `speculative_use_rejection_sampling`, by reading.
FIRST_WITH_REJECTION = Version("0.5.14")
#: Up to here a decode side that speculates may keep no prefix cache; what lies between this and 0.5.23 was not tried.
LAST_WITHOUT_DECODE_CACHE = Version("0.5.17")
#: Up to here the kernel that lays out pages (alloc_extend) takes powers of two only, as it still does on a GPU; what
#: lies between this and 0.5.23, which has another way on a CPU, was not tried.
LAST_WITH_POWERS = Version("0.5.17")
#: From here on a decode side whose requests are all taken back has the prompts read again on the prefill side, by
#: reading of 0.5.15 (which lacks it) and 0.5.16 (which has it); seen on 0.5.17 and 0.5.23.
FIRST_WITH_RECOMPUTE = Version("0.5.16")
#: Before it nothing of a hand-over is asked of the algorithm; before 0.5.12 there is no registry at all.
FIRST_ASKING_PLUGINS = Version("0.5.13")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What --dtype, --backend, --graphs, --overlap and --page ask for; None leaves it to the scenario."""

    dtype: str | None = None
    backend: str | None = None
    graphs: bool | None = None
    overlap: bool | None = None
    page: int | None = None

    def changes(self) -> dict[str, Any]:
        """Those that were named, as fields of EngineConfig."""
        named = {name: getattr(self, name) for name in ("dtype", "backend", "graphs", "overlap", "page")}
        return {name: value for name, value in named.items() if value is not None}


NOTHING = Wanted()


def adapted(scenarios: Iterable[Scenario], wanted: Wanted, *, device: str) -> list[Scenario]:
    """The scenarios with what is wanted, in order; UsageError for a value that the device does not have."""
    _check_values(wanted, device)
    changes = wanted.changes()
    if not changes:
        return list(scenarios)
    return [_adapted(scenario, changes) for scenario in scenarios]


def _adapted(scenario: Scenario, changes: dict[str, Any]) -> Scenario:
    engine = EngineConfig(**{**scenario.engine.model_dump(), **changes})
    return scenario.model_copy(update={"engine": engine})


def _check_values(wanted: Wanted, device: str) -> None:
    for option, value, allowed in (("dtype", wanted.dtype, DTYPES), ("backend", wanted.backend, BACKENDS)):
        if value is not None and value not in allowed[device]:
            raise UsageError(unknown(f"--{option} on {device}:", value, allowed[device]))
    if wanted.graphs and device == "cpu":
        raise UsageError("--graphs: CUDA graphs need a GPU\n  allowed on cpu: --no-graphs, or add  --device cuda")
    if wanted.page is not None and not 1 <= wanted.page <= MOST_PAGE:
        raise UsageError(f"--page {wanted.page}: tokens a page holds\n  allowed: 1 to {MOST_PAGE}, the whole context")


def check_possible(scenarios: Sequence[Scenario], *, version: str, device: str = "cpu") -> None:
    """UsageError for the first scenario that this release refuses, or would run otherwise than asked."""
    for scenario in scenarios:
        if why := refusal(scenario, version=version, device=device):
            raise UsageError(f"scenario {scenario.name!r}: {why}")


def refusal(scenario: Scenario, *, version: str, device: str) -> str:
    """Why the scenario is not driven there, with what to do instead; empty if it is."""
    return (
        impossible(scenario.spec, scenario.engine, version=version, device=device)
        or too_deep(scenario)
        or unfollowed(scenario, version=version)
        or unserved(scenario, version=version)
    )


def impossible(spec: SpecConfig, engine: EngineConfig, *, version: str, device: str = "cpu") -> str:
    """Why SGLang `version` does not run this, with what to do instead; empty if it does."""
    if device == "cpu" and engine.dtype not in DTYPES[device]:
        return (
            f"engine.dtype is {engine.dtype!r}, which kernels on a CPU do not compute in here\n"
            f"  allowed: {', '.join(DTYPES[device])}, or add  --device cuda"
        )
    old = Version(version) < FIRST_V2_ONLY
    if old and spec.t > 1 and engine.overlap:
        return (
            f"spec.t is {spec.t} with engine.overlap on, and SGLang {version} runs trees without overlap only\n"
            f"  allowed: --no-overlap, spec.t 1, or a release from {FIRST_V2_ONLY} on"
        )
    if old and spec.t > 1 and engine.page > 1 and engine.backend != "flashinfer":
        return (
            f"spec.t is {spec.t} with engine.page {engine.page} on {engine.backend}, which SGLang {version} refuses\n"
            f"  allowed: --page 1, --backend flashinfer, or a release from {FIRST_V2_ONLY} on"
        )
    if engine.page & (engine.page - 1) and (device != "cpu" or Version(version) <= LAST_WITH_POWERS):
        return (
            f"engine.page is {engine.page}, and SGLang {version} lays out pages of a power of two on {device}\n"
            f"  allowed: {', '.join(str(2**power) for power in range(10))}"
        )
    if engine.rejection and Version(version) < FIRST_WITH_REJECTION:
        return (
            f"engine.rejection is on, and SGLang {version} cannot draw its drafts\n"
            f"  allowed: engine.rejection false, or a release from {FIRST_WITH_REJECTION} on"
        )
    if engine.decode_cache and Version(version) <= LAST_WITHOUT_DECODE_CACHE:
        return (
            f"engine.decode_cache is on, which SGLang {version} refuses beside speculation\n"
            "  allowed: engine.decode_cache false, or a newer release such as 0.5.23"
        )
    if spec.plugin and Version(version) < FIRST_ASKING_PLUGINS:
        return (
            f"spec.plugin is {spec.plugin!r}, and SGLang {version} asks no plugin's algorithm for a draft input\n"
            f"  allowed: a release from {FIRST_ASKING_PLUGINS} on, or leave spec.plugin out"
        )
    return ""


def too_deep(scenario: Scenario) -> str:
    """Why one of our pairs cannot draft so many steps; empty if it can, or is none of ours."""
    most = DRAFT_LAYERS.get(scenario.checkpoint)
    if most is None or scenario.spec.k <= most:
        return ""
    return (
        f"spec.k is {scenario.spec.k}, and each step needs a layer of its own in {scenario.checkpoint!r}\n"
        f"  allowed: 1 to {most}"
    )


def unfollowed(scenario: Scenario, *, version: str) -> str:
    """Why the reference has no answer to what SGLang `version` does there, with what to do instead; empty if it has.

    In CUDA graphs some releases run MTP rows once more (F-020). The reference follows that for layers that read the
    target.
    """
    refused = issues()["F-020"].releases
    if scenario.engine.graphs and scenario.checkpoint in CHAINED and refused.has(version):
        return (
            f"the layers of {scenario.checkpoint!r} read each other's output, and in CUDA graphs SGLang {version} runs "
            "some of their rows once more, which the reference does not follow\n"
            f"  allowed: --no-graphs, or a release behind {refused.last}"
        )
    return ""


def unserved(scenario: Scenario, *, version: str) -> str:
    """Why what stands in for the network between two engines does not serve the script; empty if it does."""
    taken_back = any(op.kind == "retract" for op in scenario.script)
    if scenario.engine.pd and taken_back and Version(version) >= FIRST_WITH_RECOMPUTE:
        return (
            f"op 'retract' with engine.pd: SGLang {version} then has prompts read again on the prefill side, which the "
            "transfers of this version do not serve\n"
            "  allowed: a smaller engine.pool_tokens, which makes the decode side take requests back by itself; "
            f"engine.pd false; or a release before {FIRST_WITH_RECOMPUTE}"
        )
    return ""
