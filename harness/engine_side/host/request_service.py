"""Requests on their way to the engine, and its answers, one command at a time.

Engine side. It must not know what a scenario is.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ...both_sides import wire
from . import weights

#: Loop steps within which SGLang validates a request and either refuses it or sends it on.
SUBMIT_STEPS = 20
#: The name of the task that waits for new weights or memory; no request has it.
UPDATE = "@update"


async def serve(engine: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass requests to the engine; answer each with its outputs when it is asked for."""
    tasks: dict[str, asyncio.Task[Any]] = {}
    while True:
        length = int.from_bytes(await reader.readexactly(4), "big")
        command = json.loads(await reader.readexactly(length))
        if command["op"] == "submit":
            tasks[command["rid"]] = task = asyncio.create_task(_generate(engine, command))
            for _ in range(SUBMIT_STEPS):
                await asyncio.sleep(0)
            # A request that SGLang refuses is over before it reaches any scheduler: nobody must wait for it there.
            answer: dict[str, Any] = {"op": "submitted", "refused": task.done()}
        elif command["op"] == "abort":
            engine.tokenizer_manager.abort_request(rid=command["rid"])
            answer = {"op": "aborting"}
        elif command["op"] in ("pause", "resume"):
            await _pause_or_resume(engine, command)
            answer = {"op": f"{command['op']}d"}
        elif command["op"] in ("update", "memory"):
            try:
                answer = {"op": "updating", "messages": weights.messages(command)}
                tasks[UPDATE] = asyncio.create_task(weights.perform(engine, command))
            except weights.NotThere as error:
                answer = {"op": "error", "what": str(error)}
        elif command["op"] == "updated":
            success, message = await tasks.pop(UPDATE)
            answer = {"op": "updated", "success": success, "message": message}
        elif command["op"] == "collect":
            ends = await asyncio.gather(*(tasks.pop(rid) for rid in command["rids"]))
            answer = {"op": "collected", "ends": ends}
        else:
            answer = {"op": "error", "what": f"unknown command {command['op']!r}"}
        writer.write(wire.encode(answer))
        await writer.drain()


async def _pause_or_resume(engine: Any, command: dict[str, Any]) -> None:
    from sglang.srt.managers import io_struct

    if command["op"] == "pause":
        await engine.tokenizer_manager.pause_generation(io_struct.PauseGenerationReqInput(mode=command["mode"]))
    else:
        await engine.tokenizer_manager.continue_generation(io_struct.ContinueGenerationReqInput())


async def _generate(engine: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Its end, and what SGLang said about it; pieces: a streamed answer while it grew, the last is the whole."""
    beside = dict(command["generate"])
    if name := beside.get("custom_logit_processor"):
        from .logit_processors import pickled

        beside["custom_logit_processor"] = pickled(name)
    generate = _from_embeddings(engine) if beside.pop("input_embeds", False) else engine.async_generate
    if command["sampling"].get("n", 1) > 1:
        _name_samples()
    pieces = list[dict[str, Any]]()
    try:
        result = await generate(
            input_ids=command["prompt"],
            sampling_params=command["sampling"],
            rid=command["rid"],
            priority=command["priority"],
            **beside,
            **({} if command["dp_rank"] is None else {"routed_dp_rank": command["dp_rank"]}),
            **_meeting_point(command),
        )
        if command["generate"].get("stream"):
            # At once: SGLang goes on writing into the lists of a piece.
            pieces = [_answer(piece) async for piece in result]
            whole = [piece for piece in pieces if piece["meta"].get("finish_reason")] or pieces[-1:]
        else:
            results = result if isinstance(result, list) else [result]
            whole = [_answer({"index": index, **one}) for index, one in enumerate(results)]
    except Exception as error:  # an aborted or refused request is a result
        return {"rid": command["rid"], "reason": "error", "error": str(error), "output_ids": [], "cached_tokens": 0}
    ends = [_end(answer, [piece for piece in pieces if piece["index"] == answer["index"]]) for answer in whole]
    return ends[0] if len(ends) == 1 else {"samples": sorted(ends, key=lambda end: end["index"])}


def _from_embeddings(engine: Any) -> Callable[..., Awaitable[Any]]:
    """As `Engine.async_generate`, which takes no embeddings: SGLang's server does, in the same request."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    async def generate(*, input_ids: list[int], **given: Any) -> Any:
        manager = engine.tokenizer_manager
        request = GenerateReqInput(input_embeds=_embedded(manager.server_args.model_path, input_ids), **given)
        return await anext(manager.generate_request(request, None))

    return generate


def _embedded(folder: str, prompt: list[int]) -> list[list[float]]:
    """The checkpoint's own embedding of each token, as whoever has no ids would send them."""
    from safetensors import safe_open

    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                if name.endswith("embed_tokens.weight"):
                    found: list[list[float]] = file.get_tensor(name)[prompt].float().tolist()
                    return found
    raise LookupError(f"no embedding in {folder}")


def _end(answer: dict[str, Any], pieces: list[dict[str, Any]]) -> dict[str, Any]:
    meta = answer["meta"]
    return {
        "rid": meta["id"],
        "index": answer["index"],
        "reason": (meta.get("finish_reason") or {}).get("type", "unknown"),
        "output_ids": answer["output_ids"],
        "cached_tokens": int(meta.get("cached_tokens", 0)),
        "meta": meta,
        "pieces": pieces,
        "text": answer["text"],
        "matched": (meta.get("finish_reason") or {}).get("matched"),
    }


#: How many requests SGLang has made of one with n > 1, by the name that they all begin with.
_SAMPLES: dict[str, int] = {}


def _name_samples() -> None:
    """Of a request `a@1` SGLang makes some with names by chance: they become `a.0@1`, `a.1@1`, … in their order.

    0.5.17 asks for names that begin with the request's.
    """
    request: Any = importlib.import_module("sglang.srt.managers.io_struct").GenerateReqInput

    def regenerate_rid(self: Any, **_prefix: Any) -> str:
        name, _, tag = self.rid.removesuffix("_0").rpartition("@")
        number = _SAMPLES[self.rid] = _SAMPLES.get(self.rid, -1) + 1
        self.rid = f"{name}.{number}@{tag}"
        return str(self.rid)

    request.regenerate_rid = regenerate_rid


def _answer(result: dict[str, Any]) -> dict[str, Any]:
    """A copy of an answer, or of a piece of one: its tokens, and what SGLang says beside them that JSON can hold.

    An answer that names no tokens has none: what it should have had is for checks to say.
    """
    said = {
        "index": result.get("index", 0),
        "output_ids": result.get("output_ids", []),
        "text": result.get("text"),
        "meta": result["meta_info"],
    }
    copied: dict[str, Any] = json.loads(json.dumps(said, default=str))
    return copied


def _meeting_point(command: dict[str, Any]) -> dict[str, Any]:
    """Where the two sides of a hand-over find each other; nothing is ever connected to."""
    if command.get("room") is None:
        return {}
    host = "127.0.0.1"
    if command.get("fake"):
        host = importlib.import_module("sglang.srt.disaggregation.utils").FAKE_BOOTSTRAP_HOST
    return {"bootstrap_host": host, "bootstrap_port": 1, "bootstrap_room": command["room"]}
