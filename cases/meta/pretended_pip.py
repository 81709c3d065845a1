"""A pip that installs nothing: what the tests of environments use instead of the network."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.engines import dependencies

SOURCE = b"# sglang"


def quiet(_line: str) -> None:
    """A progress callback for tests that do not look at it."""


@dataclass
class PretendedPip:
    """Stands in for `dependencies.run`: leaves the files that venv and pip would leave, and keeps the commands."""

    commands: list[str] = field(default_factory=list)
    fail: Callable[[str], dependencies.Finished | None] = lambda command: None
    seconds: float = 0.0

    def __call__(self, command: Sequence[str], *, lock: int, progress: dependencies.Progress) -> dependencies.Finished:
        os.fstat(lock)  # a closed lock would let a second installer in
        text = " ".join(command)
        self.commands.append(text)
        time.sleep(self.seconds)
        if (ended := self.fail(text)) is not None:
            return ended
        if "-m venv" in text:
            python = dependencies.interpreter(Path(command[-1]))
            python.parent.mkdir(parents=True)
            python.touch()
        elif "--target" in command:
            self._wheel(Path(command[command.index("--target") + 1]), command[-1])
        else:
            self._torch(Path(command[0]).parents[1])
        return dependencies.Finished(code=0)

    @staticmethod
    def _torch(folder: Path) -> None:
        torch = dependencies.torch_folder(folder)
        torch.mkdir(parents=True)
        info = torch.with_name("torch-2.13.0+cpu.dist-info")
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n")

    @staticmethod
    def _wheel(site: Path, requirement: str) -> None:
        package, info = site / "sglang", site / f"sglang-{requirement.split('==')[1]}.dist-info"
        package.mkdir()
        info.mkdir()
        (package / "__init__.py").write_bytes(SOURCE)
        digest = base64.urlsafe_b64encode(hashlib.sha256(SOURCE).digest()).rstrip(b"=").decode()
        (info / "RECORD").write_text(f"sglang/__init__.py,sha256={digest},{len(SOURCE)}\n")

    def count(self, part: str) -> int:
        return sum(part in command for command in self.commands)
