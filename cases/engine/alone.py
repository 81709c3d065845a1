"""Runs an exported file as a stranger would: by the engine environment's own Python, with nothing of ours to import."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from harness.engines.envs import EngineEnv

#: Read by every Python process of the run before anything else.
REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("harness", "reference", "cases", "reports", "eaglecheck_engine"):
            raise ImportError(f"refused: {name}")
sys.meta_path.insert(0, Refuse())
"""


def run_alone(
    file: Path, env: EngineEnv, folder: Path, *, patch: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The file's end, behind which nothing of it is left where temporary files are.

    patch: what is changed in a copy of the release's package, made in the folder.
    """
    guard = folder / "guard"
    guard.mkdir(exist_ok=True)
    (guard / "sitecustomize.py").write_text(REFUSE)
    path = [guard, *([] if patch is None else [patched(env, patch, folder / "patched")]), *env.pythonpath]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    command = [env.python, file]
    with tempfile.TemporaryDirectory() as temporary:  # its name is short enough for sockets
        environment["TMPDIR"] = temporary
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
        assert not os.listdir(temporary)
    return done


def patched(env: EngineEnv, patch: Path, folder: Path) -> Path:
    """A copy of the release's package, links but for what the patch changes."""
    package = env.package
    assert package is not None, env.why
    shutil.copytree(package, folder / "sglang", copy_function=os.symlink)
    for line in patch.read_text().splitlines():
        if line.startswith("--- a/python/"):
            name = line.removeprefix("--- a/python/").split("\t")[0]
            (folder / name).unlink()
            shutil.copy(package.parent / name, folder / name)
    subprocess.run(["patch", "-p2", "--quiet", "--input", patch], cwd=folder, check=True)
    return folder
