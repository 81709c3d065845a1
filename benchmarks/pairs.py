"""Runs shrunken copies of published pairs through `eaglecheck run`, and writes what came of them as a table.

    python -m benchmarks.pairs FOLDER --engine 0.5.23 --engine 0.5.13      every pair of FOLDER on both releases
    python -m benchmarks.pairs FOLDER --table docs/evidence/pairs.md       the table of what was run by now

FOLDER holds a folder for each pair: `target`, `draft` (the same folder where the target's own MTP layers draft),
`pair.json` ({"real": what it is a copy of}) and `scenario.json`. Results stay in `results/` below it, a file a pair and
release, so that it can be run in parts. It judges nothing by itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._bench import machine
from cases import catalogue
from cases.boots import Boot
from cases.generation import generate

#: Generated scenarios a pair, and their seed.
EXAMPLES, SEED = 4, 17
TRUSTING = "--trust-remote-code"
HEAD = "| pair | architectures | provider: target, draft | release | verdict | rows compared | accept length | why |"


def cell(folder: Path, *, engine: str) -> dict[str, Any]:
    """One pair on one release: its scenario and generated ones of the same boot configuration."""
    draft = (folder / "draft").resolve()
    pair = ["--engine", engine, "--target", str(folder / "target"), "--draft", str(draft)]
    if any("auto_map" in json.loads((one / "config.json").read_text()) for one in (folder / "target", draft)):
        pair.append(TRUSTING)
    with tempfile.TemporaryDirectory(prefix="eaglecheck-pairs-") as place:
        files = [folder / "scenario.json", *_generated(folder, Path(place))]
        named = [part for file in files for part in ("--scenario-file", str(file))]
        return {"pair": folder.name, "engine": engine} | _eaglecheck(*pair, *named, place=Path(place))


def _generated(folder: Path, place: Path) -> Iterator[Path]:
    given = catalogue.read_scenario(folder / "scenario.json")
    engine = given.engine.model_copy(update={"chunked_prefill_size": None})
    boot = Boot(name=f"{folder.name[:40]}", why="the pair's own", spec=given.spec, engine=engine)
    for scenario in generate(boot, count=EXAMPLES, seed=SEED):
        file = place / f"{scenario.name}.json"
        file.write_text(scenario.model_dump_json(exclude_defaults=True))
        yield file


def _eaglecheck(*arguments: str, place: Path) -> dict[str, Any]:
    """What `run` ended with: its exit code, its document, and what it said where it has none."""
    file = place / "document.json"
    command = [sys.executable, "-m", "harness.cli", "run", *arguments, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    document = json.loads(file.read_text()) if file.exists() else None
    return {"exit": done.returncode, "said": done.stderr.strip() or done.stdout[-2000:].strip(), "document": document}


def table(folder: Path) -> Iterator[str]:
    """The results below a folder in Markdown, by pair and release, newest release first."""
    yield HEAD
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for file in sorted((folder / "results").glob("*.json"), key=lambda one: one.stem.rsplit("@", 1)):
        yield _row(folder, json.loads(file.read_text()))


def _row(folder: Path, found: dict[str, Any]) -> str:
    document = found["document"] or {}
    configs = [json.loads((folder / found["pair"] / name / "config.json").read_text()) for name in ("target", "draft")]
    names = dict.fromkeys(config["architectures"][0] for config in configs)
    said, length = document.get("providers"), document.get("accept_length")
    columns = [
        found["pair"],
        " + ".join(names),
        f"{said['target']}, {said['draft']}" if said else "",
        found["engine"],
        _verdict(found, document),
        str(document.get("compared", {}).get("hidden_rows", "")),
        f"{length:.2f}" if length else "",
        _why(found, document).replace("|", "\\|").replace("\n", " "),
    ]
    return f"| {' | '.join(columns)} |"


def _verdict(found: dict[str, Any], document: dict[str, Any]) -> str:
    if found["exit"] == 2:
        return "refused"
    return f"{document['verdict']} of {len(document['scenarios'])}" if document else "no verdict"


def _why(found: dict[str, Any], document: dict[str, Any]) -> str:
    """The signatures of a FAIL, the reasons of an UNKNOWN, or the refusal."""
    if not document:
        return next(iter(found["said"].removeprefix("eaglecheck: ").splitlines()), "")
    roots = sorted({f"`{one['signature']}`" for one in document["findings"] if not one["consequence_of"]})
    return "; ".join(roots + (document["reasons"][:2] if document["verdict"] == "UNKNOWN" else []))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="only these pairs")
    parser.add_argument("--engine", action="append", default=[])
    parser.add_argument("--table", type=Path)
    asked = parser.parse_args()
    (asked.folder / "results").mkdir(exist_ok=True)
    every = [one.parent.name for one in sorted(asked.folder.glob("*/pair.json"))]
    for name in asked.names or every:
        for engine in asked.engine:
            found = cell(asked.folder / name, engine=engine)
            (asked.folder / "results" / f"{name}@{engine}.json").write_text(json.dumps(found, indent=1))
            print(_row(asked.folder, found), flush=True)
    if asked.table:
        lines = list(table(asked.folder))
        asked.table.write_text("\n".join(lines) + "\n")
    print(machine())


if __name__ == "__main__":
    main()
