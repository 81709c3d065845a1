"""The workflow files: they parse, what they run exists with these options, nothing is unbounded, nothing is lost."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from cases.families import FAMILIES
from cases.meta import nights
from harness.cli.main import app
from harness.night import store

ROOT = Path(__file__).parents[2]
FILES = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
EXPRESSION = re.compile(r"\$\{\{.*?\}\}")


def load(name):
    return yaml.safe_load(FILES[name].read_text())


def jobs():
    found = [(name, job, each) for name in FILES for job, each in load(name)["jobs"].items()]
    assert len(found) >= len(FILES) == 4
    return found


def steps():
    return [(name, job, step) for name, job, each in jobs() for step in each["steps"]]


def commands():
    """Every command line of every run step, its expressions and variables filled in with 1."""
    for name, job, step in steps():
        for line in step.get("run", "").splitlines():
            line = line.replace("${{ matrix.family }}", "mtp")
            words = shlex.split(re.sub(r"\$\w+", "1", EXPRESSION.sub("1", line)))
            if words:
                yield pytest.param(words, id=f"{name}-{job}-{words[0]}-{step['name']}")


def test_all_workflows_are_there_and_parse():
    assert set(FILES) == {"checks", "nightly", "nightly-cpu", "pull-request"}
    for name in FILES:
        assert {"name", True, "permissions", "jobs"} <= set(load(name)), "YAML reads the key `on` as true"
        assert load(name)["permissions"] == {"contents": "read"}


@pytest.fixture(scope="module")
def pytest_options():
    command = [sys.executable, "-m", "pytest", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(re.findall(r"(?<!\S)(--?[a-z][a-z-]*)", done.stdout))


@pytest.mark.parametrize("words", list(commands()))
def test_what_is_run_exists_with_these_options(words, pytest_options):
    program, *arguments = words
    if program == "eaglecheck":
        group = typer.main.get_command(app)
        command = group.commands[arguments[0]]
        command.make_context(arguments[0], arguments[1:])  # parses, and refuses what it does not know; runs nothing
        named = arguments[arguments.index("--families") + 1] if "--families" in arguments else ""
        assert set(filter(None, named.split(","))) <= set(FAMILIES)
    elif program == "pytest":
        options = [word.partition("=")[0] for word in arguments if word.startswith("-")]
        assert options
        assert [option for option in options if option not in pytest_options] == []
    elif program == "make":
        made = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert set(arguments) <= set(made)
    else:
        assert program in ("python", "mkdir")


def test_a_misspelt_option_would_be_seen(pytest_options):
    with pytest.raises(Exception, match=r"No such option"):
        typer.main.get_command(app).commands["matrix"].make_context("matrix", ["--night", "x"])
    assert "--junit-xlm" not in pytest_options


def test_every_job_ends_by_itself_on_a_hosted_runner_or_one_that_was_named():
    for name, job, each in jobs():
        assert 0 < each["timeout-minutes"] <= 240, (name, job)
        if name in ("checks", "nightly-cpu"):
            assert each["runs-on"] == "ubuntu-latest"
        else:
            assert "vars.EAGLECHECK_RUNNER != ''" in each["if"], (name, job)


def test_a_pull_request_draws_nothing_at_random_and_a_strangers_does_not_run_here():
    text = FILES["pull-request"].read_text()
    assert "--profile nightly" not in text
    assert "--scenarios 0" in text
    assert "head.repo.full_name == github.repository" in text


def test_shards_are_as_many_as_each_of_them_says_and_draw_from_one_seed():
    job = load("nightly")["jobs"]["shard"]
    (run,) = [step["run"] for step in job["steps"] if "--shard" in step.get("run", "")]
    of = int(re.search(r"--shard \$\{\{ matrix\.shard \}\}/(\d+)", run)[1])
    assert job["strategy"]["matrix"]["shard"] == list(range(1, of + 1))
    assert job["strategy"]["fail-fast"] is False
    assert '--seed "$GITHUB_RUN_ID"' in run


def test_the_gate_runs_where_a_shard_failed_and_a_red_night_is_kept_too():
    gate = load("nightly")["jobs"]["gate"]
    assert gate["needs"] == ["shard"]
    assert "!cancelled()" in gate["if"]
    kept = [step for step in gate["steps"] if step.get("uses", "").startswith(("actions/cache/save", "actions/upload"))]
    assert [step["if"] for step in kept] == ["${{ always() }}"] * 2


def test_what_the_gate_fetches_is_what_the_shards_keep():
    night = load("nightly")["jobs"]

    def uses(job, action):
        return [step["with"] for step in night[job]["steps"] if step.get("uses", "").startswith(action)]

    (kept,), (fetched,) = uses("shard", "actions/upload-artifact"), uses("gate", "actions/download-artifact")
    assert fetched["pattern"] == EXPRESSION.sub("*", kept["name"])
    (before,), (after,) = uses("gate", "actions/cache/restore"), uses("gate", "actions/cache/save")
    assert (before["path"], before["key"]) == (after["path"], after["key"])
    assert after["key"].startswith(before["restore-keys"])


def test_every_family_has_its_night():
    (shard,) = [
        step["run"] for step in load("nightly")["jobs"]["shard"]["steps"] if "--families" in step.get("run", "")
    ]
    on_a_gpu = re.search(r"--families (\S+)", shard)[1].split(",")
    on_a_cpu = load("nightly-cpu")["jobs"]["family"]["strategy"]["matrix"]["family"]
    assert set(on_a_gpu) < set(on_a_cpu) == set(FAMILIES)


def test_every_artifact_is_kept_whatever_happened():
    kept = [step["if"] for *_, step in steps() if step.get("uses", "").startswith("actions/upload-artifact")]
    assert len(kept) >= 2
    assert {*kept} == {"${{ always() }}"}


@pytest.mark.parametrize(
    ("there", "code", "said"), [((1, 2, 3), 0, "night GREEN"), ((1, 3), 3, "shard 2 of 3 is missing")]
)
def test_the_verdict_step_runs_as_it_stands_in_a_shell(tmp_path, there, code, said):
    """The nightly gate's own lines, by bash as GitHub starts it, over shards as their artifacts unpack."""
    cells = [nights.cell(name, kind="case") for name in "abcdefg"]
    for number in there:
        mine = cells[number - 1 :: 3]
        one = nights.night(
            *mine, planned=[cell.key for cell in cells], shard=(number, 3), id=f"20261128-020000-000{number}"
        )
        store.finish(store.begin(tmp_path / "shards" / f"night-shard-{number}", one.plan), one)
    program = tmp_path / "bin" / "eaglecheck"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m harness.cli "$@"\n')
    program.chmod(0o755)
    (step,) = [one for one in load("nightly")["jobs"]["gate"]["steps"] if one.get("name") == "Verdict"]
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "GITHUB_STEP_SUMMARY": "summary.md"}
    (tmp_path / "known.toml").write_text("schema = 1\n")  # ours would make it red once an entry has expired
    lines = step["run"].replace("eaglecheck night ", "eaglecheck night --known known.toml ")
    done = subprocess.run(
        ["bash", "-e", "-c", lines], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout
    (kept,) = (tmp_path / "nights").iterdir()
    assert {path.name for path in kept.iterdir()} == {"plan.json", "night.json"}
    assert ("GREEN" in (tmp_path / "summary.md").read_text()) is not bool(code)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"junit-gate.xml", "night.json"}
    assert ("::error" in done.stdout) is bool(code)


def test_a_job_that_runs_tests_installs_what_tests_import():
    said = {(name, job): [step.get("run", "") for step in each["steps"]] for name, job, each in jobs()}
    tested = {key for key, texts in said.items() if re.search(r"^\s*pytest", "\n".join(texts), flags=re.MULTILINE)}
    assert tested
    assert {key for key in tested if not any("pip install -e '.[dev]'" in text for text in said[key])} == set()
