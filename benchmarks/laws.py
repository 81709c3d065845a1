"""What one release samples, against the law it should have: exact multinomial tests over a table pair.

    .venv/bin/python -m benchmarks.laws [--engine 0.5.23] [--scenarios 50] [--drafts chain,tree,whole-tree]
        [--rejection --drafts chain]

Eight requests a scenario. Every round is also held against its own coins. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from cases.laws import FALSE_ALARM, Tally
from cases.sampling import DRAFTS, law_scenarios
from harness.contract.types import EngineConfig
from harness.driving.live import LiveEngines
from harness.engines import envs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default=envs.NEWEST)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--scenarios", type=int, default=50, help="for each draft")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--drafts", default=",".join(DRAFTS))
    parser.add_argument("--rejection", action="store_true", help="rejection sampling; needs --drafts chain and 0.5.14")
    parser.add_argument("--out", type=Path, default=Path("runs/laws"))
    options = parser.parse_args()
    engines = LiveEngines(
        environment=lambda version: envs.ensure(version, lambda text: print(text, file=sys.stderr)),
        default=options.engine,
        device=options.device,
        logs=options.out / "logs",
    )
    outcomes, tallies = Counter[str](), dict[str, Tally]()
    start = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for draft in options.drafts.split(","):
            tally = tallies[draft] = Tally(temperature=options.temperature)
            asked = {"count": options.scenarios, "temperature": options.temperature}
            for scenario in law_scenarios(draft, **asked, engine=EngineConfig(rejection=options.rejection)):
                outcome = engines(scenario, fresh=True)
                outcomes[str(outcome.verdict.outcome)] += 1
                tally.add(scenario, outcome.trace)
                if not outcome.passed:
                    print(f"{scenario.name}: {outcome.verdict.reasons}", outcome.save_specimen(options.out))
    except KeyboardInterrupt:
        print("interrupted: what follows is what was drawn so far", file=sys.stderr)
    finally:
        engines.close()
    tallies = {draft: tally for draft, tally in tallies.items() if tally.cells}
    cells = sum(len(tally.cells) for tally in tallies.values())
    print(f"SGLang {options.engine}: {dict(outcomes)} under their own coins; {time.monotonic() - start:.0f} s")
    print(f"{cells} exact multinomial tests; each fails below p = {FALSE_ALARM / max(1, cells):.1e}")
    for draft, tally in tallies.items():
        tokens = sum(sum(counts) for counts in tally.cells.values())
        worst = tally.fits()[0]
        print(
            f"  {draft:11} {tokens:6} tokens, {len(tally.cells)} cells, {tally.strangers} out of place, "
            f"least p {worst.p:.4f} at {worst.cell}: {worst.counts}"
        )
        for fit in tally.misfits(tests=cells):
            print(f"    not the law: {fit.cell}: {fit.counts} under {tuple(round(p, 3) for p in fit.law)}")
    misfits = sum(len(tally.misfits(tests=cells)) + tally.strangers for tally in tallies.values())
    return 1 if misfits or set(outcomes) != {"PASS"} else 0


if __name__ == "__main__":
    sys.exit(main())
