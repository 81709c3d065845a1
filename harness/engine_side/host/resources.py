"""Cards that an engine takes, and the arguments that its release knows.

Engine side: a card is taken before anything of SGLang or torch is imported.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from ...both_sides import gpus, leases, port_leases, wire
from .processes import ENV_SOCKET

#: Arguments that are a file's path to SGLang, and what the file holds to us.
ADAPTIVE, TOKEN_MAP = "speculative_adaptive_config", "speculative_token_map"


def take_lease(sock: socket.socket, boot: dict[str, Any]) -> list[Any]:
    """Hold a share of one GPU a rank for as long as this process lives, and see no other card; [] where none is asked.

    Returns the leases in the order of their cards.
    """
    if boot.get("lease") is None:
        return []

    def say(text: str) -> None:
        print(text, flush=True)  # into the engine's log, where a test session can be watched
        wire.send(sock, {"op": "waiting", "text": text})

    try:
        held = leases.hold_cards(leases.Request(**boot["lease"]), count=boot["arguments"].get("tp_size", 1), say=say)
    except gpus.CardError as error:
        wire.send(sock, {"op": "no_lease", "error": str(error)})
        wire.receive(sock)  # ended from the other side, once it has read this
        raise
    others = [lease.plain() for lease in held[1:]]
    wire.send(sock, {"op": "leased", "lease": held[0].plain() | ({"others": others} if others else {})})
    return held


def engine_arguments(boot: dict[str, Any], ports: port_leases.Ports) -> dict[str, Any]:
    """The boot record and the ports as `sglang.Engine` keywords, less those this release does not know."""
    from sglang.srt.server_args import ServerArgs

    known: set[str] = set()
    for base in ServerArgs.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
    optional = {**ports.arguments, **boot["optional_arguments"]}
    arguments = {**boot["arguments"], **{name: value for name, value in optional.items() if name in known}}
    if ADAPTIVE in arguments:  # SGLang reads it from a file; the engine's own folder goes with it
        file = Path(os.environ[ENV_SOCKET]).with_name("adaptive.json")
        file.write_text(json.dumps(arguments[ADAPTIVE]))
        arguments[ADAPTIVE] = str(file)
    if TOKEN_MAP in arguments:
        import torch

        file = Path(os.environ[ENV_SOCKET]).with_name("token_map.pt")
        torch.save(arguments[TOKEN_MAP], file)
        arguments[TOKEN_MAP] = str(file)
    return arguments


def gpu_used(held: list[Any]) -> int | None:
    """MiB this engine has on its cards now that it is up; None without a lease, or where the driver does not say."""
    try:
        used = [leases.used_mib(lease, os.getpid()) for lease in held]
    except gpus.CardError:  # the engine is up all the same
        return None
    known = [size for size in used if size is not None]
    return sum(known) if known and len(known) == len(used) else None
