"""New weights, and memory given back and taken again, while SGLang serves: its own messages, one a scheduler step.

Engine side. It must not know what a scenario is.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

#: What opens and ends an update from tensors, where a release has sessions.
BEGIN, END = "BeginWeightUpdateReqInput", "EndWeightUpdateReqInput"
DISK, TENSORS = "UpdateWeightFromDiskReqInput", "UpdateWeightsFromTensorReqInput"
MEMORY = {"release": "ReleaseMemoryOccupationReqInput", "resume": "ResumeMemoryOccupationReqInput"}


class NotThere(LookupError):
    """What this release cannot be asked for."""


def messages(command: dict[str, Any]) -> list[str]:
    """What will arrive at the scheduler, in this order; NotThere for what the release has no message for."""
    if command["op"] == "memory":
        return [MEMORY[command["what"]]]
    if command["source"] == "disk":
        return [DISK]
    io: Any = importlib.import_module("sglang.srt.managers.io_struct")
    if hasattr(io, BEGIN):
        return [BEGIN, TENSORS, END]
    if command["selector"] == "draft":
        raise NotThere("this release has no update of the draft alone, only of the target, or of both by one list")
    return [TENSORS]


async def perform(engine: Any, command: dict[str, Any]) -> tuple[bool, str]:
    """Whether it succeeded, and SGLang's words of the message that did not, else of the last."""
    io: Any = importlib.import_module("sglang.srt.managers.io_struct")
    manager = engine.tokenizer_manager
    if command["op"] == "memory":
        name = f"{command['what']}_memory_occupation"
        await getattr(manager, name)(getattr(io, MEMORY[command["what"]])(), None)
        return True, f"{name} came back"
    if command["source"] == "disk":
        asked = io.UpdateWeightFromDiskReqInput(model_path=command["folder"], load_format=None)
        return _said(await manager.update_weights_from_disk(asked, None))
    selector, sessions = command["selector"], hasattr(io, BEGIN)
    whom = {"selector": selector} if sessions else {"disable_draft_model": selector == "target"}
    data = _serialized(command["files"], ranks=command["ranks"])
    asked = io.UpdateWeightsFromTensorReqInput(serialized_named_tensors=data, **whom)
    said = [_said(await manager.begin_weight_update(getattr(io, BEGIN)(selector=selector), None))] if sessions else []
    said.append(_said(await manager.update_weights_from_tensor(asked, None)))
    said += [_said(await manager.end_weight_update(getattr(io, END)(), None))] if sessions else []
    return next((one for one in said if not one[0]), said[-1])


def _said(result: Any) -> tuple[bool, str]:
    """Releases answer with a pair, with a pair and a count, or with a record."""
    if isinstance(result, (tuple, list)):
        return bool(result[0]), str(result[1])
    return bool(result.success), str(result.message)


def _serialized(files: Sequence[str], *, ranks: int) -> list[bytes]:
    """Every tensor of the files, as SGLang's own engine sends them: one payload a TP rank."""
    from safetensors.torch import load_file
    from sglang.srt.utils import MultiprocessingSerializer

    named = [(name, tensor) for file in files for name, tensor in load_file(file).items()]
    return [MultiprocessingSerializer.serialize(named) for _ in range(ranks)]
