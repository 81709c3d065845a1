"""Packing releases for a machine without a network: what goes in, what stays out and why, and what is refused."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from cases.meta.pretended_pip import quiet
from cases.meta.pretended_wheels import REQUIRES, PretendedIndex
from cases.meta.test_cli_bad_input import call
from harness.engines import closure
from harness.engines.closure import EnvError
from harness.machines import bundle, pack, prebuild, slimming
from harness.machines.bundle import Manifest

TORCH = "2.11.0+cu130"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PretendedIndex:
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "home"))
    pretended = PretendedIndex()
    monkeypatch.setattr(closure, "run", pretended)
    monkeypatch.setattr(prebuild, "build", lambda **_: {"norm/norm.so": b"\x7fELFnorm"})
    return pretended


def packed(output: Path, *versions: str, part: str = "") -> Manifest:
    return pack.pack(versions, torch=TORCH, python="3.12", output=output, with_control=True, progress=quiet, part=part)


def contents(path: Path, manifest: Manifest) -> set[str]:
    found = set()
    with bundle.opened(path) as reader:
        for archive in manifest.archives:
            with tarfile.open(fileobj=reader.archive(archive), mode="r:xz") as members:
                found |= set(members.getnames())
    return found


def test_a_release_gets_its_own_pins_and_the_shared_rest_in_import_order(index, tmp_path):
    manifest = packed(tmp_path / "b", "0.5.13")
    (release,) = manifest.releases
    stems = [name.rpartition("-")[0] for name in release.trees]
    own = ["stub-ipython", "sglang-0.5.13", "sglang-kernel-0.4.3", "transformers-5.8.1"]
    assert stems == [*own, "base", "control"]
    assert {"sglang==0.5.13", "sglang-kernel==0.4.3", "transformers==5.8.1"} <= set(index.asked)
    assert "sgl-deep-gemm==0.1.2" not in index.asked  # nothing before 0.5.16 imports it
    assert (manifest.python, manifest.torch, manifest.glibc, manifest.cuda_arch) == ("3.12", TORCH, "2.17", "sm_90")


def test_what_is_left_out_is_counted_with_its_reason_and_is_not_in_the_file(index, tmp_path):
    manifest = packed(tmp_path / "b", "0.5.13")
    kernel = next(tree for tree in manifest.trees if tree.name.startswith("sglang-kernel"))
    left_out = {rule.pattern: (rule.files, rule.size, rule.reason) for rule in kernel.slimmed}
    assert left_out["sgl_kernel/flash_ops*"] == (1, 10004, "flash attention 3, 1.07 GB")
    names = {name.partition("/")[2] for name in contents(tmp_path / "b", manifest)}
    assert "sgl_kernel/sm90/common_ops.abi3.so" in names
    assert "flashinfer/data/aot/norm/norm.so" in names
    gone = ("flash_ops", "sm100", "_core.cpython", "E=8.json", "sglang/test", "csrc", ".data/")
    assert [name for name in names if any(part in name for part in gone)] == []


def test_two_releases_share_what_is_the_same(index, tmp_path):
    manifest = packed(tmp_path / "b", "0.5.12.post1", "0.5.13")
    first, second = (set(release.trees) for release in manifest.releases)
    assert {name.rpartition("-")[0] for name in first & second} == {
        *("stub-ipython", "sglang-kernel-0.4.3", "transformers-5.8.1", "base", "control")
    }
    assert len({tree.name for tree in manifest.trees}) == len(manifest.trees) == 7
    assert index.asked.count("sglang-kernel==0.4.3") == 1


def test_a_late_release_gets_its_stub_its_deep_gemm_and_its_setting(index, tmp_path):
    index.requires = {"0.5.17": [*(one for one in REQUIRES if "deep" not in one), "sgl-deep-gemm==0.1.5.post1"]}
    (release,) = packed(tmp_path / "b", "0.5.17").releases
    stems = {name.rpartition("-")[0] for name in release.trees}
    assert {"stub-xgrammar", "sgl-deep-gemm-0.1.5.post1"} <= stems
    assert release.environ == {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}


def test_where_a_release_does_not_get_what_it_asks_for_is_written_down(index, tmp_path):
    index.requires = {"0.5.11": [*(one for one in REQUIRES if "flash" not in one), "flashinfer_python==0.6.8.post1"]}
    (release,) = packed(tmp_path / "b", "0.5.11").releases
    reported = {one.name: (one.wanted, one.carried) for one in release.differences}
    assert reported["flashinfer-python"] == ("==0.6.8.post1", "0.6.12")
    assert reported["outlines"] == ("==0.1.11", "")
    assert "orjson" not in reported  # asked for without a version
    assert all(one.reason for one in release.differences)


def test_the_same_wheels_give_the_same_bytes(index, tmp_path):
    packed(tmp_path / "a", "0.5.13")
    packed(tmp_path / "b", "0.5.13")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_manifest_reads_back_and_names_no_machine_and_no_index(index, tmp_path):
    manifest = packed(tmp_path / "b", "0.5.13")
    with bundle.opened(tmp_path / "b") as reader:
        assert reader.manifest == manifest
    text = manifest.to_json()
    assert str(tmp_path) not in text
    assert "://" not in text
    wheels = {wheel["name"]: wheel for tree in json.loads(text)["trees"] for wheel in tree["wheels"]}
    assert len(wheels["sglang"]["sha256"]) == 64


def test_a_part_holds_once_what_several_releases_leave_out(index, tmp_path):
    index.requires = {"0.5.11": [*(one for one in REQUIRES if "kernel" not in one), "sglang-kernel==0.4.2"]}
    whole = packed(tmp_path / "b", "0.5.11", "0.5.13")
    manifest = packed(tmp_path / "fa3", "0.5.11", "0.5.13", part="fa3")
    (tree,) = manifest.trees
    assert sorted(tree.into) == sorted(one.name for one in whole.trees if one.name.startswith("sglang-kernel"))
    assert contents(tmp_path / "fa3", manifest) == {f"{tree.name}/sgl_kernel/flash_ops.abi3.so"}
    assert manifest.releases == ()


@pytest.mark.parametrize(
    ("requires", "says"),
    [
        pytest.param(
            ["torch==2.14.1", *REQUIRES[1:]], "wants torch==2.14.1; it cannot be packed for torch 2.11.0", id="torch"
        ),
        pytest.param(
            [*REQUIRES, "new-thing>=3"], "requires new-thing, of which harness/machines/slimming.toml", id="unknown"
        ),
        pytest.param(["torch==2.11.0", "numpy"], "does not say which sglang-kernel, transformers", id="no-pins"),
    ],
)
def test_a_release_that_cannot_be_packed_is_refused_before_the_large_downloads(index, tmp_path, requires, says):
    index.requires = {"0.5.13": requires}
    with pytest.raises(EnvError) as caught:
        packed(tmp_path / "b", "0.5.13")
    assert says in str(caught.value)
    assert index.asked == ["sglang==0.5.13"]
    assert list(tmp_path.glob("b*")) == []


def test_another_torch_is_named_in_a_way_that_the_command_takes(index, tmp_path):
    index.requires = {"0.5.23": ["torch==2.14.1", *REQUIRES[1:]]}
    with pytest.raises(EnvError) as caught:
        packed(tmp_path / "b", "0.5.23")
    assert caught.value.next_step.endswith("eaglecheck engines pack 0.5.23 --output FILE --torch 2.14.1+cu130")


def test_a_pip_that_finds_nothing_shows_its_last_lines(index, tmp_path):
    index.fail = lambda command: closure.Finished(code=1, tail=("ERROR: No matching distribution found for sglang",))
    with pytest.raises(EnvError, match="No matching distribution") as caught:
        packed(tmp_path / "b", "0.5.13")
    assert "packing needs a package index" in caught.value.next_step


def test_what_was_fetched_is_not_fetched_again(index, tmp_path):
    packed(tmp_path / "b", "0.5.13")
    index.asked.clear()
    packed(tmp_path / "b", "0.5.13")
    assert index.asked == []


def test_without_a_compiler_it_says_which_one_to_name(tmp_path, monkeypatch):
    monkeypatch.setattr(prebuild, "nvcc", lambda: None)
    with pytest.raises(EnvError, match="no nvcc") as caught:
        prebuild.build(flashinfer=tmp_path, tvm_ffi=tmp_path, cuda_headers=[], work=tmp_path, progress=quiet)
    assert "CUDA_HOME" in caught.value.next_step


def test_a_compiler_that_fails_shows_its_last_lines(tmp_path, monkeypatch):
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\necho 'norm.cu:1: fatal error: cublasLt.h: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(prebuild, "nvcc", lambda: broken)
    with pytest.raises(EnvError, match=r"cublasLt\.h: No such file"):
        prebuild.build(flashinfer=tmp_path, tvm_ffi=tmp_path, cuda_headers=[], work=tmp_path, progress=quiet)


def test_every_rule_and_every_table_entry_has_a_reason():
    rules = [rule for group in slimming.RULES.values() for rule in group]
    assert all(rule.reason for rule in rules)
    assert {rule.part for rule in rules} == {"", *slimming.PARTS}
    tables = (slimming.PINNED, slimming.CARRIED, slimming.FROM, slimming.LEFT_OUT)
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names)), "a requirement stands in two tables"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["0.5.99"], "SGLang '0.5.99' is none of the releases of our tests", id="release"),
        pytest.param(["0.5.13", "--output", "."], "cannot write to .: it is a folder", id="folder"),
        pytest.param(["0.5.13", "--output", "no/such/b"], "there is no folder no/such", id="nowhere"),
        pytest.param(["0.5.13", "--python", "312"], "--python '312' is not a version of Python", id="python"),
        pytest.param(["0.5.13", "--torch", "2.11.0"], "--torch '2.11.0' is not a CUDA build", id="torch"),
        pytest.param(["0.5.13", "--part", "fa2"], "unknown --part 'fa2'; did you mean 'fa3'?", id="part"),
    ],
)
def test_what_can_be_refused_at_once_is(index, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    tail = [] if "--output" in arguments else ["--output", "b"]
    done = call("engines", "pack", *arguments, *tail)
    assert (done.exit_code, index.asked) == (2, []), done.output
    assert says in done.stderr


def test_the_command_prints_what_it_came_to(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call("engines", "pack", "0.5.13", "--output", "sglang.bundle")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert any(line.split()[:2] == ["sglang-kernel-0.4.3", "4"] for line in lines), done.stdout
    assert lines[-3].startswith("sglang.bundle: ")
    assert lines[-1].endswith("python3 -m harness.machines.unpack sglang.bundle")
