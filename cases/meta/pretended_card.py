"""GPUs that are not there: an `nvidia-smi` on PATH that prints what a folder says, and a folder for their leases.

What it prints has the form of a recorded answer (driver 580, `--format=csv,noheader,nounits`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

#: One H100 as it stands when nothing runs there: index, uuid, name, memory.used, memory.free.
H100 = "GPU-4f1f0b3a-6a0c-7c5e-9a9e-0d7f2a8c1b11"
SECOND = "GPU-9e02c7d4-11aa-4b0d-8f3c-5a6b7c8d9e22"
IDLE = f"0, {H100}, NVIDIA H100 80GB HBM3, 0, 81079"
IDLE_SECOND = f"1, {SECOND}, NVIDIA H100 80GB HBM3, 0, 81079"

#: Answers by query, and an exit code and a delay that may be set from outside.
SMI = """#!{python}
import json, sys, time
said = json.load(open({answers!r}))
time.sleep(said.get("seconds", 0))
key = "apps" if "compute-apps" in sys.argv[1] else "cards"
for line in said[key]:
    print(line)
sys.exit(said.get("code", 0))
"""


class PretendedCards:
    """Cards of one folder. Use `environment` for the processes that shall see them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.leases = folder / "leases"
        (folder / "bin").mkdir(parents=True)
        smi = folder / "bin" / "nvidia-smi"
        smi.write_text(SMI.format(python=sys.executable, answers=str(folder / "answers.json")))
        smi.chmod(0o755)
        self.say()

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "EAGLECHECK_LEASES": str(self.leases)}

    def say(self, *, cards: Sequence[str] = (IDLE,), apps: Sequence[str] = (), **more: float) -> None:
        """What nvidia-smi answers from now on. more: `code` it exits with, `seconds` it takes."""
        _replace(self.folder / "answers.json", {"cards": list(cards), "apps": list(apps), **more})


def used(mib: int, *, card: str = IDLE) -> str:
    """The card's line when processes have so much of it."""
    *start, was, free = card.split(", ")
    return ", ".join([*start, str(mib), str(int(free) + int(was) - mib)])


def app(pid: int, *, uuid: str = H100, name: str = "python3", mib: int | str = 2048) -> str:
    """A line of --query-compute-apps: gpu_uuid, pid, process_name, used_memory."""
    return f"{uuid}, {pid}, {name}, {mib}"


def _replace(path: Path, content: Mapping[str, object]) -> None:
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(content))
    draft.replace(path)
