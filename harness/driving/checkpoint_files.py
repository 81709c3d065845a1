"""A checkpoint folder of the user's as its files show it, without torch and without reading a weight.

Everything that a file name, a config or a file's length can show is refused here: what is not there, is damaged, cut
off, or not a plain file.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors

from harness.contract import plain_files
from harness.contract.json_files import NotJSON, parsed
from harness.contract.usage import UsageError

OWN = (
    "name a folder with config.json and *.safetensors or pytorch_model*.bin, or leave --target and --draft out to use "
    "the tiny pair"
)
INDEXES = {"*.safetensors": "model.safetensors.index.json", "pytorch_model*.bin": "pytorch_model.bin.index.json"}
#: How a .bin begins that was written before torch saved zip files; its tensors' names cannot be seen from outside.
OLD_BIN = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
#: Types of models with linear attention whose kernels run on a CPU, or are replaced there.
ON_A_CPU = ("qwen3_next", "qwen3_5_text")
#: Keys of models with layers of linear attention.
LINEAR = ("linear_num_value_heads", "linear_attn_config")
#: What safetensors and torch's storages call a dtype -> torch's name.
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BoolStorage": "bool",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
}
#: Keys that say how many positions a model was made for, in the order in which SGLang asks for them.
POSITIONS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
#: An architecture of each, for an example.
EXAMPLES = {"--target": "LlamaForCausalLM", "--draft": "LlamaForCausalLMEagle3"}
#: Keys that are numbers above 0 wherever a config has them.
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rope_theta",
    "factor",
)


class Tensor(NamedTuple):
    """What a file says of a tensor without it being read."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """config: its config.json; generation: its generation_config.json; tensors: empty where they cannot be seen."""

    folder: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    weights: tuple[Path, ...]
    tensors: Mapping[str, Tensor]

    def of_text(self, key: str) -> Any:
        """A key of the language model: of the config itself, else of what it says of its text part."""
        text = self.config.get("text_config")
        inner = text.get(key) if isinstance(text, Mapping) else None
        return self.config.get(key, inner)

    @property
    def architecture(self) -> str:
        return str(self.config["architectures"][0])

    @property
    def _floats(self) -> list[Tensor]:
        """Its parameters; heads carry tables of token ids too."""
        return [one for one in self.tensors.values() if "float" in one.dtype]

    @property
    def parameters(self) -> int | None:
        return sum(math.prod(one.shape) for one in self._floats) if self.tensors else None

    @property
    def mtp_parameters(self) -> int | None:
        """Those of layers of MTP (NextN) beside the model's own."""
        layers = self.of_text("num_hidden_layers")
        if not self.tensors:
            return None
        return sum(
            math.prod(one.shape)
            for name, one in self.tensors.items()
            if "float" in one.dtype and (any(_mtp_numbers(name)) or _layer(name) >= (layers or math.inf))
        )

    @property
    def dtype(self) -> str:
        """What the weights are stored in; several where they are mixed, as quantised ones are."""
        said = self.of_text("torch_dtype") or self.of_text("dtype")
        return ", ".join(sorted({one.dtype for one in self._floats})) or str(said or "unknown")

    @property
    def positions(self) -> int | None:
        """The longest context that SGLang boots it for; None where the config does not say."""
        said = next((self.of_text(key) for key in POSITIONS if self.of_text(key) is not None), None)
        if not isinstance(said, int):
            return None
        rope = self.of_text("rope_scaling") or {}
        of_longer = "original_max_position_embeddings" in rope or rope.get("rope_type") == "llama3"
        return int(said * (1 if of_longer else rope.get("factor") or 1))

    @property
    def text_alone(self) -> bool:
        """Whether it is a model that reads images too, in a folder without what prepares images for it."""
        files = ("preprocessor_config.json", "processor_config.json")
        return "vision_config" in self.config and not any((self.folder / name).exists() for name in files)

    @property
    def linear_attention(self) -> str:
        """The key that asks for layers of linear attention that run on a GPU alone, empty if none does."""
        return "" if self.of_text("model_type") in ON_A_CPU else self.recurrent

    @property
    def recurrent(self) -> str:
        """The key that asks for layers that keep a recurrent state, empty if none does."""
        kinds = self.of_text("layer_types")
        if isinstance(kinds, list) and "linear_attention" in kinds:
            return "layer_types"
        return next((key for key in LINEAR if self.of_text(key)), "")

    @property
    def eos(self) -> tuple[int, ...]:
        """The tokens that end a text, as config.json and generation_config.json name them."""
        return tuple(one for one in self._named_eos if one < self._vocab)

    @property
    def eos_beyond(self) -> tuple[int, ...]:
        """The ids that they name for that, and that are no tokens of this vocabulary."""
        return tuple(one for one in self._named_eos if one >= self._vocab)

    @property
    def _vocab(self) -> float:
        said = self.of_text("vocab_size")
        return said if isinstance(said, int) else math.inf

    @property
    def _named_eos(self) -> list[int]:
        found = set[int]()
        for said in (self.of_text("eos_token_id"), self.generation.get("eos_token_id")):
            ids = said if isinstance(said, list) else [said]
            found |= {one for one in ids if isinstance(one, int) and not isinstance(one, bool)}
        return sorted(found)


def read_checkpoint(option: str, folder: Path) -> CheckpointFiles:
    """What a folder holds; UsageError, with the option that named it, for what no engine should be booted for."""
    where = f"{option} {folder}"
    if not folder.is_dir():
        raise UsageError(f"{where}: no such folder\n  {OWN}")
    if not (folder / "config.json").exists():
        raise UsageError(f"{where}: no config.json there, so it is not a checkpoint folder\n  {OWN}")
    _check_plain(where, folder)
    config = _object(where, folder / "config.json")
    file = folder / "generation_config.json"
    generation = _object(where, file) if file.exists() else {}
    _check_architectures(where, config, example=EXAMPLES[option])
    _check_numbers(where, config)
    for said in (config.get("eos_token_id"), generation.get("eos_token_id")):
        _check_eos(where, said)
    weights = _weight_files(where, folder)
    return CheckpointFiles(
        folder=folder.resolve(),
        config=config,
        generation=generation,
        weights=weights,
        tensors={name: one for file in weights for name, one in _tensors(where, file).items()},
    )


def _check_architectures(where: str, config: Mapping[str, Any], *, example: str) -> None:
    """UsageError without the names by which SGLang finds the model's class."""
    said = config.get("architectures")
    if not isinstance(said, list) or not said or not all(isinstance(one, str) and one for one in said):
        found = f" (it is {said!r})" if "architectures" in config else ""
        raise UsageError(
            f"{where}: config.json has no list of names `architectures`{found}, by which SGLang finds a model's class\n"
            f'  add the line as it was published, such as  "architectures": ["{example}"],'
        )


def _check_numbers(where: str, config: Mapping[str, Any]) -> None:
    """UsageError for a size or a factor of rotation that is no number above 0."""
    nested = [one for one in config.values() if isinstance(one, dict)]
    for one in (config, *nested):
        for key in SIZES:
            said = one.get(key)
            if said is not None and (isinstance(said, bool) or not isinstance(said, int | float) or said <= 0):
                raise UsageError(
                    f"{where}: {key} is {said!r} in config.json\n  allowed: a number above 0, as it was published"
                )


def _check_eos(where: str, said: object) -> None:
    """UsageError for an eos_token_id that is no token id."""
    for one in said if isinstance(said, list) else [said]:
        if one is not None and (isinstance(one, bool) or not isinstance(one, int) or one < 0):
            raise UsageError(f"{where}: eos_token_id is {said!r}\n  allowed: a token id, a list of them, or null")


def _check_plain(where: str, folder: Path) -> None:
    """UsageError for anything but files and folders in there: SGLang looks at more of them than we do."""
    for path in sorted(folder.iterdir()):
        try:
            if not path.is_dir():
                plain_files.check(path)
        except OSError as error:
            raise UsageError(
                f"{where}: {path.name} cannot be read: {error.strerror}\n  leave it out, or {OWN}"
            ) from error


def _object(where: str, file: Path) -> dict[str, Any]:
    try:
        found = parsed(plain_files.content(file))
    except OSError as error:
        raise UsageError(f"{where}: {file.name} cannot be read: {error.strerror}\n  {OWN}") from error
    except NotJSON as error:
        raise UsageError(f"{where}: {file.name} is not JSON: {error}\n  {OWN}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{where}: {file.name} holds no JSON object\n  {OWN}")
    return found


def _weight_files(where: str, folder: Path) -> tuple[Path, ...]:
    """Those SGLang reads: of safetensors and .bin the former, and all that their index names."""
    for pattern, index in INDEXES.items():
        files = sorted(folder.glob(pattern))
        if not files:
            continue
        named = _object(where, folder / index).get("weight_map") if (folder / index).exists() else None
        if isinstance(named, dict):
            files = [folder / name for name in sorted(set(map(str, named.values())))]
            if missing := [file.name for file in files if not file.exists()]:
                raise UsageError(
                    f"{where}: {index} names {missing[0]}, which is not there"
                    f"{f' ({len(missing)} such files)' if len(missing) > 1 else ''}\n  copy the whole checkpoint"
                )
        return tuple(files)
    raise UsageError(f"{where}: no *.safetensors or pytorch_model*.bin file there\n  {OWN}")


def _tensors(where: str, file: Path) -> dict[str, Tensor]:
    """Empty for a .bin of the old kind."""
    try:
        return _of_bin(file) if file.suffix == ".bin" else _of_safetensors(file)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, pickle.UnpicklingError, EOFError) as error:
        raise UsageError(f"{where}: {file.name} is damaged or cut off\n  copy it again, whole") from error


def _of_safetensors(file: Path) -> dict[str, Tensor]:
    with safetensors.safe_open(file, framework="numpy") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        return {
            name: Tensor(DTYPES.get(one.get_dtype(), one.get_dtype()), tuple(one.get_shape()))
            for name, one in slices.items()
        }


def _of_bin(file: Path) -> dict[str, Tensor]:
    """Of torch's zip file: its pickle says names, dtypes and shapes, and each weight is a member of the file."""
    with file.open("rb") as opened:
        if opened.read(len(OLD_BIN)) == OLD_BIN:
            return {}
    try:
        with zipfile.ZipFile(file) as members:
            (name,) = [one for one in members.namelist() if one.endswith("/data.pkl")]
            with members.open(name) as pickled:
                found = _Names(pickled).load()
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from error
    return {str(key): value for key, value in dict(found).items() if isinstance(value, Tensor)}


class _Names(pickle.Unpickler):
    """Reads a state dict as names with dtypes and shapes; builds nothing else, whatever the pickle asks for."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "OrderedDict":
            return dict
        if name == "_rebuild_tensor_v2":
            return lambda storage, _offset, shape, *_rest: Tensor(storage, tuple(shape))
        if name == "_rebuild_parameter":
            return lambda tensor, *_rest: tensor
        if module == "torch" and name.endswith("Storage"):
            return DTYPES.get(name, name)
        raise pickle.UnpicklingError(f"a state dict has no {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid[1]


def layers_of_mtp(checkpoint: CheckpointFiles) -> int:
    """How many MTP (NextN) layers a target's own checkpoint holds, as its config and tensors' names show."""
    said = next(filter(None, map(checkpoint.of_text, ("num_nextn_predict_layers", "mtp_num_hidden_layers"))), None)
    numbers = {number for name in checkpoint.tensors for number in _mtp_numbers(name)}
    return said if isinstance(said, int) else len(numbers)


def _layer(name: str) -> int:
    """Which layer a tensor is of; -1 if of none."""
    parts = name.split(".")
    numbers = [parts[place + 1] for place, part in enumerate(parts[:-1]) if part == "layers"]
    return int(numbers[0]) if numbers and numbers[0].isdigit() else -1


def _mtp_numbers(name: str) -> Iterator[str]:
    parts = name.split(".")
    if any(part.startswith("mtp") for part in parts):
        yield next((part for part in parts if part.isdigit()), "0")
