"""The module that transformers makes of a target's folder, and what it would not read of the folder.

Nothing about a folder is taken on trust: a key or a tensor that the module does not read is a CheckpointError. This
module must not know an architecture by name, and is the only one here that asks transformers.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from harness.contract.words import some
from reference.checkpoint import CheckpointError, DamagedError, Weights, all_keys, read_json
from reference.keys import CHANGES_NOTHING
from reference.rotation import kind_of

#: Tensors of a draft's own layers, which a target's folder may hold; layers behind the target's last are such too.
DRAFT_TENSORS = re.compile(r"(^|\.)mtp\b|(^|\.)mtp_")
#: What a module computes anew, whatever a file says.
COMPUTED_TENSORS = re.compile(r"rotary_emb|inv_freq|masked_bias$|attn\.bias$")
#: Keys of a config that speak of a draft's layers in the same folder.
DRAFT_KEYS = {"num_nextn_predict_layers", "num_mtp_layers", "mtp_num_layers"}
#: Keys that say what else the files show: a tensor that is missing or unread is refused anyway.
SHOWN_KEYS = {
    *("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "lm_head_bias"),
    *("qk_norm", "use_qk_norm", "tie_word_embeddings"),
}


def _transformers() -> Any:
    """The package, which takes seconds to import: whoever needs no module of its own does not wait for it."""
    import transformers

    return transformers


def check_readable(path: Path) -> None:
    """CheckpointError for a config that the module would read only in part."""
    auto = _transformers().AutoConfig
    file = path / "config.json"
    raw = read_json(file)
    if "quantization_config" in raw:
        raise CheckpointError(f"{file}: quantization_config is {raw['quantization_config']!r}; not built here")
    try:
        with _quiet():
            config = auto.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        text, above = config.get_text_config(), DRAFT_KEYS | SHOWN_KEYS | {"architectures"}
        above |= {key for keys in CHANGES_NOTHING.values() for key in keys.split()}
        if text is config or raw.get("text_config"):
            sides = [(config, raw)] if text is config else [(config, raw), (text, raw["text_config"])]
            known = [_read_by(type(one)) | above for one, _ in sides]
        else:  # older ones have the keys of their text beside the others
            sides, known = [(text, raw)], [_read_by(type(config)) | _read_by(type(text)) | above]
            _taken_over(raw, text.to_dict())
    except Exception as error:  # whatever a config makes it say
        raise CheckpointError(f"{file}: transformers cannot read it ({brief(error)})") from error
    with all_keys(file, "transformers"):
        kind_of(sides[-1][1])  # of two that a config says the module takes one
    for (one, said), keys in zip(sides, known, strict=True):
        for key in {key for key, value in said.items() if value is not None} - keys:
            raise CheckpointError(
                f"{file}: {key} is {said[key]!r}; transformers' {type(one).__name__} does not read it"
            )


def _taken_over(raw: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """ValueError where the config of a text has another number than the file that it was read out of.

    None is what another key switches off, such as a window.
    """
    found = {**(text.get("rope_parameters") or {}), **text}
    for key, value in raw.items():
        if isinstance(value, int | float) and found.get(key) not in (None, value):
            raise ValueError(f"{key} is {value!r}, and it reads {found[key]!r}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing of transformers' own on our terminal: what is wrong with a folder is said in a CheckpointError."""
    logging: Any = _transformers().utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def _read_by(kind: Any) -> set[str]:
    """Keys that a class of configs and its module read: those that the class has by itself, older names of what turns
    its heads, and those that the module asks the config for."""
    own = kind().to_dict()
    rotation = own.get("rope_parameters") or {}
    nested = [each for each in rotation.values() if isinstance(each, dict)] or [rotation]
    older = {"rope_theta", "rope_scaling"} if "rope_parameters" in own else set()
    return {*own, *kind.attribute_map, *(name for each in nested for name in each), *older, *_asked_for(kind)}


def _asked_for(kind: Any) -> set[str]:
    """What the module of a class of configs asks its config for, and older names that the class takes, by source."""
    mappings = [_auto(kind)._model_mapping, _transformers().AutoModel._model_mapping]
    module = next(one for one in mappings if kind in one)[kind]
    source = inspect.getsource(sys.modules[module.__module__])
    asked = {one or other for one, other in re.findall(r'config\.(\w+)|getattr\((?:self\.)?config, "(\w+)"', source)}
    return asked | set(re.findall(r'kwargs\.(?:pop|get)\(\s*"(\w+)"', inspect.getsource(kind)))


def _auto(kind: Any) -> Any:
    """What makes a module of a class of configs: one that reads images too has its text's config within it."""
    package = _transformers()
    wraps = (
        "text_config" in getattr(kind, "sub_configs", {}) and kind in package.AutoModelForImageTextToText._model_mapping
    )
    return package.AutoModelForImageTextToText if wraps else package.AutoModelForCausalLM


def load_module(path: Path, held: torch.dtype) -> Any:
    """The module with the folder's weights; CheckpointError unless each of its own is there, and each there is its."""
    stored = list(Weights(path, torch.float32))
    try:
        with _quiet():
            config = _transformers().AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            module, report = _auto(type(config)).from_pretrained(
                path,
                dtype=held,
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below
            )
    except Exception as error:  # whatever a folder makes it say
        raise CheckpointError(f"{path}: transformers cannot load it ({brief(error)})") from error
    _named(path, module)
    unread = [name for name in [*report["unexpected_keys"], *_ignored(stored, module)] if not _is_drafts(name, module)]
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report.get(what):
            other_names = what == "missing_keys" and unread
            kind = CheckpointError if other_names or what == "error_msgs" else DamagedError
            raise kind(f"{path}: {what.replace('_', ' ')}: {shortened(report[what])}; expected none")
    if unread:
        raise CheckpointError(
            f"{path}: {type(module).__name__} leaves {shortened(unread)} unread; expected every tensor read"
        )
    return module


def _named(path: Path, module: Any) -> None:
    """CheckpointError unless the folder's architecture, by which engines go, is of the module that its type gave."""
    found, name = read_json(path / "config.json").get("architectures"), type(module).__name__
    family = sys.modules[type(module).__module__]
    if not isinstance(found, list) or not all(isinstance(one, str) and hasattr(family, one) for one in found):
        raise CheckpointError(
            f"{path}: architectures is {found!r}, and its model_type is of {name}; expected one of both"
        )


def _ignored(stored: Sequence[str], module: Any) -> list[str]:
    """Those tensors of the files that the module drops without a word."""
    patterns = [re.compile(one) for one in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()]
    return [name for name in stored if any(one.search(name) for one in patterns)]


def _is_drafts(name: str, module: Any) -> bool:
    """Whether a tensor is of a draft's own layers, or one that the module computes anew."""
    layer, config = re.search(r"\blayers\.(\d+)\.", name), module.config.get_text_config()
    drafts = sum(int(getattr(config, key, None) or 0) for key in DRAFT_KEYS)
    own = range(config.num_hidden_layers, config.num_hidden_layers + drafts)
    behind = layer is not None and int(layer.group(1)) in own
    return behind or bool(DRAFT_TENSORS.search(name) or COMPUTED_TENSORS.search(name))


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def shortened(names: Collection[Any]) -> str:
    return some(sorted(map(str, names)), 3)
