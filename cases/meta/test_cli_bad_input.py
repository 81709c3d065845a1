"""What can be refused is refused before anything slow: one message, exit 2, no engine booted, no run folder made."""

from __future__ import annotations

import errno
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from cases import catalogue, fixed
from cases.meta import pretended_engine, results
from cases.meta.command_line import call
from cases.meta.handmade import set_on
from harness.both_sides.gpus import CardError
from harness.cli.main import app
from harness.cli.outcome import Exit, attempt
from harness.cli.refused import allowed_at
from harness.contract.outputs import unusable
from harness.contract.scenario import Scenario
from harness.contract.usage import UsageError
from harness.driving.refusals import check_possible
from harness.engines import envs
from harness.engines.engine import Engine


@pytest.fixture
def place(work, monkeypatch, made_pair):
    """A working folder with every kind of unfit file in it, and a home where every release is ready."""
    monkeypatch.setattr(Engine, "boot", lambda *_, **__: pytest.fail("an engine was booted"))
    monkeypatch.setattr(catalogue, "names", lambda: ["pr25015", "pr26329"])  # the corpus grows, these texts need not
    monkeypatch.setattr(catalogue, "EXAMPLE", "working examples:  SCENARIOS/*.json")
    pretended_engine.furnish(work / "home", published=envs.SUPPORTED)
    work = work / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "empty").mkdir()
    (work / "file").write_text("")
    _checkpoints(work, made_pair)
    _scenarios(work)
    return work


def _checkpoints(work, made_pair):
    shutil.copytree(made_pair("eagle-tiny").root, work / "tiny")
    shutil.copytree(made_pair("eagle-head64").root, work / "wide")
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
        ("sharded", "target", {}),
        ("stops", "target", {}),
        ("listed", "target", {}),
        ("cut-bin", "target", {}),
        ("evil-bin", "draft", {}),
    ):
        shutil.copytree(work / "tiny" / target, work / name)
        config = json.loads((work / name / "config.json").read_text())
        (work / name / "config.json").write_text(json.dumps(config | changes))
    (work / "cut-off" / "model.safetensors").write_bytes(weights[:20000])
    (work / "bare" / "model.safetensors").unlink()
    (work / "garbled" / "config.json").write_text("{")
    (work / "listed" / "config.json").write_text("[]")
    (work / "stops" / "generation_config.json").write_text("{")
    (work / "sharded" / "model.safetensors").rename(work / "sharded" / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (work / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, content in (("cut-bin", weights[:20000]), ("evil-bin", _pickled())):
        (work / name / "model.safetensors").unlink()
        (work / name / "pytorch_model.bin").write_bytes(content)


def _pickled():
    """A torch file whose pickle would call something."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as members:
        members.writestr("archive/data.pkl", b"cos\nsystem\n(S'touch called'\ntR.")
    return made.getvalue()


def _scenarios(work):
    whole = fixed.default_scenarios()[0].model_dump(mode="json")
    (work / "cut-off.json").write_text(json.dumps(whole)[:100])
    (work / "list.json").write_text("[]")
    for name, path, value in (
        ("newer", ["schema_version"], 99),
        ("unknown-key", ["spec", "num_step"], 3),
        ("unknown-op", ["script", 0, "kind"], "submitt"),
        ("impossible-tree", ["spec", "num_draft_tokens"], 9),
        ("too-long", ["requests", 0, "max_new_tokens"], 600),
        ("small-pool", ["engine", "max_total_tokens"], 32),
        ("foreign-token", ["requests", 0, "input_ids"], [1, 2, 512]),
        ("negative-token", ["requests", 0, "input_ids"], [1, -2]),
        ("eagle3", ["spec", "algorithm"], "EAGLE3"),
        ("two-ranks", ["engine", "dp_size"], 2),
        ("three-ranks", ["engine", "tp_size"], 3),
        ("other-rank", ["requests", 0, "dp_rank"], 1),
        ("unknown-coverage-point", ["wants"], ["idle_tik"]),
        ("unknown-checkpoint", ["checkpoint"], "eagle-tin"),
        ("backend", ["engine", "attention_backend"], "fa3"),
        ("graphs", ["engine", "cuda_graph"], True),
        ("unknown-mutant", ["script"], [{"kind": "mutant", "name": "no-such-mutant"}, *whole["script"]]),
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


#: What is typed, and what the message names.
REFUSED = {
    "release-unknown": (["run", "--engine", "9.9.9"], "9.9.9"),
    "release-no-version": (["run", "--engine", "newest"], "newest"),
    "release-not-here": (["run", "--engine", "0.5.9"], "0.5.9"),
    "release-in-matrix": (["matrix", "--engines", "0.5.11,x", "--cases", "pr25015"], "'x'"),
    "release-install": (["engines", "install", "0.5.13", "1.0"], "1.0"),
    "scenario-unknown": (["run", "--scenario", "singel"], "'singel'; did you mean 'single'"),
    "scenario-of-a-family": (["run", "--scenario", "layers-single"], "--family mtp --scenario layers-single"),
    "scenario-in-a-file": (["run", "--scenario", "nowhere.json"], "type:  --scenario-file nowhere.json"),
    "scenario-that-is-a-file": (["run", "--scenario", "file"], "type:  --scenario-file file"),
    "scenarios-in-a-word": (["run", "--scenario", "single,pr25015"], "name them one by one, the option before each"),
    "assumed-in-a-word": (["run", "--assume", "F-003,F-012"], "finding 'F-003,F-012': several in one word"),
    "scenario-twice": (["run", "--scenario", "single", "--scenario", "single"], "'single'"),
    "family-unknown": (["run", "--family", "trees"], "'trees'; did you mean 'tree'"),
    "family-with-file": (["run", "--family", "tree", "--scenario-file", "too-long.json"], "--scenario-file"),
    "bisect-case-file": (["bisect", "--case", "case.json", "--bad", "0.5.11", "--good", "0.5.13"], "case.json"),
    "case-unknown": (["matrix", "--engines", "0.5.11", "--cases", "pr2501"], "'pr2501'; did you mean 'pr25015'"),
    "case-twice": (["matrix", "--engines", "0.5.11", "--cases", "pr25015,pr25015"], "'pr25015' is named twice"),
    "names-twice": (
        ["mutants", "--only", "draft-position-late", "--only=mask-lost"],
        "--only is given twice\n  name all in one word:  --only draft-position-late,mask-lost",
    ),
    "families-twice": (["mutate", "--family", "tree", "--family", "mtp"], "--family tree,mtp"),
    "release-twice": (["run", "--engine", "0.5.13", "--engine", "0.5.11"], "--engine is given twice\n  give it once"),
    "option-by-two-names": (["run", "--page", "4", "--page-size", "16"], "--page and --page-size are one option"),
    "setting-and-its-opposite": (
        ["run", "--overlap", "--disable-overlap-schedule"],
        "--overlap and --disable-overlap-schedule are one option",
    ),
    "packed-twice": (["engines", "pack", "0.5.13", "--output", "a", "--output", "b"], "--output is given twice"),
    "engines-missing": (["matrix", "--cases", "pr25015"], "--engines"),
    "mutants-for-nights": (["matrix", "--engines", "0.5.11", "--cases", "pr25015", "--mutants", "1"], "--mutants"),
    "only-for-nights": (["matrix", "--engines", "0.5.11", "--cases", "pr25015", "--seed", "1"], "--seed"),
    "device": (["run", "--device", "tpu"], "--device tpu cannot be; did you mean 'cpu'?\n  allowed: cpu, cuda"),
    "device-by-another-word": (["run", "--device", "gpu"], "--device gpu cannot be; did you mean 'cuda'?"),
    **{
        f"no-card-{name}": ([name, *more, "--device", "cuda"], "--device cuda: this machine has no NVIDIA GPU")
        for name, *more in (
            ("run", "--family", "tree"),
            ("fuzz", "--examples", "2"),
            ("matrix", "--engines", "0.5.13", "--cases", "pr25015"),
            ("mutants", "--only", "draft-position-late"),
            ("mutate", "--count", "1"),
            ("bisect", "--case", "pr25015", "--bad", "0.5.11", "--good", "0.5.13"),
        )
    },
    "page": (["run", "--page-size", "0"], "--page"),
    "graphs": (["run", "--cuda-graph"], "CUDA graphs need a GPU"),
    "share": (["run", "--gpu-share", "3"], "--gpu-share 3"),
    "assume": (["run", "--assume", "F003"], "'F003'; did you mean 'F-003'"),
    "assume-not": (["run", "--assume", "F-004"], "F-004 is known, but cannot be assumed"),
    "mutants-ours": (
        ["mutants", "--only", "draft-position-late", "--server-arg", "page_size=4"],
        "engine.server_args has page_size, which eaglecheck sets itself",
    ),
    "mutate-family-too-new": (
        ["mutate", "--engine", "0.5.13", "--family", "eagle,hicache"],
        "--family hicache: engine.server_args has enable_hierarchical_cache, and it is not driven on SGLang 0.5.13",
    ),
    "mutant": (["mutants", "--only", "draft-position-lat"], "did you mean 'draft-position-late'"),
    "mutate-family": (["mutate", "--family", "egale"], "'egale'; did you mean 'eagle'"),
    "host-cache-by-kernels": (
        ["run", "--server-arg", "enable_hierarchical_cache=true"],
        "hicache_io_backend 'kernel', whose kernels no CPU has\n  allowed: hicache_io_backend direct\n",
    ),
    "mutate-survivors": (["mutate", "--survivors-of", "nowhere"], "--survivors-of nowhere: there is no such folder"),
    "mutate-survivors-of-nothing": (["mutate", "--survivors-of", "empty"], "--survivors-of empty: it holds no mutants"),
    "mutate-merge-of-nothing": (["mutate", "--merge", "empty"], "--merge empty: it holds no mutants: its plan.json"),
    "mutate-follow": (
        ["mutate", "--follow-only", "--only", "zzz"],
        "--follow-only and --only exclude each other\n  leave one of them out",
    ),
    "mutate-part-of-named": (["mutate", "--only", "zzz", "--shard", "1/2"], "--only and --shard exclude each other"),
    "mutate-only": (["mutate", "--only", "zzz"], "--only zzz: no mutant is called so"),
    "findings-number": (["findings", "95"], "did you mean 'F-095'"),
    "mutate-shard": (["mutate", "--shard", "3/2"], "--shard '3/2' is not a shard\n  allowed: I/N"),
    "revert-unknown": (["run", "--revert", "1"], "--revert 1"),
    "revert-old": (["run", "--revert", "25015", "--engine", "0.5.11"], "0.5.11 has no revert switch"),
    "revert-old-in-matrix": (
        ["matrix", "--engines", "0.5.13,0.5.11", "--cases", "pr25015", "--revert", "25015"],
        "0.5.11 has no revert switch",
    ),
    "revert-no-number": (["matrix", "--engines", "0.5.13", "--cases", "pr25015", "--revert", "abc"], "'abc'"),
    "json-no-folder": (["run", "--json", "nowhere/out.json"], "nowhere/out.json"),
    "json-will-be-folder": (["run", "--json", "own", "--runs", "./own"], "own: it is a folder"),
    "json-is-folder": (["run", "--json", "empty"], "empty: it is a folder"),
    "runs-is-file": (["run", "--runs", "file"], "file: it is a file"),
    **{
        f"dash-{command[0]}{command[-2]}": (command, f"{command[-2]} -: not written to standard output\n  name a place")
        for command in (
            ["night", "--nights", "-"],
            ["night", "--junit", "-"],
            ["night", "--summary", "-"],
            ["engines", "pack", "0.5.13", "--output", "-"],
            ["engines", "unpack", "file", "--keep-kernels", "-"],
        )
    },
    "fuzz-prompts-alone": (["fuzz", "--prompts", "file"], "name one:  --target FOLDER --draft FOLDER"),
    "fuzz-revert": (["fuzz", "--examples", "1", "--revert", "1"], "--revert 1"),
    "fuzz-assumed": (["fuzz", "--examples", "1", "--seed", "2", "--assume", "F-999"], "F-999"),
    "run-family-assumed": (["run", "--family", "tree", "--revert", "1"], "--revert 1"),
    "resume-nothing": (
        ["matrix", "--nights", "empty", "--engines", "0.5.13", "--cases", "pr25015", "--resume", "one"],
        "unknown unfinished night 'one': there is none\n  they are in --nights empty",
    ),
    "pair-half": (["run", "--target", "tiny/target"], "--draft is missing"),
    "pair-other-half": (["run", "--draft", "tiny/draft"], "without --target"),
    "pair-of-itself": (pair("tiny/target", "tiny/target"), "holds no MTP layers"),
    "pair-a-shard-short": (pair("sharded", "tiny/draft"), "names model-00002-of-00002.safetensors, which is not there"),
    "pair-bin-cut-off": (pair("cut-bin", "tiny/draft"), "pytorch_model.bin is damaged or cut off"),
    "pair-bin-of-anything": (pair("tiny/target", "evil-bin"), "pytorch_model.bin is damaged or cut off"),
    "pair-garbled-generation": (pair("stops", "tiny/draft"), "generation_config.json is not JSON"),
    "pair-list-config": (pair("listed", "tiny/draft"), "holds no JSON object"),
    "pair-other-family": ([*pair("tiny/target", "tiny/draft"), "--family", "eagle3"], "drafts as EAGLE\n"),
    "pair-other-algorithm": (
        [*pair("tiny/target", "tiny/draft"), "--scenario-file", "eagle3.json"],
        "drafts as 'EAGLE'",
    ),
    "pair-fuzz-family": (["fuzz", *pair("tiny/target", "tiny/draft")[1:], "--family", "mtp"], "drafts of MTP"),
    "pair-long-context": (
        [*pair("tiny/target", "tiny/draft"), "--context-length", "513"],
        "was made for 512 positions",
    ),
    "context-of-nothing": (["run", "--context-length", "0"], "--context-length 0"),
    "chunk-of-nothing": (["run", "--chunked-prefill-size", "-1"], "--chunked-prefill-size -1"),
    "pool-too-vast": (["run", "--max-total-tokens", "99999999"], "--max-total-tokens 99999999"),
    "all-of-the-device": (["run", "--mem-fraction-static", "1"], "--mem-fraction-static 1"),
    "pool-too-small": (["run", "--max-total-tokens", "40"], "never fit engine.max_total_tokens 40"),
    "pair-no-folder": (pair("nowhere", "tiny/draft"), "--target nowhere"),
    "pair-empty-folder": (pair("empty", "tiny/draft"), "no config.json"),
    "pair-architecture": (pair("qwen", "tiny/draft"), "model_type is of LlamaForCausalLM"),
    "pair-architecture-paper": ([*pair("qwen", "tiny/draft"), "--reference", "paper"], "has no tensor"),
    "pair-architecture-hf": ([*pair("qwen", "tiny/draft"), "--reference", "transformers"], "of LlamaForCausalLM"),
    "pair-swapped": (pair("tiny/draft", "tiny/target"), "swapped"),
    "pair-garbled-config": (pair("garbled", "tiny/draft"), "config.json is not JSON"),
    "pair-no-weights": (pair("bare", "tiny/draft"), "no *.safetensors or pytorch_model*.bin file"),
    "pair-cut-off": (pair("cut-off", "tiny/draft"), "model.safetensors"),
    "pair-other-width": (pair("tiny/target", "wide/draft"), "hidden_size"),
    "pair-other-vocabulary": (pair("tiny/target", "small-draft"), "vocab_size"),
    "pair-few-positions": (pair("short", "tiny/draft"), "--context-length 128"),
    "pair-vocabulary-below-prompts": (pair("small-target", "small-draft"), "vocabulary"),
    "pair-misshapen": (pair("misshapen", "tiny/draft"), "gate_proj"),
    "pair-misshapen-paper": ([*pair("misshapen", "tiny/draft"), "--reference", "paper"], "gate_proj"),
    "pair-misshapen-hf": ([*pair("misshapen", "tiny/draft"), "--reference", "transformers"], "gate_proj"),
    "file-missing": (scenario_file("nowhere"), "nowhere.json: No such file"),
    "file-is-folder": (["run", "--scenario-file", "empty"], "empty: it is a folder"),
    "file-cut-off": (scenario_file("cut-off"), "cut-off.json is not JSON: "),
    "file-list": (scenario_file("list"), "list.json holds an empty list"),
    "file-newer": (scenario_file("newer"), "schema_version 99"),
    "file-unknown-key": (
        scenario_file("unknown-key"),
        "spec.num_step: unknown key 'num_step'; did you mean 'num_steps'",
    ),
    "file-unknown-op": (scenario_file("unknown-op"), "did you mean 'submit'"),
    "file-missing-key": (scenario_file("missing-key"), "script: it is missing\n  allowed keys: "),
    "file-impossible-tree": (scenario_file("impossible-tree"), "spec: num_draft_tokens must be num_steps + 1 = 4"),
    "file-too-long": (scenario_file("too-long"), "600 new ones exceed the context of 512"),
    "file-small-pool": (scenario_file("small-pool"), "never fit engine.max_total_tokens 32"),
    "file-foreign-token": (scenario_file("foreign-token"), "token id 512 is outside"),
    "file-negative-token": (scenario_file("negative-token"), "token id -2 is outside"),
    "file-eagle3": (scenario_file("eagle3"), "spec.algorithm is 'EAGLE3'"),
    "file-two-ranks": (scenario_file("two-ranks"), "engine.dp_size is 2"),
    "file-three-ranks": (
        scenario_file("three-ranks"),
        "engine.tp_size is 3: the 4 heads and 2 key/value heads of checkpoint 'eagle-tiny' cannot be shared so on cpu\n"
        "  allowed: 1, 2\n",
    ),
    "file-other-rank": (scenario_file("other-rank"), "dp_rank 1"),
    "file-unknown-coverage-point": (
        scenario_file("unknown-coverage-point"),
        "wants: unknown coverage point 'idle_tik'; did you mean 'idle_tick'",
    ),
    "file-unknown-checkpoint": (scenario_file("unknown-checkpoint"), "'eagle-tin'; did you mean 'eagle-tiny'"),
    "file-unknown-mutant": (scenario_file("unknown-mutant"), "unknown mutant 'no-such-mutant'"),
    "file-backend": (scenario_file("backend"), "engine.attention_backend 'fa3'"),
    "file-graphs": (scenario_file("graphs"), "engine.cuda_graph"),
    "file-case": (scenario_file("case"), "case.json is a whole corpus case"),
    "recheck-nothing": (["recheck", "nowhere"], "nowhere"),
    "recheck-foreign": (["recheck", "empty"], "empty is not a run folder"),
    "replay-nothing": (["replay", "nowhere"], "nowhere"),
    "replay-foreign": (["replay", "empty"], "empty is not a reproducer folder"),
    "report-nothing-to-write": (["report", "empty"], "--html FILE"),
    "report-one-file": (["report", "runs/latest", "--html", "one", "--markdown", "./one"], "one file: one"),
    "seconds-without-end": (
        ["fuzz", "--seconds", "inf"],
        "--seconds inf cannot be\n  allowed: a number from 1 to 86400",
    ),
    "typed-option": (["run", "--enigne", "0.5.11"], "no option '--enigne'; did you mean '--engine'?\n  more:  eagle"),
    "typed-option-without-its-value": (
        ["run", "--page"],
        "--page needs a value\n  allowed: a whole number from 1 to 512",
    ),
    "typed-switch-with-a-value": (["run", "--spawn=1"], "--spawn is a switch and takes no value\n  type:  --spawn"),
    "typed-choice": (["run", "--reference", "witnes"], "--reference witnes cannot be; did you mean 'witness'?"),
    "typed-argument-too-many": (["run", "single"], "'single' is one argument too many\n  more:  eaglecheck run --help"),
    "typed-nan": (
        ["run", "--mem-fraction-static", "nan"],
        "--mem-fraction-static nan cannot be\n  allowed: a number above 0, below 1\n",
    ),
    "server-arg-of-no-release": (["run", "--server-arg", "page_size"], "page_size"),
    "option-before-command": (["--engine", "0.5.13", "run"], "type:  eaglecheck run --engine 0.5.13"),
    "option-without-command": (["--family", "tree"], "type:  eaglecheck run --family tree"),
    "typed-command": (["runn"], "unknown command 'runn'; did you mean 'run'?\n  allowed: run, export, "),
    "typed-command-of-a-group": (
        ["engines", "instal"],
        "did you mean 'install'?\n  allowed: pack, unpack, install, list",
    ),
    "typed-negative": (
        ["matrix", "--nights", "nights", "--seed", "-1"],
        "--seed -1 cannot be\n  allowed: a whole number from 0 on",
    ),
    "typed-argument-missing": (
        ["recheck"],
        "RUN is missing: a run folder, or one scenario's or reproducer's folder in it",
    ),
    "typed-option-missing": (["bisect", "--good", "0.5.13"], "--bad is missing: a release (with --repo: a commit)"),
    "typed-group-alone": (["engines"], "install"),
}


def commands():
    """Every command, by what is typed."""
    group = typer.main.get_command(app)
    inner = [(f"engines {name}", one) for name, one in group.commands["engines"].commands.items()]
    return {name: one for name, one in [*group.commands.items(), *inner] if name != "engines"}


def typed_values():
    """Every option of every command whose values are numbers or a few words."""
    for command, found in commands().items():
        for param in found.params:
            if (
                param.param_type_name == "option"
                and param.name != "help"
                and not param.is_flag
                and param.name not in ("dtype", "attention_backend", "server_args")
                and allowed_at(found, param)
            ):
                yield command, param.opts[0]


@pytest.mark.parametrize(("command", "option"), sorted(typed_values()))
def test_a_value_of_another_kind_is_refused_with_what_is_allowed(command, option, place):
    done = call(*command.split(), option, "zzz")
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert re.fullmatch(rf"eaglecheck: {option} zzz cannot be\n  allowed: .+\n", done.stderr), done.stderr


#: Paths that may be another word, too.
TEXTS = ("json", "html", "markdown", "output", "case")


def typed_paths():
    """(what is typed, what help calls the path) of every path that a command takes, with what it cannot do without."""
    for command, found in commands().items():
        kinds = inspect.signature(found.callback, eval_str=True).parameters
        for one in (one for one in found.params if one.name in kinds):
            if "pathlib.Path" in str(kinds[one.name].annotation) or one.name in TEXTS:
                needed = [param for param in found.params if param.required or param is one]
                yield (
                    " ".join([command, *(_typed(param, "PATH" if param is one else "x") for param in needed)]),
                    _called(one),
                )


def _called(param):
    return param.opts[0] if param.param_type_name == "option" else param.metavar.strip("[].")


def _typed(param, value):
    return f"{param.opts[0]} {value}" if param.param_type_name == "option" else value


IMPOSSIBLE = {
    "n" * 300: "File name too long",
    "nowhere/" + "n" * 300: "File name too long",
    "a\udcff": "it is not UTF-8",
}


@pytest.mark.parametrize(("path", "why"), [*IMPOSSIBLE.items(), ("n/" * 2000, "File name too long")])
@pytest.mark.parametrize(("command", "named"), [*typed_paths()])
def test_a_path_that_nothing_can_be_at_is_refused_wherever_one_is_named(command, named, path, why, work):
    said = call(*(path if word == "PATH" else word for word in command.split()), code=2).stderr
    assert re.match(rf"eaglecheck: {named} .+: {why}\n  name another place:  {named}", said), said
    assert len(said) < 250


@pytest.mark.parametrize("variable", ["EAGLECHECK_HOME", "EAGLECHECK_RUNS", "EAGLECHECK_LEASES"])
@pytest.mark.parametrize("path", IMPOSSIBLE)
def test_so_is_one_that_a_variable_names(variable, path, work, monkeypatch):
    monkeypatch.setenv(variable, path)
    assert f"name another place:  export {variable}=PATH\n" in call("run", code=2).stderr


@pytest.mark.parametrize("name", [*IMPOSSIBLE, "a\0b"])
@pytest.mark.parametrize("option", ["run --scenario", "matrix --engines 0.5.13 --cases"])
def test_a_name_that_no_file_can_have_is_refused_as_a_name(option, name, work):
    assert call(*option.split(), name, code=2).stderr.startswith("eaglecheck: unknown ")


def test_a_folder_that_may_not_be_looked_into_is_refused(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0)
    before = os.geteuid()
    try:
        if before == 0:  # who may look everywhere
            os.seteuid(65534)
        assert [unusable(str(path)) for path in (folder, folder / "one")] == ["Permission denied"] * 2
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("path", [".", "file", "empty", "nowhere/x", "file/x", "/dev/null", "/dev/stdout", "n" * 255])
def test_a_path_that_something_can_be_at_is_left_to_who_reads_or_writes_it(path, place):
    assert not unusable(path)


def test_a_file_whose_draft_would_have_too_long_a_name_is_refused_before_anything_is_run(place):
    assert "File name too long" in call("run", "--json", "n" * 250, code=2).stderr


def test_a_case_that_is_meant_with_an_assumption_says_so(place, monkeypatch):
    monkeypatch.setattr(catalogue, "names", lambda: ["pr25015", "pr25109"])
    found = results.run_of(results.judged("one"))
    monkeypatch.setattr("harness.cli.run.run", lambda _plan, **_: found)
    monkeypatch.setattr("harness.cli.run.render_run", lambda *_, **__: None)
    command = ("run", "--scenario", "pr25015", "--scenario", "pr25109")
    assert "the release window of pr25109 holds with  --assume F-007\n" in call(*command).stdout
    assert "holds with" not in call(*command, "--assume", "F-007").stdout
    assert call(*command, "--engine", "9.9.9").stdout == ""


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
    done = call(*command, code=2)
    assert f"{named} is empty" in done.stderr
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_message_that_names_the_thing_and_what_to_type(name, place):
    command, named = REFUSED[name]
    done = call(*command)
    said = done.stderr
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert named in said
    assert "Traceback" not in said
    assert said.startswith("eaglecheck: ") or name == "typed-group-alone"
    assert str(place.parent) not in said or name.startswith("pair-")
    assert len(said.splitlines()) > 1 or "name both" in said, said
    assert not list((place / "runs").glob("*"))


def test_a_home_that_cannot_hold_checkpoints_is_named(place):
    (place.parent / "home" / "checkpoints").write_text("")
    done = call("run", code=2)
    assert "cannot make checkpoints" in done.stderr
    assert "export EAGLECHECK_HOME=" in done.stderr


@pytest.mark.parametrize("disk", ["small_disk", "full_disk"], ids=["on-the-way", "wholly"])
def test_a_home_whose_disk_is_full_is_no_fault_of_ours_and_nothing_half_made_stays(place, request, disk):
    disk, checkpoints = request.getfixturevalue(disk), place.parent / "home" / "checkpoints"
    before = [*disk.iterdir()]
    checkpoints.symlink_to(disk)
    done = call("run", code=3)
    assert f"the disk is full: cannot write to {checkpoints}, 0 bytes free" in done.stderr
    assert "export EAGLECHECK_HOME=" in done.stderr
    assert [*disk.iterdir()] == before


def test_an_internal_error_keeps_its_traceback_and_exits_4(place, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("we forgot something")

    monkeypatch.setattr("harness.cli.run.run", broken)
    done = call("run", code=4)
    assert "ZeroDivisionError: we forgot something" in done.stderr
    assert "internal error in eaglecheck" in done.stderr.splitlines()[-1]


class Full:
    """Standard output on a disk without room, or with nobody at its other end."""

    def __init__(self, number):
        self.number = number

    def __call__(self, *_args, **_kwargs):
        raise OSError(self.number, os.strerror(self.number))


def leaves():
    raise SystemExit(1)  # rich.console.Console.on_broken_pipe


@pytest.mark.parametrize("command", [Full(errno.ENOSPC), Full(errno.EPIPE), leaves])
def test_output_that_cannot_be_written_is_no_divergence(command, monkeypatch):
    monkeypatch.setattr("harness.cli.outcome._reader_gone", lambda: Exit.UNKNOWN)
    assert attempt(command) is Exit.UNKNOWN


def test_a_card_that_the_reference_gets_no_share_of_is_no_fault_of_ours(capsys):
    """Its lease is taken before any engine boots, where others hold every one."""

    def command():
        raise CardError("no GPU lease of 5.1 GiB after 121 s: GPU 0 is taken")

    assert attempt(command) is Exit.UNKNOWN
    assert capsys.readouterr().err == "eaglecheck: no GPU lease of 5.1 GiB after 121 s: GPU 0 is taken\n"


@pytest.mark.parametrize("command", [["--help"], ["run", "--help"]])
def test_help_onto_a_full_disk_is_neither_a_divergence_nor_a_traceback(command):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "harness.cli", *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == Exit.UNKNOWN
    assert done.stderr.startswith("eaglecheck: cannot write: No space left on device\n")


#: Ctrl-C while the command's modules are imported.
STOPPED = """
class Stopped:
    def find_spec(name, *_):
        if name == "harness.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Stopped)
"""


@pytest.mark.parametrize(
    ("before", "code", "said"),
    [
        (
            "import os, tempfile; os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd())",
            2,
            "is gone\n  go to another:  cd",
        ),
        (f"import os, signal, sys; exec({STOPPED!r})", 3, "interrupted\n"),
    ],
    ids=["folder-gone", "interrupted-at-once"],
)
def test_what_cuts_a_command_off_before_it_begins_is_no_divergence(before, code, said):
    """Python itself would end with 1, which means one."""
    command = [sys.executable, "-c", f"from harness.launcher import main; {before}; main()", "doctor"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("eaglecheck: ")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("0", 2, "files are read as ANSI_X3.4-1968 here, and ours are UTF-8\n  type:  export PYTHONUTF8=1\n"),
        ("1", 0, ""),
    ],
)
def test_a_machine_that_reads_files_as_something_else_than_utf_8_is_told_what_to_type(mode, code, said):
    command = [sys.executable, "-m", "harness.cli", "--version"]
    done = subprocess.run(
        command, env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": mode}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (code, f"eaglecheck: {said}" if said else "")


@pytest.mark.parametrize(
    ("closed", "command", "code"),
    [
        ("2>&-", "run --scenario nowhere", 2),
        (">&- 2>&-", "run --scenario nowhere", 2),
        ("2>&-", "findings F-003", 0),
        (">&-", "findings F-003", 0),
        ("<&- >&- 2>&-", "recheck nowhere", 2),
    ],
)
def test_a_closed_stream_takes_nothing_from_the_exit_code(closed, command, code, tmp_path):
    """Python has no such stream then, and would end with 1, which means a divergence."""
    start = f"{sys.executable} -c 'from harness.launcher import main; main()' {command} {closed}"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["sh", "-c", start], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, check=False
    )
    assert done.returncode == code


@pytest.mark.parametrize(("first", "said"), [("rules-chain", True), ("conversation", False), (None, False)])
def test_scenarios_that_run_in_another_order_than_named_say_so(first, said, place, monkeypatch):
    """Those of rules-chain need an engine of their own, whose boot comes behind those that share the first one."""
    found = results.run_of(results.judged("one"))
    monkeypatch.setattr("harness.cli.run.run", lambda _plan, **_: found)
    own = Path(__file__).parents[1] / "scenarios"
    files = [own / f"{name}.json" for name in (first, "abort-in-chunk") if first]
    named = [part for file in files for part in ("--scenario-file", str(file))]
    done = call("run", "--engine", "0.5.23", *(("--scenario", "single") if first else ()), *named, code=0)
    assert ("so in this order: single, abort-in-chunk, rules-chain\n" in done.stdout) == said


def test_what_a_terminal_has_no_letter_for_is_printed_all_the_same():
    command = [sys.executable, "-m", "harness.cli", "findings", "F-025"]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?" in done.stdout


@pytest.mark.parametrize("command", ["", "run"])
def test_help(command, snapshot):
    done = call(*command.split(), "--help")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == snapshot


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("--page-size 4 --attention-backend triton", {"page_size": 4, "attention_backend": "triton"}),
        ("--page 4 --backend triton", {"page_size": 4, "attention_backend": "triton"}),
        ("--disable-cuda-graph --disable-overlap-schedule", {"cuda_graph": False, "overlap_schedule": False}),
        (
            "--no-graphs --no-overlap --dtype float32",
            {"cuda_graph": False, "overlap_schedule": False, "dtype": "float32"},
        ),
        ("--overlap-schedule", {"overlap_schedule": True}),
    ],
)
def test_engine_options_have_sglangs_names_and_the_earlier_ones(typed, wanted, place, monkeypatch):
    asked = []
    monkeypatch.setattr("harness.cli.prepare.adapted", lambda scenarios, what, **_: asked.append(what) or exit())
    call("run", "--scenario", "single", *typed.split())
    assert [one.changes() for one in asked] == [wanted]


OLD = {
    "schema_version": 1,
    "name": "own",
    "spec": {"k": 3},
    "requests": [{"rid": "a", "prompt": [1, 2]}],
    "script": [{"kind": "submit", "rids": ["a"]}, {"kind": "tick", "count": 2}, {"kind": "drain"}],
}
FAULTY = OLD | {"script": [{"kind": "fault"}, {"kind": "submit", "rids": ["a"]}, {"kind": "drain"}]}
NEW = {
    "schema_version": 2,
    "name": "own",
    "spec": {"num_steps": 3},
    "requests": [{"rid": "a", "input_ids": [1, 2]}],
    "script": [{"kind": "submit", "rids": ["a"]}, {"kind": "step", "count": 2}, {"kind": "drain"}],
}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (OLD | {"spec": {"num_steps": 5, "k": 3}}, "spec: both 'k' and 'num_steps', which are one setting"),
        (
            {key: value for key, value in OLD.items() if key != "schema_version"} | {"engine": {"dp": 1, "dp_size": 1}},
            "engine: both 'dp' and 'dp_size', which are one setting",
        ),
        (
            OLD | {"requests": [{"rid": "a", "input_ids": [1], "prompt": [2]}]},
            "requests.0: both 'prompt' and 'input_ids', which are one setting",
        ),
        (NEW | {"spec": {"k": 3}}, "spec.k: unknown key 'k'; it is called 'num_steps' in this version"),
        (NEW | {"engine": {"page": 4}}, "engine.page: unknown key 'page'; it is called 'page_size' in this version"),
        (
            NEW | {"requests": [{"rid": "a", "prompt": [1]}]},
            "requests.0.prompt: unknown key 'prompt'; it is called 'input_ids' in this version",
        ),
        (NEW | {"script": [{"kind": "tick"}]}, "found \"tick\"; it is called 'step' in this version"),
        (NEW | {"script": [{"kind": "fault"}]}, "found \"fault\"; it is called 'mutant' in this version"),
        (OLD | {"spec": {"k": 0}}, "spec.k: found 0\n  allowed: a whole number from 1 to 16"),
        (OLD | {"spec": {"num_steps": 0}}, "spec.num_steps: found 0\n  allowed: a whole number from 1 to 16"),
        (OLD | {"spec": {"kk": 3}}, "spec.kk: unknown key 'kk'; did you mean 'k'?\n  allowed keys: algorithm, k, t"),
        (FAULTY, "script.0: op 'fault' needs 'name'"),
        (OLD | {"requests": [{"rid": "a"}]}, "requests.0.prompt: it is missing\n  allowed keys: rid, prompt"),
        (
            NEW | {"script": [{"kind": "step", "count": 0}]},
            "script.0.count: found 0\n  allowed: a whole number from 1 to 10000",
        ),
        (
            NEW | {"script": [{"kind": "step", "count": 10**5}]},
            "found 100000\n  allowed: a whole number from 1 to 10000; 512 scheduler steps end any request, and each is",
        ),
    ],
)
def test_a_scenario_file_is_answered_in_its_own_names_and_no_value_is_dropped(content, said, tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps(content))
    with pytest.raises(catalogue.CaseError) as refused:
        catalogue.read_scenario(path)
    assert said in str(refused.value)


@pytest.mark.parametrize("content", [OLD, NEW, NEW | {"schema_version": 1}, OLD | {"spec": {"num_steps": 3}}])
def test_names_that_are_unambiguous_are_read_whatever_their_version(content, tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps(content))
    assert catalogue.read_scenario(path).id == Scenario.model_validate(NEW).id


def test_a_number_of_thousands_of_digits_is_refused_without_pythons_advice(tmp_path):
    (tmp_path / "own.json").write_text('{"seed": ' + "9" * 5000 + "}")
    with pytest.raises(catalogue.CaseError) as refused:
        catalogue.read_scenario(tmp_path / "own.json")
    assert "5000 digits" in str(refused.value)
    assert "set_int_max_str_digits" not in str(refused.value)


def test_a_finding_that_cannot_be_assumed_names_those_that_can(place):
    said = call("run", "--assume", "F-004").stderr
    assert "did you mean" not in said
    assert re.search(r"\n  can be assumed: F-\d{3}, F-\d{3}", said)


def test_a_scenario_of_two_files_names_both(place):
    whole = json.dumps(fixed.default_scenarios()[0].model_dump(mode="json"))
    for name in ("one", "two"):
        (place / f"{name}.json").write_text(whole)
    assert (
        "scenario 'single' of two.json is named twice, also by one.json\n"
        in call(*scenario_file("one"), *scenario_file("two")[1:]).stderr
    )
    said = call(*scenario_file("one"), "--scenario", "single").stderr
    assert "scenario 'single' of one.json is named twice, also by --scenario single\n" in said


@pytest.mark.parametrize("name", ["foreign-token", "backend", "too-long"])
def test_a_refusal_names_the_file_of_the_scenario(name, place):
    good = fixed.default_scenarios()[1].model_dump(mode="json")
    (place / "good.json").write_text(json.dumps(good))
    done = call("run", "--scenario", "pr25015", "--scenario-file", "good.json", *scenario_file(name)[1:], code=2)
    assert f"scenario 'single' of {name}.json: " in done.stderr


def test_a_refusal_by_the_release_names_the_file_too():
    scenario = catalogue.load("pr25015").scenario
    changed = set_on(scenario, dtype="float16")
    with pytest.raises(UsageError, match=r"scenario '.*' of b\.json: engine\.dtype"):
        check_possible([scenario, changed], version="0.5.23", files=[Path("a.json"), Path("b.json")])


@pytest.mark.parametrize(
    "option",
    [
        *("--page-size", "--context-length", "--chunked-prefill-size", "--max-running-requests", "--max-total-tokens"),
        *("--cuda-graph-max-bs", "--mem-fraction-static"),
    ],
)
def test_help_says_of_a_number_what_a_refusal_says(option):
    said = call("run", option, "-1").stderr.rpartition("allowed: ")[2].partition(",")[0].removesuffix(" or null\n")
    assert said.split()[0] in ("a", "1"), said
    words = " ".join(call("run", "--help").stdout.split())
    assert said.strip() in words.partition(option)[2].partition(". --")[0]


@pytest.mark.parametrize("command", ["", "run", "engines", "engines install", "diff"])
def test_h_is_help(command):
    done = call(*command.split(), "-h")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == call(*command.split(), "--help").stdout


def test_the_version_is_shown():
    done = call("--version")
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"eaglecheck {version('eaglecheck')}\n", "")


def test_mutants_of_an_argument_that_the_release_lacks_are_refused_before_any_boots(place, monkeypatch):
    monkeypatch.setattr("harness.cli.mutants.untaken", lambda *_: "no such argument\n  leave it out")
    done = call("mutants", "--only", "draft-position-late", "--server-arg", "foo=1")
    assert (done.exit_code, done.stderr) == (2, "eaglecheck: no such argument\n  leave it out\n")
