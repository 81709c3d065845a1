"""What each installed release's own code does with inputs that no engine gives it, as a table: component level.

    .venv/bin/python -m benchmarks.component --part mla --engines 0.5.11,0.5.13,0.5.23

Asks, and judges nothing. Parts: handoff, the builder of draft inputs (#26195); mla, the index buffer of flashinfer's
MLA draft backend (#27460).
"""

from __future__ import annotations

import argparse

from harness.engines import component, envs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=component.PARTS, required=True)
    parser.add_argument("--engines", required=True, help="installed releases, with commas between them")
    arguments = parser.parse_args()
    found = [component.ask(envs.state(version), part=arguments.part) for version in arguments.engines.split(",")]
    print(component.table(found))
    raised = {
        f"{answer['error']} ({answer['site']})"
        for one in found
        for answer in one.answers.values()
        if answer["outcome"] == "raises"
    }
    for line in sorted(raised | {f"{one.release} cannot be asked: {one.error}" for one in found if one.error}):
        print(line)


if __name__ == "__main__":
    main()
