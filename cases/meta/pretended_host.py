"""Stands in for the engine host: greets like an engine with one scheduler, boots at once, computes nothing.

Run by path with the control side's own interpreter. It must end as the real host does: with its connection.
"""

import os
import signal
import socket
import subprocess
import sys
import threading

from harness.both_sides import wire


def connect(path: str, role: str, pid: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path)
    wire.send(sock, {"op": "hello", "role": role, "pid": pid, "dp_rank": 0, "tp_rank": 0})
    return sock


def main() -> None:
    host = connect(sys.argv[1], "host", os.getpid())
    wire.receive(host)
    scheduler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    ranks = connect(sys.argv[1], "scheduler", scheduler.pid)
    wire.send(host, {"op": "booted"})
    threading.Thread(target=lambda: wire.receive(ranks), daemon=True).start()
    try:
        wire.receive(host)
    except wire.WireClosed:
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
