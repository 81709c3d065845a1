"""What the benchmarks share: an installed engine, the tiny pair, and the line that says which machine this was."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from cases import checkpoints
from harness.both_sides.gpus import CardError
from harness.both_sides.leases import Request
from harness.contract.scenario import Scenario
from harness.contract.usage import UserError, unknown
from harness.driving.oracle import Oracle
from harness.driving.own_pair import OwnPair
from harness.driving.pairs import checkpoint_pairs
from harness.engines import envs
from harness.engines.engine import Engine
from harness.engines.launch import build_launch


def ended(main: Callable[[], int | None]) -> NoReturn:
    """Exit with what it returns; with its own code and one message for what a user can cause."""
    try:
        raise SystemExit(main())
    except (UserError, CardError) as error:
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).stem}: interrupted", file=sys.stderr)
        raise SystemExit(3) from None


def count(text: str) -> int:
    """An option's value that is a number from 1 on."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r}; allowed: a whole number from 1 on")
    return int(text)


def listed(allowed: Collection[str]) -> Callable[[str], list[str]]:
    """Of an option that takes some of these, comma-separated."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        for one in found:
            if one not in allowed:
                raise ArgumentTypeError(unknown("name", one, allowed))
        return found

    return names


def machine() -> str:
    """Processor count and load, since these machines are shared: a ratio means something, a time hardly."""
    load = os.getloadavg()[0]
    cores = f"{os.cpu_count()} cores, load {load:.1f} at the end"
    return f"{platform.machine()}, {cores}, Python {platform.python_version()}"


@contextmanager
def booted(
    scenario: Scenario,
    *,
    version: str,
    probe: bool,
    device: str = "cpu",
    own: OwnPair | None = None,
    lease: Request | None = None,
    clock: bool = False,
) -> Iterator[Engine]:
    """An engine for the scenario's boot configuration, with the tiny pair it names or an own one; ended afterwards.

    clock: it tells whose time its scheduler's is, by an event 'spent' a scenario.
    """
    target, draft = checkpoint_pairs([scenario], device=device, own=own)[scenario.checkpoint]
    launch = build_launch(
        env=envs.ensure(version, print),
        spec=scenario.spec,
        engine=scenario.engine,
        target=target,
        draft=draft,
        device=device,
        probe=probe,
        eos=None if own is None else own.target.eos,
        lease=lease,
    )
    launch = replace(launch, boot=launch.boot | {"clock": clock})
    with tempfile.TemporaryDirectory(prefix="eaglecheck-bench-") as folder:
        engine = Engine(launch=launch, log=Path(folder, "engine.log"))
        try:
            engine.boot()
            yield engine
        finally:
            engine.close()


def oracle(name: str = "eagle-tiny") -> Oracle:
    made = checkpoints.make(name, envs.home() / "checkpoints")
    return Oracle(target=made.target, draft=made.draft).load()
