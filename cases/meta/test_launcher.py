"""The one file that an installation copies finds the command, of a checkout and of a wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCHER = "def main():\n    print('started', __file__)\n"


def started(site: Path, *, beside: Path) -> str:
    """What the `eaglecheck` of an installation prints."""
    command = [sys.executable, "-P", "-c", "from eaglecheck import main; main()"]
    path = os.pathsep.join([str(site), str(beside)])
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True, cwd="/"
    ).stdout


def furnished(folder: Path) -> Path:
    """A folder with a package `harness` whose launcher says where it is."""
    (folder / "harness").mkdir(parents=True)
    (folder / "harness" / "__init__.py").touch()
    (folder / "harness" / "launcher.py").write_text(LAUNCHER)
    return folder


def test_an_installed_checkout_starts_as_it_is_now_and_a_wheel_what_it_holds(tmp_path):
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    (copied,) = [name for name, place in wheel["force-include"].items() if place == "eaglecheck/__init__.py"]
    package = tmp_path / "site" / "eaglecheck"
    package.mkdir(parents=True)
    shutil.copy(ROOT / copied, package / "__init__.py")
    checkout = furnished(tmp_path / "checkout")
    assert started(tmp_path / "site", beside=checkout).split() == ["started", f"{checkout}/harness/launcher.py"]
    (checkout / "harness" / "launcher.py").write_text(LAUNCHER.replace("started", "changed, and longer"))
    assert started(tmp_path / "site", beside=checkout).startswith("changed")
    furnished(package)
    assert started(tmp_path / "site", beside=checkout).split()[1] == f"{package}/harness/launcher.py"
