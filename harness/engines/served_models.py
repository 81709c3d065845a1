"""Which of a release's models can have a draft, as its sources define them, and which files a pair of ours needs.

Nothing of a release is imported.

Each EAGLE worker asks its target's class for its embedding and head; an EAGLE-3 head reads states that the class must
be told to hand out.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Collection, Mapping
from pathlib import Path

#: Methods of a target's class, by the algorithm that calls them.
ASKED = {"EAGLE": ("get_embed_and_head",), "EAGLE3": ("get_embed_and_head", "set_eagle3_layers_to_capture")}
#: What a release runs an architecture by that it has no class for.
FALLBACK = "TransformersForCausalLM"
#: Architecture in a config.json -> files below srt/models, named alike in all releases, of its class and of those
#: of the drafts that SGLang makes of it.
FILES = {
    "LlamaForCausalLM": ("llama",),
    "LlamaForCausalLMEagle": ("llama_eagle",),
    "LlamaForCausalLMEagle3": ("llama_eagle3",),
    "Qwen3ForCausalLM": ("qwen3",),
    "Qwen3NextForCausalLM": ("qwen3_next", "qwen3_next_mtp"),
    "Qwen3_5ForCausalLM": ("qwen3_5", "qwen3_5_text", "qwen3_5_mtp"),
    "NemotronHForCausalLM": ("nemotron_h", "nemotron_h_mtp"),
    "DeepseekV3ForCausalLM": ("deepseek_v2", "deepseek_nextn"),
    "DeepseekV32ForCausalLM": ("deepseek_v2", "deepseek_nextn"),
    "MiMoV2FlashForCausalLM": ("mimo_v2", "mimo_v2_nextn"),
    "GptOssForCausalLM": ("gpt_oss",),
    "Step3p5ForCausalLM": ("step3p5", "step3p5_mtp"),
}
#: All of these files, and that of FALLBACK: one set, so that engines of all our pairs are forked from one process.
ALL_FILES = tuple(sorted({"transformers", *(name for names in FILES.values() for name in names)}))
#: Arguments of SGLang's by which a model may be of another class than its config.json says, or the class another one:
#: what is read instead of or over config.json, what model and weights are built by, and which parts of a model serve.
OF_ANOTHER_CLASS = frozenset(
    (
        *("json_model_override_args", "decrypted_config_file", "decrypted_draft_config_file", "model_config_parser"),
        *("model_impl", "load_format", "speculative_draft_load_format", "model_loader_extra_config"),
        *("quantization", "speculative_draft_model_quantization", "quantize_and_serve"),
        *("is_embedding", "enable_multimodal", "encoder_only", "language_only", "language_model_only"),
    )
)
#: What a class may have as a base, beside other models of the release, that brings none of these.
PLAIN = frozenset(("nn.Module", "torch.nn.Module", "Module", "object"))


def model_files(*checkpoints: Path, package: Path | None, server_args: Collection[str] = ()) -> tuple[str, ...]:
    """ALL_FILES where these checkpoints need no other; empty where nobody knows what they need.

    package: the release's folder `sglang`, or a commit's, in which a class may have moved. server_args: names of the
    arguments that the user adds.
    """
    if not OF_ANOTHER_CLASS.isdisjoint(server_args):
        return ()
    asked = [_architectures(folder) for folder in checkpoints]
    known = package is not None and all(names and all(_holds(package, one) for one in names) for names in asked)
    return ALL_FILES if known else ()


@functools.cache
def _holds(package: Path, architecture: str) -> bool:
    """Whether the files that are known for an architecture define its class."""
    files = [package / "srt" / "models" / f"{name}.py" for name in FILES.get(architecture, ())]
    return any(f"class {architecture}(" in file.read_text() for file in files if file.is_file())


def _architectures(checkpoint: Path) -> list[str]:
    """As its config.json has them; none where it cannot be read, which is said where the checkpoint is."""
    try:
        return list(json.loads((checkpoint / "config.json").read_text()).get("architectures") or ())
    except (OSError, ValueError):
        return []


def has_no_class(draft: str, *, version: str, package: Path | None) -> str:
    """Why a release runs no draft of this architecture; empty if it does, or its sources do not say."""
    served = _read(package / "srt" / "models")[1] if package is not None else frozenset()
    if not served or draft in served:
        return ""
    of_eagle = sorted(name for name in served if "Eagle" in name and ("Eagle3" in name) == ("Eagle3" in draft))
    return (
        f"architectures is [{draft!r}] in config.json, and SGLang {version} has no class of that name\n"
        f"  convert it to a form that has one: {', '.join(of_eagle)}; or take a release that has {draft}"
    )


def cannot_be_drafted_for(architecture: str, algorithm: str, *, version: str, package: Path | None) -> str:
    """Why a release speculates with no target of this architecture; empty if it does, or its sources do not say.

    package: the release's folder `sglang`.
    """
    classes, served = _read(package / "srt" / "models") if package is not None else ({}, frozenset())
    known = architecture in served or not served
    ancestors = _ancestors(architecture if known else FALLBACK, classes)
    if ancestors is None:
        return ""
    missing = next((name for name in ASKED.get(algorithm, ()) if name not in ancestors), None)
    if missing is None:
        return ""
    whose = "its class has" if known else f"it has no class of that name, and {FALLBACK} has"
    return (
        f"SGLang {version} does not speculate with {architecture}: {whose} no {missing}, which every draft of "
        f"{algorithm} asks its target for\n  name another target, or a release whose {architecture} has it"
    )


def _ancestors(name: str, classes: Mapping[str, tuple[frozenset[str], tuple[str, ...]]]) -> frozenset[str] | None:
    """All that a class and its bases define; None where one of them is not among the models."""
    if name in PLAIN:
        return frozenset()
    if name not in classes:
        return None
    own, bases = classes[name]
    inherited = [_ancestors(base, classes) for base in bases]
    if any(one is None for one in inherited):
        return None
    return own.union(*(one for one in inherited if one is not None))


@functools.cache
def _read(models: Path) -> tuple[dict[str, tuple[frozenset[str], tuple[str, ...]]], frozenset[str]]:
    """Name -> what its body defines or sets, and its bases; and the names that its files list as architectures.

    A class that looks names up as it runs is left out.
    """
    found: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {}
    served: set[str] = set()
    for file in sorted(models.glob("*.py")):
        for one in ast.parse(file.read_bytes()).body:
            if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "EntryClass":
                served |= {each.id for each in ast.walk(one.value) if isinstance(each, ast.Name)}
            if isinstance(one, ast.ClassDef):
                defined = {part.name for part in one.body if isinstance(part, ast.FunctionDef)}
                defined |= {
                    each.id
                    for part in one.body
                    for each in ast.walk(part)
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
                }
                if "__getattr__" not in defined:
                    found[one.name] = frozenset(defined), tuple(ast.unparse(base) for base in one.bases)
    return found, frozenset(served)
