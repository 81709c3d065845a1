"""A target and draft that the user named, as their files show them: what kind of pair it is, and its facts.

It must not import torch, nor the reference, which is asked elsewhere what it can compute of it (`judging.load_now`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from harness.contract import plain_files
from harness.contract.conditions import NO_DRAFT, DraftFacts
from harness.contract.settings import Algorithm
from harness.contract.usage import UsageError
from harness.contract.words import counted
from harness.driving.checkpoint_files import OWN, CheckpointFiles, layers_of_mtp, read_checkpoint
from harness.engines.dependencies import home, read_json

#: Targets that SGLang drafts for with one MTP layer a step (its `enable_multi_layer_eagle`).
MULTI_LAYER = ("MiMoV2", "Step3p5")
#: Where an EAGLE-3 head's config names layers of its target.
LAYERS = "eagle_aux_hidden_state_layer_ids"
#: Tensors that only an EAGLE-3 head has.
OF_EAGLE3 = ("d2t", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPair:
    """A pair that the user named, as far as its files show without loading it. layers: MTP layers, one a draft step."""

    target: CheckpointFiles
    draft: CheckpointFiles
    algorithm: Algorithm
    vocab: int
    layers: int = 1

    @property
    def folders(self) -> tuple[Path, Path]:
        return self.target.folder, self.draft.folder

    @property
    def named(self) -> tuple[str, str]:
        """Its folders, as a reproducer keeps them."""
        return str(self.target.folder), str(self.draft.folder)

    @property
    def _itself(self) -> bool:
        """Whether the target's own layers draft."""
        return self.target.folder == self.draft.folder

    def facts(self) -> dict[str, Any]:
        """What a run says of it, JSON-ready: names, sizes and digests."""
        own = {"of_target": True, "parameters": self.draft.mtp_parameters, "layers": max(1, layers_of_mtp(self.draft))}
        return {
            "algorithm": self.algorithm,
            "target": _facts(self.target),
            "draft": _facts(self.draft) | (own if self._itself else {}),
        }


@cache
def draft_facts(target: Path, folder: Path) -> DraftFacts:
    """What conditions of known issues ask of a pair; nothing where a folder of a stored run is gone."""
    try:
        one, drafted_for = read_checkpoint("--draft", folder), read_checkpoint("--target", target)
    except UsageError:
        return NO_DRAFT
    shapes = [tensor.shape for name, tensor in one.tensors.items() if name.rpartition("model.")[2] == "fc.weight"]
    names = {name.removeprefix("model.").removesuffix(".weight") for name in one.tensors}
    rotation = drafted_for.of_text("rope_parameters") or drafted_for.of_text("rope_scaling") or {}
    return DraftFacts(
        target_architecture=drafted_for.architecture,
        target_rope_type=str(rotation.get("rope_type") or rotation.get("type") or ""),
        target_window=isinstance(drafted_for.of_text("sliding_window"), int)
        and drafted_for.of_text("use_sliding_window") is not False,
        target_fp8_blocks=bool((drafted_for.config.get("quantization_config") or {}).get("weight_block_size")),
        target_recurrent=bool(drafted_for.recurrent),
        draft_architecture=one.architecture,
        draft_tie_word_embeddings=one.config.get("tie_word_embeddings") is True,
        norm_before_residual=one.config.get("norm_before_residual") is True,
        fc_bias=any(name.rpartition("model.")[2] == "fc.bias" for name in one.tensors) or not one.tensors,
        later_input_norm={"layers.0.hidden_norm", "layers.1.input_layernorm"} <= names
        and "layers.1.hidden_norm" not in names,
        brings_embedding="embed_tokens" in names
        and one.config.get("target_hidden_size") in (None, one.config.get("hidden_size")),
        lacks_head=one.config.get("draft_vocab_size") is not None and "lm_head" not in names and bool(names),
        layers_beside=bool(one.config.get(LAYERS)) and not (one.config.get("eagle_config") or {}).get(LAYERS),
        index_share=one.config.get("index_share_for_mtp_iteration") is True,
        fc_square=any(len(shape) == 2 and shape[0] == shape[1] for shape in shapes),
    )


def described(facts: Mapping[str, Any]) -> str:
    """The facts of a pair in words, a line each for target and draft."""
    lines = []
    for name in ("target", "draft"):
        one = facts[name]
        digest = hashlib.sha256(json.dumps(one["sha256"], sort_keys=True).encode()).hexdigest()[:12]
        own = ", the target's own MTP layers" if one.get("of_target") else ""
        lines.append(
            f"{name} {one['architecture']}{own}: {_millions(one['parameters'])} parameters in {one['dtype']}, "
            f"hidden {one['hidden']}, {counted(one['layers'] or 0, 'layer')}, vocabulary {one['vocab']}, "
            f"digest {digest}"
        )
    return "\n".join([f"pair of {facts['algorithm']}", *lines])


def _millions(parameters: int | None) -> str:
    if parameters is None:
        return "unknown"
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def _facts(one: CheckpointFiles) -> dict[str, Any]:
    return {
        "folder": str(one.folder),
        "architecture": one.architecture,
        "parameters": one.parameters,
        "hidden": one.of_text("hidden_size"),
        "layers": one.of_text("num_hidden_layers"),
        "vocab": one.of_text("vocab_size"),
        "dtype": one.dtype,
        "sha256": {file.name: sha256_of(file) for file in (one.folder / "config.json", *one.weights)},
    }


def own_pair(target: Path | None, draft: Path | None) -> OwnPair | None:
    """The pair named by --target and --draft, None if neither is; UsageError for one that cannot be a pair.

    Without --draft the target's own MTP layers draft.
    """
    if target is None and draft is None:
        return None
    if target is None:
        raise UsageError(f"--draft {draft} without --target\n  name the target that it was made for:  --target FOLDER")
    one = read_checkpoint("--target", target)
    if "Eagle" in one.architecture:
        raise UsageError(
            f"--target {target}: architectures is {one.config.get('architectures')!r}\n"
            "  that is what --draft takes: were the two swapped?"
        )
    itself = draft is None or draft.resolve() == one.folder
    if itself and not layers_of_mtp(one):
        missing = "--draft is missing" if draft is None else f"--draft {draft} is the target itself"
        raise UsageError(
            f"{missing}, and --target {target} ({one.architecture}) holds no MTP layers that could draft\n"
            "  name the folder of its draft:  --draft FOLDER"
        )
    other = one if itself or draft is None else read_checkpoint("--draft", draft)
    if "speculators_model_type" in other.config:
        raise UsageError(
            f"--draft {draft}: config.json is of the speculators library (speculators_model_type "
            f"{other.config['speculators_model_type']!r}), which no SGLang release here reads\n"
            "  convert it to the form of an EAGLE head, such as LlamaForCausalLMEagle3"
        )
    vocab = one.of_text("vocab_size")
    if not isinstance(vocab, int):
        raise UsageError(f"--target {target}: vocab_size is {vocab!r} in config.json, not a number\n  {OWN}")
    algorithm = _algorithm(one, other)
    for key in ("hidden_size", "vocab_size") if algorithm == "EAGLE" else ("vocab_size",):
        if one.of_text(key) != other.of_text(key):
            raise UsageError(
                f"--target {target} and --draft {draft} are not a pair: {key} is {one.of_text(key)} and "
                f"{other.of_text(key)}\n  name the draft that was made for this target"
            )
    layers = max(1, layers_of_mtp(other)) if algorithm == "MTP" else 1
    return OwnPair(target=one, draft=other, algorithm=algorithm, vocab=vocab, layers=layers)


def _algorithm(target: CheckpointFiles, draft: CheckpointFiles) -> Algorithm:
    """What SGLang calls the way this draft drafts, by its architecture's name, else by its tensors."""
    if target.architecture.startswith(MULTI_LAYER):
        return "MTP"
    by_name = "Eagle3" in draft.architecture
    return "EAGLE3" if by_name or any(name in draft.tensors for name in OF_EAGLE3) else "EAGLE"


KEPT = "digests.json"


def sha256_of(file: Path) -> str:
    """Of the file as it is now; a folder for what is kept that cannot be written costs the time again, nothing else."""
    state, store = file.stat(), home() / KEPT
    key = f"{file.resolve()} {state.st_size} {state.st_mtime_ns}"
    if found := (read_json(store) or {}).get(key):
        return str(found)
    found = plain_files.sha256(file)
    with contextlib.suppress(OSError):
        store.parent.mkdir(parents=True, exist_ok=True)
        plain_files.replace(store, json.dumps({**(read_json(store) or {}), key: found}).encode())
    return found
