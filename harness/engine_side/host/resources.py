"""Cards and ports that an engine takes, and the arguments that its release knows.

Engine side: a card is taken before anything of SGLang or torch is imported.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from ...both_sides import gpus, leases, wire

#: With DP attention SGLang takes the ports from `port` + 233 on: eleven with eight ranks. It names `port` + 10000 too.
SGLANG_PORT_DELTA, PORTS, FIRST_PORT, LAST_PORT = 233, 16, 20000, 50000


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
        held = leases.take_each(leases.Request(**boot["lease"]), count=boot["arguments"].get("tp_size", 1), say=say)
    except gpus.CardError as error:
        wire.send(sock, {"op": "no_lease", "error": str(error)})
        wire.receive(sock)  # ended from the other side, once it has read this
        raise
    os.environ[gpus.VISIBLE] = ",".join(lease.card.uuid for lease in held)
    others = [lease.plain() for lease in held[1:]]
    wire.send(sock, {"op": "leased", "lease": held[0].plain() | ({"others": others} if others else {})})
    return held


def _free_ports(number: int) -> int:
    """A port for SGLang to count from: of several ranks it takes fixed ones behind it, and engines run side by side.

    number: different for engines that look at the same time; each begins at a place of its own.
    """
    blocks = (LAST_PORT - FIRST_PORT) // PORTS
    for further in range(blocks):
        first = FIRST_PORT + PORTS * ((number + further) % blocks)
        if all(_is_free(port) for port in range(first, first + PORTS)):
            return first - SGLANG_PORT_DELTA
    raise RuntimeError(f"no {PORTS} ports in a row are free between {FIRST_PORT} and {LAST_PORT}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def engine_arguments(boot: dict[str, Any]) -> dict[str, Any]:
    """The boot record as `sglang.Engine` keywords, less those this release does not know."""
    from sglang.srt.server_args import ServerArgs

    known: set[str] = set()
    for base in ServerArgs.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
    arguments = dict(boot["arguments"])
    if arguments.get("enable_dp_attention"):
        arguments["port"] = _free_ports(os.getpid())
    elif (
        "nccl_port" in known
    ):  # SGLang looks for a free one itself, and of many engines that start at once two may find it
        arguments["nccl_port"] = _free_ports(os.getpid()) + SGLANG_PORT_DELTA
    optional = {name: value for name, value in boot["optional_arguments"].items() if name in known}
    return {**arguments, **optional}


def gpu_used(held: list[Any]) -> int | None:
    """MiB this engine has on its cards now that it is up; None without a lease, or where the driver does not say."""
    try:
        used = [leases.used_mib(lease, os.getpid()) for lease in held]
    except gpus.CardError:  # the engine is up all the same
        return None
    known = [size for size in used if size is not None]
    return sum(known) if known and len(known) == len(used) else None
