"""What a message says to type can be typed: every command in our words parses, and names what the command takes."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer

from cases.families import FAMILIES
from cases.meta import results
from cases.meta.command_line import call
from harness.archive import again
from harness.archive.faults import StoreError
from harness.archive.store import RunReader
from harness.cli.main import app

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for room in ("harness", "reports", "cases")
    for path in sorted((ROOT / room).rglob("*.py"))
    if "meta" not in path.parts and not path.name.startswith("test_")
]
#: The index of modules quotes docstrings, which name commands without all that these need.
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "modules.md"})]
#: How advice is set off from the sentence before it, up to the end of its line.
ADVICE = re.compile(r"  (eaglecheck .+)$")
#: Words of prose behind a command that is not the end of its line.
BEHIND = re.compile(r";.*$|,? or (?:look|put|name|get) .*$|  #.*$")


def _texts(path):
    """Every string of a module that names a command but its docstrings, with 1 for each value that is put into one."""
    if "eaglecheck " not in (source := path.read_text()):
        return
    tree = ast.parse(source)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "1" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | inside:
            yield node.value


def _advice():
    for path in SOURCES:
        for text in _texts(path):
            for line in text.splitlines():
                if found := ADVICE.search(line.replace("--device 1", "--device cpu")):  # of these there are two
                    yield pytest.param(BEHIND.sub("", found[1]), id=f"{path.stem}: {found[1][:50]}")


def _documented():
    for path in PAGES:
        for block in re.findall(r"```(?:sh|bash|console)?\n(.*?)```", path.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if found := re.match(r"\s*(?:\$ )?(?:\.venv/bin/)?(eaglecheck [^|>&;]+)", line):
                    yield pytest.param(BEHIND.sub("", found[1]), id=f"{path.stem}: {found[1][:50]}")
        prose = " ".join(re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL).split())
        for line in dict.fromkeys(re.findall(r"`(eaglecheck (?!engines \w+`)[a-z]+ [^`…|]+)`", prose)):
            yield pytest.param(line, id=f"{path.stem}: {line[:50]}")


def parse(line):
    """Read a command by the parser of the command line, without running it; returns the arguments it left over."""
    group = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    context = group.make_context("eaglecheck", words[:1], resilient_parsing=True)
    command, words = group.commands[words[0]], words[1:]
    if hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    with command.make_context(command.name, words, parent=context) as made:
        return [*made.args]


ADVISED, DOCUMENTED = list(_advice()), list(_documented())


def test_there_is_advice_to_look_at():
    assert len(ADVISED) > 25
    assert len(DOCUMENTED) > 15


@pytest.mark.parametrize("line", ADVISED)
def test_what_a_message_says_to_type_is_a_command(line):
    assert "…" not in line
    assert parse(line) == []


@pytest.mark.parametrize("line", DOCUMENTED)
def test_what_the_pages_say_to_type_is_a_command(line):
    assert parse(line) == []


def test_a_line_that_lacks_what_its_command_needs_is_noticed():
    with pytest.raises(Exception, match=r"(?i)missing"):
        parse("eaglecheck bisect --case x")
    with pytest.raises(Exception, match=r"(?i)no such option"):
        parse("eaglecheck run --engines 0.5.11")
    with pytest.raises(KeyError):
        parse("eaglecheck recheckk x")


def test_families_are_named_in_full():
    (named,) = re.findall(r"--family ([a-z0-9\\|-]+)`", (ROOT / "README.md").read_text())
    assert named.split("\\|") == list(FAMILIES)


@pytest.fixture
def work(work):
    (work / "README.md").write_text("# not ours\n")
    return work


@pytest.mark.parametrize(
    "command",
    ["recheck {}", "report {} --html a.html", "diff {} runs/latest --json d.json", "recheck {} --fresh-reference"],
)
def test_the_folder_that_may_be_meant_is_put_into_what_was_typed(command, work):
    run = results.store(work / "runs", ("single", results.sound)).relative_to(work)
    typo = f"{run}x"
    done = call(*command.format(typo).split(), code=2)
    assert done.stderr.splitlines()[-1] == f"  for example:  eaglecheck {command.format(run)}"
    assert parse(done.stderr.splitlines()[-1].partition(":  ")[2]) == []


@pytest.mark.parametrize("command", ["recheck", "report --html a.html", "replay", "diff README.md"])
def test_a_file_where_a_folder_is_wanted_is_called_a_file(command, work):
    done = call(*command.split(), "README.md", code=2)
    assert "README.md is a file" in done.stderr
    assert "no folder README.md" not in done.stderr


@pytest.mark.parametrize("kind", ["matrix", "mutants"])
def test_no_advice_writes_over_what_is_there(kind, work):
    run = results.store(work / "runs", ("single", results.sound)).relative_to(work)
    done = call("report", run, "--html", "a.html", f"--{kind}", "README.md", code=2)
    assert f"--json {kind}.json" in done.stderr
    assert "--json README.md" not in done.stderr


@pytest.mark.parametrize(
    ("kind", "document", "said"),
    [
        ("matrix", '{"schema": 1, "cells": [3]}', "cells.0: found 3"),
        ("matrix", '{"schema": 1, "cells": [{"engine": "0.5.23"}]}', "cells.0.case: it is missing"),
        ("mutants", '{"schema": 1, "mutants": [{}]}', "engine: it is missing"),
        ("mutants", '{"schema": 1, "schema": 1}', "duplicate key 'schema'"),
    ],
)
def test_a_document_that_the_page_cannot_show_is_refused_with_its_place(kind, document, said, work):
    """It was a fault of ours, exit 4 with a traceback of the template."""
    run = results.store(work / "runs", ("single", results.sound)).relative_to(work)
    (work / "own.json").write_text(document)
    done = call("report", run, "--html", "a.html", f"--{kind}", "own.json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"--{kind}: own.json" in done.stderr
    assert said in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "run --scenario-file own.json --json own.json",
        "bisect --scenario-file own.json --bad 0.5.11 --good 0.5.13 --json ./own.json",
        "report RUN --html own.json --matrix own.json",
    ],
)
def test_what_a_command_reads_is_not_written_over(command, work):
    run = results.store(work / "runs", ("single", results.sound)).relative_to(work)
    (work / "own.json").write_text("{}")
    done = call(*command.replace("RUN", str(run)).split(), code=2)
    assert "own.json: the command reads it" in done.stderr
    assert (work / "own.json").read_text() == "{}"


@pytest.mark.parametrize(
    "command",
    [
        "recheck RUN --json RUN/manifest.json",
        "recheck RUN --json RUN/new.json",
        "recheck CASE --json CASE/scenario.json",
        "recheck CASE --json RUN/manifest.json",
        "recheck REPRODUCER --json RUN/manifest.json",
        "diff RUN RUN --json RUN/manifest.json",
        "diff CASE CASE --json RUN/verdict.json",
        "report RUN --html RUN/manifest.json",
        "report CASE --markdown RUN/manifest.json",
        "report RUN --csv RUN/tables",
        "bisect --case REPRODUCER --bad 0.5.11 --good 0.5.13 --json REPRODUCER/manifest.json",
        "night NIGHT --json NIGHT/plan.json",
        "night --nights . --junit NIGHT/plan.json",
        "report RUN --nights . --html NIGHT/plan.json",
    ],
)
def test_a_stored_run_is_not_written_over(command, work):
    run = results.store(work / "runs", ("pr25015", results.one_ahead)).relative_to(work)
    (work / "one-night").mkdir()
    (work / "one-night/plan.json").write_text("{}")
    (case,), (reproducer,) = run.glob("pr25015-*"), run.glob("reproducers/*")
    before = {path: path.read_bytes() for path in work.rglob("*") if path.is_file()}
    for name, place in (("RUN", run), ("CASE", case), ("REPRODUCER", reproducer), ("NIGHT", "one-night")):
        command = re.sub(rf"\b{name}\b", str(place), command)
    done = call(*command.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert "is inside the run itself\n  name a place outside " in done.stderr
    assert {path: path.read_bytes() for path in work.rglob("*") if path.is_file()} == before


def test_a_place_beside_the_run_is_no_part_of_it(work):
    run = results.store(work / "runs", ("single", results.sound)).relative_to(work)
    (work / "manifest.json").write_text("{}")
    call("recheck", run, "--json", run.parent / "own.json", code=0)
    call("recheck", next(run.glob("single-*")), "--json", "own.json", code=0)


MANIFEST = {"release": "0.5.11", "device": "cpu", "revert": None}


def damaged(work, argv, **engine):
    """A run made by `argv` whose scenario has lost its rows."""
    run = results.store(work / "runs", ("single", results.sound), manifest={"argv": argv, "engine": MANIFEST | engine})
    (next(run.glob("single-*")) / "engine.parquet").unlink()
    return run.relative_to(work)


@pytest.mark.parametrize(
    ("argv", "engine", "expected"),
    [
        (["x/eaglecheck", "run"], {}, "run --engine 0.5.11"),
        (["run.py", "run", "--engine", "0.5.11", "--revert", "25015"], {}, "run --engine 0.5.11 --revert 25015"),
        (["x", "run", "--engine=0.5.11", "--scenario", "a b"], {}, "run --engine=0.5.11 --scenario 'a b'"),
        (["pytest", "-q"], {"revert": 7, "assumed": ["F-003"]}, "run --engine 0.5.11 --revert 7 --assume F-003"),
        (["x", "matrix", "--engines", "0.5.11"], {"cpu_attention": "interpreted", "pair": ["t", "d"]},
         "run --engine 0.5.11 --cpu-attention interpreted --target t --draft d"),
    ],
)  # fmt: skip
def test_run_again_carries_all_that_made_the_run(argv, engine, expected, work):
    run = damaged(work, argv, **engine)
    line = again.run_again(run)
    assert line.startswith(f"eaglecheck {expected}")
    if argv[1] != "run":
        assert f"--scenario-file {next(run.glob('single-*'))}/scenario.json" in line
    assert parse(line) == []


def test_what_needs_options_of_run_is_given_a_run_for_a_replay_too(work):
    run = damaged(work, ["x", "replay", "a/reproducer"], assumed=["F-003"])
    assert again.run_again(run) == "eaglecheck replay a/reproducer"
    line = again.run_again(run, replay=False)
    assert line.startswith("eaglecheck run --engine 0.5.11 --assume F-003 --scenario-file ")
    assert parse(line) == []


def test_a_reproducer_that_was_moved_and_damaged_still_knows_its_scenario(work):
    """The folder's name says nothing then; once it led to `--scenario ''`."""
    run = results.store(work / "runs", ("four-together", results.one_ahead))
    (reproducer,) = (run / "reproducers").iterdir()
    moved = shutil.copytree(reproducer, work / "moved")
    (moved / "scenario.json").write_text("")
    line = again.run_again(moved)
    assert line.endswith(" --scenario four-together")
    assert parse(line) == []
    (moved / "manifest.json").write_text("")
    line = again.run_again(moved)
    assert "--engine" in line
    assert "''" not in line
    assert parse(line) == []


def test_a_manifest_that_is_damaged_itself_still_names_the_release(work):
    run = damaged(work, ["x/eaglecheck", "run"])
    text = (run / "manifest.json").read_text()
    (run / "manifest.json").write_text(text[: text.index('"revert"')])
    with pytest.raises(StoreError, match=r"run again:  eaglecheck run --engine 0\.5\.11 --scenario-file runs/"):
        RunReader.open(run)
