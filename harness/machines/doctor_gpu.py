"""The doctor's questions about NVIDIA cards, and what each unpacked release can run on them.

Like the rest of the doctor it must not change anything, nor import torch or sglang: releases are asked in processes of
their own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness.both_sides import gpus, leases
from harness.engines.envs import EngineEnv
from harness.machines import cards, fit, prebuild, slimming
from harness.machines.cards import Card
from harness.machines.diagnosis import Finding, Status

#: Runs in the release's environment, so it is not imported here.
ASK = Path(__file__).parents[1] / "engine_side" / "host" / "capabilities.py"
MARK = "eaglecheck-capabilities "
SECONDS = 180  # importing SGLang takes 16 s on an idle machine
FREE_MIB = 4096  # an engine with a tiny pair, its graphs and its CUDA context
DTYPES = "float16, bfloat16"  # sgl_kernel.rmsnorm has no float32, up to and with 0.4.5


def graphics(names: Sequence[str]) -> Iterator[Finding]:
    """The cards by nvidia-smi, and what compiles for them; `names` are those that the driver shows otherwise."""
    try:
        found = cards.ask()
    except cards.NoAnswer as error:
        yield Finding(
            name="GPU", status="warn", detail=f"nvidia-smi does not answer: {error}", mend="nvidia-smi  # shows why"
        )
        return
    if not found:
        detail = ", ".join(names) if names else "none: engines run on the CPU"
        yield Finding(name="GPU", status="ok", detail=detail)
        return
    yield from (_card(card) for card in found)
    yield from _leases()
    yield _torch()
    yield _cuda_compiler()


def _card(card: Card) -> Finding:
    detail = (
        f"{card.name}, {card.uuid}, {card.free / 1024:.1f} of {card.memory / 1024:.1f} GiB free, sm_"
        f"{card.capability.replace('.', '')}, driver {card.driver}"
    )
    if f"sm_{card.capability.replace('.', '')}" != slimming.CUDA_ARCH:
        return Finding(name="GPU", status="warn", detail=f"{detail}; bundles are made for {slimming.CUDA_ARCH}")
    if card.free < FREE_MIB:
        return Finding(
            name="GPU",
            status="warn",
            detail=f"{detail}; an engine wants {FREE_MIB / 1024:.0f} GiB",
            mend="nvidia-smi  # shows who holds the memory",
        )
    return Finding(name="GPU", status="ok", detail=detail)


def _leases() -> Iterator[Finding]:
    """How many engines may still start on each card, and who has the others."""
    try:
        lines = leases.describe()
    except gpus.CardError as error:
        yield Finding(name="GPU leases", status="warn", detail=str(error).replace("\n", ";"))
        return
    yield from (Finding(name="GPU leases", status="ok", detail=line) for line in lines)


def _torch() -> Finding:
    version = fit.torch_version()
    if "+cu" in version:
        return Finding(name="torch", status="ok", detail=version)
    detail = f"{version or 'none'} in this Python: no CUDA build, so a bundle cannot use it"
    return Finding(name="torch", status="warn", detail=detail)


def _cuda_compiler() -> Finding:
    compiler = prebuild.nvcc()
    if compiler is None:
        return Finding(
            name="CUDA compiler",
            status="warn",
            detail="no nvcc: kernels that SGLang compiles at first use cannot be",
            mend="export CUDA_HOME=/usr/local/cuda  # where a toolkit is",
        )
    said = subprocess.run([str(compiler), "--version"], capture_output=True, text=True, errors="replace").stdout
    release = re.search(r"release (\S+),", said)
    ninja = "" if shutil.which("ninja") else ", no ninja on PATH"
    return Finding(
        name="CUDA compiler",
        status="warn" if ninja else "ok",
        detail=f"{release[1] if release else 'unknown version'} at {compiler}{ninja}",
    )


def abilities(engines: Sequence[EngineEnv]) -> Iterator[Finding]:
    """What each release can run, all asked at once; nothing where there is no card to run it on."""
    if not engines or not cards.cards():
        return
    with ThreadPoolExecutor(max_workers=len(engines)) as pool:
        for engine, answer in zip(engines, pool.map(ask, engines), strict=True):
            yield judge(engine.version, answer)


def ask(engine: EngineEnv) -> dict[str, Any]:
    """What `capabilities` of the engine side says in the release's own environment; {'error': …} where it is silent."""
    path = os.pathsep.join(str(part) for part in engine.pythonpath)
    environ = {**os.environ, **dict(engine.environ), "PYTHONPATH": path}
    try:
        done = subprocess.run(
            [str(engine.python), "-P", str(ASK), MARK],
            capture_output=True,
            text=True,
            errors="replace",
            env=environ,
            timeout=SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return dict(json.loads(line.removeprefix(MARK)))
    tail = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
    return {"error": tail[-1][:200]}


def judge(version: str, answer: dict[str, Any]) -> Finding:
    """One release's answer as a finding: the first gap that stops it, else what runs and what does not."""
    name = f"SGLang {version} on GPU"
    again = "python3 -m harness.machines.unpack FILE  # its bundle, once more"
    if answer["error"]:
        return Finding(name=name, status="missing", detail=f"cannot be imported: {answer['error']}", mend=again)
    if not answer["card"]:
        detail = f"its torch {answer['torch']} (CUDA {answer['cuda']}) sees no card"
        return Finding(
            name=name, status="missing", detail=detail, mend="nvidia-smi  # is the driver older than its CUDA?"
        )
    backends: dict[str, str] = answer["backends"]
    if backends["triton"]:
        return Finding(name=name, status="missing", detail=f"no triton attention: {backends['triton']}", mend=again)
    runs = ", ".join(name for name, why in backends.items() if not why)
    graphs = f"no CUDA graphs ({answer['graphs']})" if answer["graphs"] else "eager and CUDA graphs"
    lacking = [f"no {name} ({why})" for name, why in backends.items() if why]
    detail = "; ".join([f"attention {runs}", graphs, DTYPES, *lacking])
    status: Status = "warn" if answer["graphs"] else "ok"
    return Finding(name=name, status=status, detail=detail, mend=_parts(version, backends))


def _parts(version: str, backends: dict[str, str]) -> str:
    """What to type, where a package index is, for the attention backends that a bundle leaves out."""
    absent = [name for name, why in backends.items() if why and name in slimming.PARTS]
    commands = [f"eaglecheck engines pack {version} --part {name} --output {name}.bundle" for name in absent]
    return f"{' && '.join(commands)}  # where an index is; then unpack it here" if commands else ""
