"""Generated scenarios against one release for as long as you like; never stops at a failure.

    .venv/bin/python -m benchmarks.soak [--engine 0.5.23] [--scenarios 200] [--minutes 20] [--seed N]
        [--family tree] [--boots A,B] [--device cuda [--graphs] [--no-overlap]]

Prints verdicts, findings by signature and the situation table; writes them as JSON and failing scenarios as specimens
under --out. Exit code 1 if anything failed, 3 if something could not be judged.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks._bench import machine
from cases.boots import Boot
from cases.families import FAMILIES
from cases.hunt import Hunt, as_json, drawn
from cases.known import known_as
from cases.situations import ELSEWHERE
from harness.contract.known_issues import checked
from harness.contract.types import Scenario
from harness.driving.live import LiveEngines
from harness.engines import envs

#: Scenarios of one boot configuration before the next one's turn: a boot costs as much as about thirty of them.
BLOCK = 100
SAY_EVERY = 20.0


def plan(boots: list[Boot], *, count: int, seed_value: int) -> Iterator[Scenario]:
    """Blocks of scenarios, boot by boot, round and round."""
    done, turn = 0, 0
    while done < count:
        boot = boots[turn % len(boots)]
        block = min(BLOCK, -(-count // len(boots)), count - done)
        yield from drawn(boot, count=block, seed_value=seed_value + turn)
        done, turn = done + block, turn + 1


def chosen_boots(family: str, names: str | None, *, release: str) -> list[Boot]:
    """The boot configurations named, on whatever release; without names, those that work on it."""
    known = {boot.name: boot for boot in FAMILIES[family].boots}
    return [known[name] for name in names.split(",")] if names else [b for b in known.values() if b.works_on(release)]


def booted_with(scenario: Scenario, changes: dict[str, bool]) -> Scenario:
    return scenario.model_copy(update={"engine": scenario.engine.model_copy(update=changes)})


def soak(hunt: Hunt, scenarios: Iterator[Scenario], *, minutes: float, write: Path) -> None:
    start = said = time.monotonic()
    for scenario in scenarios:
        hunt.drive(scenario)
        now = time.monotonic()
        if now - said > SAY_EVERY:
            said = now
            print(f"{now - start:6.0f} s  {scenario.name}  {dict(hunt.outcomes)}", file=sys.stderr, flush=True)
            write.write_text(json.dumps(as_json(hunt), indent=1))
        if now - start > 60 * minutes:
            break
    write.write_text(json.dumps(as_json(hunt), indent=1))


def show(hunt: Hunt, wall: float, *, places: list[str]) -> None:
    """places: the cells of a night that draw for these boots."""
    total = hunt.outcomes.total()
    print(f"SGLang {hunt.release}: {total} scenarios, {dict(hunt.outcomes)}")
    print(
        f"{60 * total / wall:.0f} scenarios and {60 * hunt.positions / wall:.0f} judged positions a minute, "
        f"{hunt.engines.boots} boots; {machine()}"
    )
    for found in hunt.findings():
        entries = (known_as(found.signature, hunt.release, place=place) for place in places)
        known = next((one for one in entries if one is not None), None)
        kind = "consequence" if found.consequence else f"known finding {known.issue}" if known else "new finding"
        print(
            f"  {kind}: {found.signature}: {found.divergences} divergences in {found.scenarios} scenarios; "
            f"smallest: {hunt.specimens.get(found.smallest.id)}"
        )
    for reason, count in hunt.unknown.most_common():
        print(f"  not judged: {reason} ({count})")
    print(f"{'situation':36} {'generated':>9} {'reached':>8} {'seen in':>8} {'times':>7} {'positions':>10}")
    for line in hunt.table.lines.values():
        if line.seen or (line.name not in ELSEWHERE and not line.name.startswith("accept_len_")):
            print(
                f"{line.name:36} {line.generated:9} {line.reached:8} {line.seen:8} {line.times:7} {line.positions:10}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default=envs.NEWEST)
    parser.add_argument("--revert", type=int)
    parser.add_argument("--scenarios", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=None, help="the same seed gives the same scenarios")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="eagle")
    parser.add_argument("--boots", help="only these boot configurations of the family, comma-separated")
    parser.add_argument(
        "--assume", action="append", default=[], help="a known issue to expect beside those of the boots"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: in float16")
    parser.add_argument("--graphs", action="store_true", help="inside CUDA graphs; needs --device cuda")
    parser.add_argument("--no-overlap", action="store_true", help="in the normal loop, where a GPU would overlap")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    options = parser.parse_args()
    seed_value = options.seed if options.seed is not None else secrets.randbelow(10**6)
    boots = chosen_boots(options.family, options.boots, release=options.engine)
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed_value}", file=sys.stderr)
    engines = LiveEngines(
        environment=lambda version: envs.ensure(version, lambda text: print(text, file=sys.stderr)),
        default=options.engine,
        device=options.device,
        logs=options.out / "logs",
        assumed=checked([*options.assume, *(one for boot in boots for one in boot.assumes)]),
    )
    hunt = Hunt(engines=engines, release=options.engine, revert=options.revert, folder=options.out)
    start = time.monotonic()
    try:
        scenarios = plan(boots, count=options.scenarios, seed_value=seed_value)
        changes = {"graphs": True} if options.graphs else {}
        changes |= {"overlap": False} if options.no_overlap else {}
        scenarios = (booted_with(scenario, changes) for scenario in scenarios)
        soak(hunt, scenarios, minutes=options.minutes, write=options.out / f"soak-{options.engine}-{seed_value}.json")
    finally:
        engines.close()
        places = [f"generated/{options.family}/{boot.name}" for boot in boots]
        show(hunt, time.monotonic() - start, places=places)
    return 1 if hunt.outcomes["FAIL"] else 3 if hunt.outcomes["UNKNOWN"] or not hunt.outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
