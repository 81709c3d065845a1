"""Runs a scenario's requests on SGLang alone, to see whether it runs, or crashes, without the harness.

All requests at once, or those between two `flush` of its script; no gate and no probe, and of ours only the kernels
that a CPU, or a sparse indexer, lacks. It must not judge.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.both_sides.port_leases import Ports, ports_held
from harness.contract.scenario import Scenario
from harness.engines.process import Launch, environment_of
from harness.engines.processes import abort_group, end_group

PROGRAM = Path(__file__).parents[1] / "engine_side" / "host" / "bare_engine.py"
#: What a log is searched for where nothing came back.
TROUBLE = ("illegal memory access", "device-side assert", "CUDA error", "Error:", "Killed")
Images = Sequence[list[list[float]] | None]
#: What is written behind a log whose process was ended by us; and how a frame of SGLang's is written in a traceback.
STOPPED = "stopped after"
FRAME = re.compile(r'File "[^"]*/sglang/([^"]+)", line \d+, in (\S+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """How SGLang alone fared: texts by request, or None and the lines of its log that say why.

    verifies: how many verify rounds SGLang counted for each request; wrong drafts show there, not in texts. sites:
    file:function of SGLang's where each error of the log was raised; hung: it said nothing more, and was ended.
    took: seconds of its import and its boot.
    """

    booted: bool
    texts: tuple[tuple[int, ...], ...] | None
    verifies: tuple[int | None, ...] = ()
    why: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    hung: bool = False
    took: Mapping[str, float] = field(default_factory=dict)


def waves(scenario: Scenario) -> list[int]:
    """How many of its requests come between two flushes of the script."""
    found = [0]
    for op in scenario.script:
        found[-1] += len(op.rids) if op.kind == "submit" else 0
        if op.kind == "flush":
            found.append(0)
    return [count for count in found if count]


def run_bare(launch: Launch, scenario: Scenario, *, folder: Path, seconds: float, images: Images = ()) -> Bare:
    """Start it, wait at most `seconds`, and end what it started; its log stays in the folder.

    images: for each request the rows that stand in the places of its images, or None; empty where there are none.
    """
    with started(launch, scenario, folder=folder, images=images) as running:
        return running.result(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """SGLang alone on its way. log: what it says."""

    process: subprocess.Popen[bytes]
    log: Path

    def result(self, seconds: float) -> Bare:
        """Once it has ended by itself; after so many seconds it is ended, and its log says where its threads were."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            abort_group(self.process.pid)
            with self.log.open("a") as output:
                output.write(f"\n{STOPPED} {seconds:.0f} s\n")
        self.end()
        return _read(self.log.read_text(errors="replace").splitlines())

    def end(self) -> None:
        """With whatever it started; called twice is once."""
        end_group(self.process.pid)
        self.process.wait()


@contextmanager
def started(launch: Launch, scenario: Scenario, *, folder: Path, images: Images = ()) -> Iterator[Running]:
    """SGLang alone for as long as the context lasts; its log stays in the folder."""
    file, log = folder / "bare.json", folder / "bare.log"
    with ports_held() as ports:
        file.write_text(json.dumps(_given(launch, scenario, ports) | {"images": list(images)}))
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(launch.python), "-P", str(PROGRAM), str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment_of(launch) | {"PYTHONFAULTHANDLER": "1"},
                start_new_session=True,
            )
        running = Running(process=process, log=log)
        try:
            yield running
        finally:
            running.end()


def _given(launch: Launch, scenario: Scenario, ports: Ports) -> dict[str, Any]:
    return {
        "environment": launch.boot["environment"] | ports.environment,
        "arguments": launch.boot["arguments"],
        "optional": launch.boot["optional_arguments"] | ports.arguments,
        "lease": launch.boot["lease"],
        "replaced": launch.boot if launch.boot["device"] == "cpu" or launch.boot.get("indexer") else None,
        "waves": waves(scenario),
        "prompts": [list(request.input_ids) for request in scenario.requests],
        "tokens": [request.max_new_tokens for request in scenario.requests],
    }


def _read(lines: list[str]) -> Bare:
    said = next((json.loads(line) for line in reversed(lines) if line.startswith('{"release"')), None)
    if said is None:
        trouble = [line for line in lines if any(word in line for word in TROUBLE)][:3]
        return Bare(
            booted="booted" in lines,
            texts=None,
            why=(*trouble, *lines[-1:]),
            sites=_sites(lines),
            hung=not trouble and bool(lines) and lines[-1].startswith(STOPPED),
        )
    texts, verifies = tuple(map(tuple, said["texts"])), tuple(said["verifies"])
    return Bare(booted=True, texts=texts, verifies=verifies, took=said["took"])


def _sites(lines: list[str]) -> tuple[str, ...]:
    """The innermost frame of SGLang's in each traceback, each once."""
    found: list[str] = []
    for line in lines:
        if "Traceback (most recent call last)" in line:
            found.append("")
        elif found and (frame := FRAME.search(line)):
            found[-1] = f"{frame[1]}:{frame[2]}"
    return tuple(dict.fromkeys(filter(None, found)))
