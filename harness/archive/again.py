"""The command that runs a stored run, scenario or reproducer again, from what its folder records.

It is asked where a folder cannot be used, so it reads what it can and never complains. It must not judge.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.archive import digests
from harness.archive.run_folders import EVENTS, MANIFEST, REPRODUCERS, SCENARIO, VERDICT
from harness.contract import plain_files, scenario_v1
from harness.contract.json_files import BadDocument, parsed, validated
from harness.contract.scenario import Scenario

#: Commands whose own line makes their run anew.
WHOLE = ("run", "replay")
#: A folder of one scenario, in a run or among reproducers: its name, its id, and what else there is.
NAMED = re.compile(r"(.+)-[0-9a-f]{12}(?:-.+)?")
#: Where a trace's header is.
ENGINE = "engine.json"
#: Scenario files named in one line; a line that is longer is nothing that anybody types.
MOST = 20


def run_again(folder: Path, *, replay: bool = True) -> str:
    """`eaglecheck run …` for what lies, or lay, in `folder`: a run, one of its scenarios, or a reproducer.

    replay False: also of the run of a replay, which takes no options of `run`.
    """
    within = (folder / SCENARIO).is_file()
    run = folder.parent if within and not (folder / MANIFEST).is_file() else folder
    manifest = _object(run / MANIFEST)
    alone = within and _as_written(folder / SCENARIO)  # else the whole run: another scenario was never run
    typed = [] if alone else _typed(manifest)
    options = _options(run, manifest, _part(_object(folder / ENGINE), "header"))
    if typed and (replay or typed[0] != "replay"):
        return shlex.join(["eaglecheck", *typed, *_missing(typed, options)])
    files = [folder / SCENARIO] if within else sorted(folder.glob(f"*/{SCENARIO}"))
    named = dict.fromkeys(option for file in files[:MOST] for option in _scenario(file, manifest))
    return shlex.join(["eaglecheck", "run", *options, *(part for option in named for part in option)])


def _scenario(file: Path, manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The options for a stored scenario: its file, or what it was called where that cannot be used any more."""
    if _as_written(file):
        return [("--scenario-file", str(short(file)))]
    name = _name(file.parent, manifest)
    return [*_family(file.parent), ("--scenario", name)] if name else []


def _family(folder: Path) -> list[tuple[str, str]]:
    """The option that was typed for the run that a scenario, or a reproducer, lies in; none where it lies elsewhere."""
    run = folder.parent.parent if folder.parent.name in REPRODUCERS else folder.parent
    argv = _list(_object(run / MANIFEST).get("argv"))
    words = [word for one in argv for word in (one.split("=", 1) if one.startswith("--family=") else [one])]
    return next(([option] for option in pairwise(words) if option[0] == "--family"), [])


def _name(folder: Path, manifest: Mapping[str, Any]) -> str:
    """What the scenario of a folder was called; '' where nothing says."""
    written = manifest.get("scenario") or _object(folder / VERDICT).get("scenario")
    found = NAMED.fullmatch(folder.name)
    return str(written or (found[1] if found else ""))


def _as_written(path: Path) -> bool:
    """Whether a scenario's file still holds one and is, as far as its folder's digests show, what it was."""
    try:
        content = plain_files.content(path)
        validated(scenario_v1.upgraded(parsed(content)), Scenario)
    except (OSError, BadDocument):
        return False
    return not digests.changed(digests.read_sums(path.parent), path.name, content)


def _typed(manifest: Mapping[str, Any]) -> list[str]:
    """What was typed behind `eaglecheck`, if that makes the run; a matrix, a bisection and a test session make more."""
    argv = manifest.get("argv")
    if not isinstance(argv, list) or len(argv) < 2 or argv[1] not in WHOLE:
        return []
    return [str(part) for part in argv[1:]]


def _missing(typed: Sequence[str], options: Sequence[str]) -> list[str]:
    """The engine, where it was the default one: another machine, or a later day, has another default."""
    named = any(part == "--engine" or part.startswith("--engine=") for part in typed)
    return [] if named or typed[0] != "run" or "--engine" not in options else list(options[:2])


def _options(run: Path, manifest: Mapping[str, Any], header: Mapping[str, Any]) -> list[str]:
    """Options from what the manifest, the engine's own events, or its trace's header say.

    --engine first, where it is known.
    """
    known: dict[str, Any] = {**header, **next(events(run, "handshake"), {}), **_part(manifest, "header")}
    known |= {key: value for key, value in _part(manifest, "engine").items() if value is not None}
    known |= {key: manifest[key] for key in ("release", "device") if key in manifest}
    options = [("--engine", known.get("release"), None), ("--device", known.get("device"), "cpu")]
    options += [("--revert", known.get("revert"), None), ("--cpu-attention", known.get("cpu_attention"), "torch")]
    options += [("--reference", known.get("reference"), "auto")]
    found = [part for name, value, usual in options if value not in (None, usual) for part in (name, str(value))]
    for one in _list(known.get("assumed")) or _assumed(manifest):
        found += ["--assume", one]
    pair = _list(known.get("pair"))
    return found + (["--target", pair[0], "--draft", pair[1]] if len(pair) == 2 else [])


def _assumed(manifest: Mapping[str, Any]) -> list[str]:
    """Of runs whose manifest does not say: what was typed."""
    argv = _list(manifest.get("argv"))
    return [after for before, after in pairwise(argv) if before == "--assume"]


def _object(path: Path) -> dict[str, Any]:
    """What the file holds; of one that is no JSON any more, the release and device that its text names."""
    try:
        text = plain_files.content(path).decode(errors="replace")
    except OSError:
        return {}
    named = {key: found[1] for key in ("release", "device") if (found := re.search(rf'"{key}": "([\w.+-]+)"', text))}
    return _as_object(text) or {"engine": named}


def events(run: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Those of this kind in engine.jsonl, in the order in which they were written; half a line at its end is none."""
    try:
        lines = plain_files.content(run / EVENTS).decode(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        if f'"{kind}"' in line and (found := _as_object(line)).get("event") == kind:
            yield found


def _as_object(text: str) -> dict[str, Any]:
    """A JSON object; {} for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _part(manifest: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = manifest.get(key)
    return found if isinstance(found, dict) else {}


def _list(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else []


def short(path: Path) -> Path:
    """As it would be typed from here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
