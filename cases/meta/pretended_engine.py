"""A home folder whose engines are shell scripts: real commands run against it, and no SGLang takes part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.engines import dependencies, envs

#: Bodies of the pretended interpreter. $3 is the control socket. It imports nothing, so nothing is forked from it.
ENDS = "echo 'Traceback (most recent call last):'\necho \"ModuleNotFoundError: No module named 'sglang'\"\nexit 1"
#: What a command begins with that knows of no SGLang in its own interpreter.
HIDDEN = "from harness.engines import envs; envs.current = lambda: None; "
SLEEPS = "echo started\nexec sleep 600"


def furnish(
    home: Path, *, body: str = ENDS, versions: Sequence[str] = envs.SUPPORTED, published: Sequence[str] = ()
) -> None:
    """Make `home` (which EAGLECHECK_HOME must name) look as if the releases were installed in it.

    published: what the index had when it was asked for all releases, long before it is to be asked again.
    """
    if published:
        home.mkdir(parents=True)
        (home / "published.json").write_text(json.dumps({"versions": list(published), "when": 1e11}))
    folder = dependencies.location()
    assert folder.parent == home
    dependencies.torch_folder(folder).mkdir(parents=True)
    interpreter = dependencies.interpreter(folder)
    interpreter.parent.mkdir()
    interpreter.write_text(f'#!/bin/sh\n[ "$3" = fork-server ] && exit 1\n{body}\n')
    interpreter.chmod(0o755)
    dependencies.write_marker(
        folder, {"key": dependencies.key(), "python": dependencies.python_tag(), "torch": "2.13.0+cpu"}
    )
    for version in versions:
        engine = home / "engines" / version
        (engine / "site" / "sglang").mkdir(parents=True)
        (engine / "site" / "sglang" / "__init__.py").write_text("")
        dependencies.write_marker(
            engine,
            {"version": version, "closure": dependencies.key(), "python": dependencies.python_tag(), "record": ""},
        )


def start(*arguments: str, cwd: Path, home: Path | None = None, **variables: str) -> subprocess.Popen[str]:
    """The real command, as a process of its own. home: where its engines are, whatever SGLang this interpreter has."""
    return subprocess.Popen(
        [sys.executable, "-c", f"{HIDDEN if home else ''}from harness.cli.main import app; app()", *arguments],
        cwd=cwd,
        env={**os.environ, **({"EAGLECHECK_HOME": str(home)} if home else {}), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
