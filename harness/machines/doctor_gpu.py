"""The doctor's probes of NVIDIA cards, and what each unpacked release can run on them.

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from harness.both_sides import gpus, leases
from harness.engines.envs import EngineEnv
from harness.machines import bundle_contents, fit, prebuild
from harness.machines.fit import Card

#: Runs in the release's environment, so it is not imported here.
ASK = Path(__file__).parents[1] / "engine_side" / "host" / "capabilities.py"
MARK = "eaglecheck-capabilities "
SECONDS = 180  # importing SGLang takes 16 s on an idle machine
FREE_MIB = 4096  # an engine with a tiny pair, its graphs and its CUDA context
DTYPES = "float16, bfloat16"  # sgl_kernel.rmsnorm has no float32, up to and with 0.4.5


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a probe. `missing` stops a run, `warn` does not; `fix` is what to type, where that helps.

    name: what it is about, where that is not what the probe is called.
    """

    status: Literal["ok", "warn", "missing"]
    detail: str
    fix: str = ""
    name: str = ""


ok, warn, missing = partial(Answer, "ok"), partial(Answer, "warn"), partial(Answer, "missing")


def by_driver(root: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Names of the cards that the driver shows without any program or library."""
    lines = (line for path in sorted(root.glob("*/information")) for line in path.read_text().splitlines())
    return [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]


def graphics() -> Iterator[Answer]:
    """The cards by nvidia-smi, who leases them, and what compiles for them."""
    try:
        found = fit.ask_cards()
    except gpus.SmiError as error:
        yield warn(str(error).splitlines()[0], "nvidia-smi  # shows why")
        return
    if not found:
        yield ok(", ".join(by_driver()) or "none: engines run on the CPU")
        return
    yield from map(_card, found)
    yield from _leases()
    version = fit.torch_version()
    lacking = f"{version or 'none'} in this Python: no CUDA build, so a bundle cannot use it"
    yield ok(version, name="torch") if "+cu" in version else warn(lacking, name="torch")
    yield _cuda_compiler()


def _card(card: Card) -> Answer:
    architecture = f"sm_{card.capability.replace('.', '')}"
    detail = (
        f"{card.name}, {card.uuid}, {card.free / 1024:.1f} of {card.memory / 1024:.1f} GiB free, {architecture}, "
        f"driver {card.driver}"
    )
    if architecture != bundle_contents.CUDA_ARCH:
        return warn(f"{detail}; bundles are made for {bundle_contents.CUDA_ARCH}")
    if card.free < FREE_MIB:
        return warn(f"{detail}; an engine wants {FREE_MIB / 1024:.0f} GiB", "nvidia-smi  # shows who holds the memory")
    return ok(detail)


def _leases() -> Iterator[Answer]:
    """How many engines may still start on each card, and who has the others."""
    try:
        yield from (ok(line, name="GPU leases") for line in leases.describe())
    except gpus.CardError as error:
        yield warn(str(error).replace("\n", ";"), name="GPU leases")


def _cuda_compiler() -> Answer:
    compiler = prebuild.nvcc()
    if compiler is None:
        detail = "no nvcc: kernels that SGLang compiles at first use cannot be"
        return warn(detail, "export CUDA_HOME=/usr/local/cuda  # where a toolkit is", name="CUDA compiler")
    said = subprocess.run([str(compiler), "--version"], capture_output=True, text=True, errors="replace").stdout
    release = re.search(r"release (\S+),", said)
    detail = f"{release[1] if release else 'unknown version'} at {compiler}"
    if shutil.which("ninja"):
        return ok(detail, name="CUDA compiler")
    return warn(f"{detail}, no ninja on PATH", name="CUDA compiler")


def abilities(engines: Sequence[EngineEnv]) -> Iterator[Answer]:
    """What each release can run, all asked at once; nothing where there is no card to run it on."""
    if not engines or not fit.cards():
        return
    with ThreadPoolExecutor(max_workers=len(engines)) as pool:
        for engine, answer in zip(engines, pool.map(ask, engines), strict=True):
            yield judge(engine.version, answer, own_torch=engine.own_torch)


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


def judge(version: str, said: dict[str, Any], *, own_torch: bool = False) -> Answer:
    """What a release says of itself: the first gap that stops it, else what runs and what does not."""
    name = f"SGLang {version} on GPU"
    again = "python3 -m harness.machines.unpack FILE  # its bundle, once more"
    if said["error"]:
        return missing(f"cannot be imported: {said['error']}", again, name=name)
    if not said["card"]:
        detail = f"its torch {said['torch']} (CUDA {said['cuda']}) sees no card"
        return missing(detail, "nvidia-smi  # is the driver older than its CUDA?", name=name)
    backends: dict[str, str] = said["backends"]
    if backends["triton"]:
        return missing(f"no triton attention: {backends['triton']}", again, name=name)
    runs = ", ".join(name for name, why in backends.items() if not why)
    graphs = f"no CUDA graphs ({said['graphs']})" if said["graphs"] else "eager and CUDA graphs"
    lacking = [f"no {name} ({why})" for name, why in backends.items() if why]
    lacking += [f"no sampled requests ({said['sampling']})"] if said["sampling"] else []
    detail = "; ".join([f"attention {runs}", graphs, DTYPES, *lacking])
    fix = _parts(version, backends, own_torch=own_torch, samples=not said["sampling"])
    return (warn if said["graphs"] else ok)(detail, fix, name=name)


def _parts(version: str, backends: dict[str, str], *, own_torch: bool, samples: bool) -> str:
    """What to type, where a package index is, for what a bundle leaves out.

    Beside a torch that travels, flashinfer only samples, and travels in the releases' own bundle.
    """
    absent = [name for name, why in backends.items() if why and name in bundle_contents.PARTS]
    pack = f"eaglecheck engines pack {version}{' --with-torch' if own_torch else ''}"
    commands = [f"{pack} --with flashinfer --output {version}.bundle"] if own_torch and not samples else []
    had = [name for name in absent if not (own_torch and bundle_contents.PARTS[name][0] == bundle_contents.FLASHINFER)]
    commands += [f"{pack} --part {name} --output {name}.bundle" for name in had]
    return f"{' && '.join(commands)}  # where an index is; then unpack it here" if commands else ""
