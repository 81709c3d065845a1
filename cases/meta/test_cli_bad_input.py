"""What can be refused is refused before anything slow: one message, exit 2, no engine booted, no run folder made."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cases import catalogue, checkpoints, fixed
from cases.meta import pretended_engine
from harness.cli import programs
from harness.cli.main import app
from harness.cli.outcome import Exit, _attempt
from harness.coverage import POINTS
from harness.driving import pairs
from harness.engines import envs
from harness.engines.engine import Engine


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two pairs of different width."""
    root = tmp_path_factory.mktemp("pairs")
    return {name: checkpoints.make(name, root).root for name in ("eagle-tiny", "eagle-head64")}


@pytest.fixture
def place(tmp_path, monkeypatch, made):
    """A working folder with every kind of unfit file in it, and a home where every release is ready."""
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EAGLECHECK_RUNS", raising=False)
    monkeypatch.setattr(envs, "current", lambda: None)
    monkeypatch.setattr(Engine, "boot", lambda *_, **__: pytest.fail("an engine was booted"))
    monkeypatch.setattr(catalogue, "names", lambda: ["pr25015", "pr26329"])  # the corpus grows, these texts need not
    few = {"idle_tick", *(name for one in fixed.default_scenarios() for name in one.wants)}
    monkeypatch.setattr(programs, "POINTS", {name: POINTS[name] for name in sorted(few)})
    monkeypatch.setattr(catalogue, "EXAMPLE", "working examples:  SCENARIOS/*.json")
    pretended_engine.furnish(tmp_path / "home")
    (tmp_path / "home" / "published.json").write_text(json.dumps({"versions": envs.SUPPORTED, "when": 1e11}))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "empty").mkdir()
    (work / "file").write_text("")
    _checkpoints(work, made)
    _scenarios(work)
    return work


def _checkpoints(work, made):
    shutil.copytree(made["eagle-tiny"], work / "tiny")
    shutil.copytree(made["eagle-head64"], work / "wide")
    weights = (work / "tiny" / "target" / "model.safetensors").read_bytes()
    for name, target, changes in (
        ("qwen", "target", {"architectures": ["Qwen3ForCausalLM"]}),
        ("short", "target", {"max_position_embeddings": 128}),
        ("misshapen", "target", {"intermediate_size": 100}),
        ("small-target", "target", {"vocab_size": 300}),
        ("small-draft", "draft", {"vocab_size": 300}),
        ("cut-off", "target", {}),
        ("bare", "target", {}),
        ("garbled", "target", {}),
    ):
        shutil.copytree(work / "tiny" / target, work / name)
        config = json.loads((work / name / "config.json").read_text())
        (work / name / "config.json").write_text(json.dumps(config | changes))
    (work / "cut-off" / "model.safetensors").write_bytes(weights[:20000])
    (work / "bare" / "model.safetensors").unlink()
    (work / "garbled" / "config.json").write_text("{")


def _scenarios(work):
    whole = fixed.default_scenarios()[0].model_dump(mode="json")
    (work / "cut-off.json").write_text(json.dumps(whole)[:100])
    (work / "binary.json").write_bytes(b"\xff\xfe\x00")
    (work / "list.json").write_text("[]")
    (work / "deep.json").write_text("[" * 100000)
    for name, path, value in (
        ("newer", ["schema_version"], 2),
        ("unknown-key", ["spec", "kk"], 3),
        ("unknown-key-in-list", ["requests", 0, "promt"], [1]),
        ("unknown-op", ["script", 0, "kind"], "submitt"),
        ("impossible-tree", ["spec", "n"], 9),
        ("too-long", ["requests", 0, "max_new_tokens"], 600),
        ("small-pool", ["engine", "pool_tokens"], 32),
        ("foreign-token", ["requests", 0, "prompt"], [1, 2, 512]),
        ("negative-token", ["requests", 0, "prompt"], [1, -2]),
        ("eagle3", ["spec", "algorithm"], "EAGLE3"),
        ("two-ranks", ["engine", "dp"], 2),
        ("other-rank", ["requests", 0, "dp_rank"], 1),
        ("unknown-situation", ["wants"], ["idle_tik"]),
        ("unknown-checkpoint", ["checkpoint"], "eagle-tin"),
        ("backend", ["engine", "backend"], "fa3"),
        ("graphs", ["engine", "graphs"], True),
        ("unknown-fault", ["script"], [{"kind": "fault", "name": "no-such-fault"}, *whole["script"]]),
        ("case", ["case_schema"], 1),
    ):
        scenario = json.loads(json.dumps(whole))
        inner = scenario
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = value
        (work / f"{name}.json").write_text(json.dumps(scenario))
    del whole["script"]
    (work / "missing-key.json").write_text(json.dumps(whole))


def pair(target, draft):
    return ["run", "--target", target, "--draft", draft]


def scenario_file(name):
    return ["run", "--scenario-file", f"{name}.json"]


REFUSED = {
    "release-unknown": ["run", "--engine", "9.9.9"],
    "release-no-version": ["run", "--engine", "newest"],
    "release-not-here": ["run", "--engine", "0.5.9"],
    "release-in-matrix": ["matrix", "--engines", "0.5.11,x", "--cases", "pr25015"],
    "release-install": ["engines", "install", "0.5.13", "1.0"],
    "scenario-unknown": ["run", "--scenario", "singel"],
    "scenario-twice": ["run", "--scenario", "single", "--scenario", "single"],
    "bisect-case-file": ["bisect", "--case", "case.json", "--bad", "0.5.11", "--good", "0.5.13"],
    "case-unknown": ["matrix", "--engines", "0.5.11", "--cases", "pr2501"],
    "case-twice": ["matrix", "--engines", "0.5.11", "--cases", "pr25015,pr25015"],
    "engines-empty": ["matrix", "--engines", ",", "--cases", "pr25015"],
    "device": ["run", "--device", "tpu"],
    "attention": ["run", "--cpu-attention", "torhc"],
    "revert-unknown": ["run", "--revert", "1"],
    "revert-old-release": ["run", "--revert", "25015", "--engine", "0.5.11"],
    "revert-old-release-in-matrix": ["matrix", "--engines", "0.5.13,0.5.11", "--cases", "pr25015", "--revert", "25015"],
    "revert-no-number": ["matrix", "--engines", "0.5.13", "--cases", "pr25015", "--revert", "abc"],
    "json-no-folder": ["run", "--json", "nowhere/out.json"],
    "json-is-folder": ["run", "--json", "empty"],
    "json-no-folder-recheck": ["recheck", "empty", "--json", "nowhere/out.json"],
    "json-no-folder-matrix": ["matrix", "--engines", "0.5.11", "--cases", "pr25015", "--json", "nowhere/out.json"],
    "runs-is-file": ["run", "--runs", "file"],
    "runs-under-file": ["run", "--runs", "file/runs"],
    "pair-half": ["run", "--target", "tiny/target"],
    "pair-no-folder": pair("nowhere", "tiny/draft"),
    "pair-empty-folder": pair("empty", "tiny/draft"),
    "pair-architecture": pair("qwen", "tiny/draft"),
    "pair-swapped": pair("tiny/draft", "tiny/target"),
    "pair-garbled-config": pair("garbled", "tiny/draft"),
    "pair-no-weights": pair("bare", "tiny/draft"),
    "pair-cut-off": pair("cut-off", "tiny/draft"),
    "pair-other-width": pair("tiny/target", "wide/draft"),
    "pair-other-vocabulary": pair("tiny/target", "small-draft"),
    "pair-few-positions": pair("short", "tiny/draft"),
    "pair-vocabulary-below-prompts": pair("small-target", "small-draft"),
    "file-missing": scenario_file("nowhere"),
    "file-is-folder": ["run", "--scenario-file", "empty"],
    **{
        f"file-{name}": scenario_file(name)
        for name in (
            *("cut-off", "binary", "list", "deep", "newer", "unknown-key", "unknown-key-in-list", "unknown-op"),
            *("missing-key", "impossible-tree", "too-long", "small-pool", "foreign-token", "negative-token", "eagle3"),
            *(
                "two-ranks",
                "other-rank",
                "unknown-situation",
                "unknown-checkpoint",
                "backend",
                "graphs",
                "case",
            ),
        )
    },
    "recheck-nothing": ["recheck", "nowhere"],
    "recheck-foreign": ["recheck", "empty"],
    "replay-nothing": ["replay", "nowhere"],
    "replay-foreign": ["replay", "empty"],
}


def call(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_a_case_that_is_meant_with_an_assumption_says_so(place, monkeypatch):
    monkeypatch.setattr(catalogue, "names", lambda: ["pr25015", "pr25109"])
    command = ("run", "--scenario", "pr25015", "--scenario", "pr25109", "--engine", "9.9.9")
    assert call(*command).stdout.splitlines() == ["the release window of pr25109 holds with  --assume F-007"]
    assert call(*command, "--assume", "F-007").stdout == ""


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["run", "--runs", ""], "--runs"),
        (["run", "--scenario-file="], "--scenario-file"),
        (["bisect", "--case", "pr25015", "--repo", "", "--bad", "x", "--good", "y"], "--repo"),
        (["matrix", "--nights=", "--cases", "pr25015"], "--nights"),
        (["report", "", "--html", "a.html"], "an argument"),
        (["engines", "install", ""], "an argument"),
    ],
    ids=lambda found: found if isinstance(found, str) else None,
)
def test_an_empty_value_is_not_read_as_the_current_folder(command, named, place):
    """What a shell makes of a variable that is not set."""
    before = sorted(place.iterdir())
    done = call(*command)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"eaglecheck: {named} is empty")
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_message(name, place, snapshot):
    done = call(*REFUSED[name])
    assert done.exit_code == 2, done.output
    assert done.stderr == snapshot
    assert done.stdout == ""
    assert not (place / "runs").exists()


@pytest.mark.parametrize("name", REFUSED)
def test_every_message_names_the_thing_and_goes_on_to_what_is_allowed_or_to_type(name, place):
    said = call(*REFUSED[name]).stderr
    assert said.startswith("eaglecheck: ")
    assert str(place.parent) not in said or name.startswith("pair-")
    assert "Traceback" not in said
    assert len(said.splitlines()) > 1 or "name" in said or "give" in said, said


def test_a_pair_whose_shapes_do_not_fit_its_config_is_refused_before_an_engine_boots(place):
    done = call(*pair("misshapen", "tiny/draft"))
    assert done.exit_code == 2, done.output
    assert "--target and --draft cannot be used" in done.stderr
    assert "gate_proj" in done.stderr
    assert not list((place / "runs").glob("*"))


def test_architectures_are_those_the_reference_reads():
    from reference import model

    assert pairs.ARCHITECTURES == {"--target": model.TARGET_ARCHITECTURE, "--draft": model.DRAFT_ARCHITECTURE}


def test_a_home_that_cannot_hold_checkpoints_is_named(place, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "make", full)
    done = call("run")
    assert done.exit_code == 2
    assert "cannot make checkpoints" in done.stderr
    assert "export EAGLECHECK_HOME=" in done.stderr


@pytest.mark.parametrize(
    "arguments", [["run", "--nope"], ["run", "--revert", "x"], ["nope"], ["recheck"], ["engines", "install"]]
)
def test_what_the_parser_refuses_is_a_usage_error_too(arguments, place):
    done = call(*arguments)
    assert done.exit_code == 2
    assert "Usage: " in done.stderr


def test_a_fault_of_our_own_keeps_its_traceback_and_exits_4(place, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("we forgot something")

    monkeypatch.setattr("harness.cli.run.run", broken)
    done = call("run")
    assert done.exit_code == 4
    assert "ZeroDivisionError: we forgot something" in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "eaglecheck: this is a fault in eaglecheck itself; please report it with the lines above"
    )


class Full:
    """Standard output on a disk without room, or with nobody at its other end."""

    def __init__(self, number):
        self.number = number

    def __call__(self, *_args, **_kwargs):
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_output_that_cannot_be_written_is_no_divergence(number, monkeypatch):
    monkeypatch.setattr("harness.cli.outcome._reader_gone", lambda: Exit.UNKNOWN)
    assert _attempt(Full(number), (), {}) is Exit.UNKNOWN


def test_rich_turns_a_reader_that_left_into_an_exit_which_is_no_divergence(monkeypatch):
    monkeypatch.setattr("harness.cli.outcome._reader_gone", lambda: Exit.UNKNOWN)

    def command():
        raise SystemExit(1)  # rich.console.Console.on_broken_pipe

    assert _attempt(command, (), {}) is Exit.UNKNOWN


@pytest.mark.parametrize("command", [["--help"], ["run", "--help"]])
def test_help_onto_a_full_disk_is_neither_a_divergence_nor_a_traceback(command):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "harness.cli", *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == Exit.UNKNOWN
    assert done.stderr == "eaglecheck: cannot write: No space left on device\n  make room, or name another place\n"


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--repeats", "1000000000", "0 to 60"),
        ("--scenarios", "99999999999", "0 to 100000"),
        ("--seed", "-1", "0 or more"),
    ],
)
def test_numbers_that_no_night_ends_with_are_refused(option, value, allowed):
    done = call("matrix", "--nights", "nights", "--engines", "0.5.23", option, value)
    assert (done.exit_code, allowed in done.stderr) == (2, True), done.stderr


def test_a_page_and_its_markdown_are_not_one_file():
    done = call("report", "runs/latest", "--html", "one", "--markdown", "./one")
    assert (done.exit_code, "--html and --markdown are one file" in done.stderr) == (2, True), done.stderr


def test_a_group_of_commands_alone_names_them():
    done = call("engines")
    assert done.exit_code == 2
    assert "eaglecheck: which of them?\n  commands: pack, unpack, install, list\n" in done.stderr
