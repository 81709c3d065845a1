"""Runs shrunken copies of published pairs through `eaglecheck run` and `fuzz`, and writes what came of them as a table.

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
from cases.families import FAMILIES

#: Generated scenarios a pair, and their seed.
EXAMPLES, SEED = 4, 17
TRUSTING = "--trust-remote-code"
HEAD = "| pair | architectures | provider: target, draft | release | verdict | rows compared | accept length | why |"


def cell(folder: Path, *, engine: str) -> dict[str, Any]:
    """One pair on one release: its scenario, then generated ones where the pair was accepted."""
    draft = (folder / "draft").resolve()
    pair = ["--engine", engine, "--target", str(folder / "target"), "--draft", str(draft)]
    if any("auto_map" in json.loads((one / "config.json").read_text()) for one in (folder / "target", draft)):
        pair.append(TRUSTING)
    first = _eaglecheck("run", *pair, "--scenario-file", str(folder / "scenario.json"))
    if first["exit"] == 2:
        return {"pair": folder.name, "engine": engine, "run": first}
    family = "eagle3" if json.loads((folder / "pair.json").read_text())["algorithm"] == "EAGLE3" else "eagle"
    drawn = ["--examples", str(EXAMPLES), "--seed", str(SEED), "--shrink", "0"]
    more = _eaglecheck("fuzz", *pair, "--family", family, "--boot", FAMILIES[family].boots[0].name, *drawn)
    return {"pair": folder.name, "engine": engine, "run": first, "fuzz": more}


def _eaglecheck(*arguments: str) -> dict[str, Any]:
    """What a command ended with: its exit code, its document, and what it said where it has none."""
    with tempfile.TemporaryDirectory(prefix="eaglecheck-pairs-") as place:
        file = Path(place) / "document.json"
        command = [sys.executable, "-m", "harness.cli", *arguments, "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        document = json.loads(file.read_text()) if file.exists() else None
    said = (done.stderr if done.returncode == 2 else "\n".join(done.stdout.splitlines()[-3:])).strip()
    return {"exit": done.returncode, "said": said, "document": document, "command": " ".join(arguments)}


def table(folder: Path) -> Iterator[str]:
    """The results below a folder in Markdown, by pair and release, newest release first."""
    yield HEAD
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for file in sorted((folder / "results").glob("*.json"), key=lambda one: one.stem.rsplit("@", 1)):
        yield _row(folder, json.loads(file.read_text()))


def _row(folder: Path, found: dict[str, Any]) -> str:
    parts = [found[name] for name in ("run", "fuzz") if name in found and found[name]["document"]]
    documents = [part["document"] for part in parts]
    configs = [json.loads((folder / found["pair"] / name / "config.json").read_text()) for name in ("target", "draft")]
    names = dict.fromkeys(config["architectures"][0] for config in configs)
    rows = sum(document["compared"].get("hidden_rows", 0) for document in documents)
    lengths = [document["accept_length"] for document in documents if document["accept_length"]]
    columns = [
        found["pair"],
        " + ".join(names),
        _providers(documents),
        found["engine"],
        _verdict(found, documents),
        str(rows or ""),
        f"{lengths[0]:.2f}" if lengths else "",
        _why(found, documents),
    ]
    return f"| {' | '.join(columns)} |"


def _providers(documents: list[dict[str, Any]]) -> str:
    said = next((document["providers"] for document in documents if document.get("providers")), None)
    return f"{said['target']}, {said['draft']}" if said else ""


def _verdict(found: dict[str, Any], documents: list[dict[str, Any]]) -> str:
    if found["run"]["exit"] == 2:
        return "refused"
    words = [document["verdict"] for document in documents]
    scenarios = sum(len(document["scenarios"]) for document in documents)
    worst = next((word for word in ("FAIL", "UNKNOWN", "PASS") if word in words), "no verdict")
    return f"{worst} of {scenarios}"


def _why(found: dict[str, Any], documents: list[dict[str, Any]]) -> str:
    """The signatures of a FAIL, the reasons of an UNKNOWN, or the refusal."""
    if found["run"]["exit"] == 2:
        said = found["run"]["said"].removeprefix("eaglecheck: ").splitlines()
        return said[0].replace("|", "\\|") if said else ""
    findings = [one for document in documents for one in document["findings"]]
    roots = sorted({f"`{one['signature']}`" for one in findings if not one["consequence_of"]})
    reasons = {reason for document in documents if document["verdict"] == "UNKNOWN" for reason in document["reasons"]}
    return "; ".join([*roots, *sorted(reasons)[:2]]).replace("|", "\\|").replace("\n", " ")


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
