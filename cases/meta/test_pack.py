"""Packing releases for a machine without a network: what goes in, what stays out and why, and what is refused."""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from cases.meta import pretended_wheels
from cases.meta.command_line import call
from cases.meta.pretended_pip import quiet
from cases.meta.pretended_wheels import OTHER, OWN, REQUIRES, REQUIRES_TORCH, TORCH, PretendedIndex, sglang_files
from harness.archive.faults import WriteError
from harness.engines import dependencies
from harness.engines.dependencies import EnvError
from harness.machines import archives, bundle_contents, bundle_files, pack, prebuild
from harness.machines.bundle import Manifest


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PretendedIndex:
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "home"))
    pretended = PretendedIndex()
    monkeypatch.setattr(dependencies, "run", pretended)
    monkeypatch.setattr(prebuild, "build", lambda **_: {"norm/norm.so": b"\x7fELFnorm"})
    return pretended


def packed(output: Path, *versions: str, **options: Any) -> Manifest:
    options = {"torch": TORCH, "python": "3.12", "progress": quiet} | options
    return pack.pack(versions, output=output, **options)


def contents(manifest: Manifest, *paths: Path) -> dict[str, bytes]:
    found = {}
    with bundle_files.opened(*paths) as reader, tempfile.NamedTemporaryFile() as archive:
        for one in manifest.archives:
            reader.save(one, Path(archive.name))
            with tarfile.open(archive.name, mode="r:xz") as members:
                found |= {member.name: members.extractfile(member).read() for member in members}  # type: ignore[union-attr]
    return found


def test_a_release_gets_its_own_pins_and_the_shared_rest_in_import_order(index, tmp_path):
    manifest = packed(tmp_path / "b", "0.5.13")
    (release,) = manifest.releases
    stems = [name.rpartition("-")[0] for name in release.trees]
    own = [
        "stub-ipython",
        "stub-sklearn",
        "sglang-0.5.13",
        "sglang-kernel-0.4.3",
        "transformers-5.8.1",
        "xgrammar-0.2.1",
    ]
    assert stems == [*own, "base", "control"]
    assert {"sglang==0.5.13", "sglang-kernel==0.4.3", "transformers==5.8.1"} <= set(index.asked)
    assert "sgl-deep-gemm==0.1.2" not in index.asked  # nothing before 0.5.16 imports it
    assert (manifest.python, manifest.torch, manifest.glibc, manifest.cuda_arch) == ("3.12", TORCH, "2.17", "sm_90")


def test_what_is_left_out_is_counted_with_its_reason_and_is_not_in_the_file(index, tmp_path):
    manifest = packed(tmp_path / "b", "0.5.13")
    kernel = next(tree for tree in manifest.trees if tree.name.startswith("sglang-kernel"))
    left_out = {rule.pattern: (rule.files, rule.size, rule.reason) for rule in kernel.slimmed}
    assert left_out["sgl_kernel/flash_ops*"] == (1, 10004, "flash attention 3, 1.07 GB")
    names = {name.partition("/")[2] for name in contents(manifest, tmp_path / "b")}
    assert "sgl_kernel/sm90/common_ops.abi3.so" in names
    assert "flashinfer/data/aot/norm/norm.so" in names
    gone = ("flash_ops", "sm100", "_core.cpython", "E=8.json", "sglang/test", "csrc", ".data/")
    assert [name for name in names if any(part in name for part in gone)] == []


def test_two_releases_share_what_is_the_same(index, tmp_path):
    manifest = packed(tmp_path / "b", "0.5.12.post1", "0.5.13")
    first, second = (set(release.trees) for release in manifest.releases)
    assert {name.rpartition("-")[0] for name in first & second} == {
        *(
            "stub-ipython",
            "stub-sklearn",
            "sglang-kernel-0.4.3",
            "transformers-5.8.1",
            "xgrammar-0.2.1",
            "base",
            "control",
        )
    }
    assert len({tree.name for tree in manifest.trees}) == len(manifest.trees) == 9
    assert index.asked.count("sglang-kernel==0.4.3") == 1


def test_a_late_release_gets_its_deep_gemm_and_its_setting(index, tmp_path):
    index.requires = {"0.5.17": [*(one for one in REQUIRES if "deep" not in one), "sgl-deep-gemm==0.1.5.post1"]}
    (release,) = packed(tmp_path / "b", "0.5.17").releases
    stems = {name.rpartition("-")[0] for name in release.trees}
    assert "sgl-deep-gemm-0.1.5.post1" in stems
    assert release.environ == {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}


def test_where_a_release_does_not_get_what_it_asks_for_is_written_down(index, tmp_path):
    index.requires = {"0.5.11": [*(one for one in REQUIRES if "flash" not in one), "flashinfer_python==0.6.8.post1"]}
    (release,) = packed(tmp_path / "b", "0.5.11").releases
    reported = {one.name: (one.wanted, one.carried) for one in release.differences}
    assert reported["flashinfer-python"] == ("==0.6.8.post1", "0.6.12")
    assert reported["outlines"] == ("==0.1.11", "")
    assert "orjson" not in reported  # asked for without a version
    assert all(one.reason for one in release.differences)


@pytest.mark.parametrize("kept", [True, False])
def test_the_same_wheels_give_the_same_bytes(index, tmp_path, monkeypatch, kept):
    monkeypatch.setattr(archives, "KEEP", 1)
    packed(tmp_path / "a", "0.5.13")
    if not kept:
        shutil.rmtree(tmp_path / "home" / "pack" / "compressed")
    packed(tmp_path / "b", "0.5.13")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_manifest_reads_back_and_names_no_machine_and_no_index(index, tmp_path):
    manifest = packed(tmp_path / "b", "0.5.13")
    with bundle_files.opened(tmp_path / "b") as reader:
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
    assert set(contents(manifest, tmp_path / "fa3")) == {f"{tree.name}/sgl_kernel/flash_ops.abi3.so"}
    assert manifest.releases == ()


@pytest.mark.parametrize(
    ("requires", "says"),
    [
        pytest.param(
            ["torch==2.14.1", *REQUIRES[1:]], "wants torch==2.14.1; it cannot be packed for torch 2.11.0", id="torch"
        ),
        pytest.param(
            [*REQUIRES, "new-thing>=3"],
            "requires new-thing, of which harness/machines/bundle_contents.toml",
            id="unknown",
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
    assert caught.value.allowed.endswith("--with-torch")


def test_a_release_that_pins_another_torch_travels_with_it(index, tmp_path):
    index.requires = {"0.5.23": REQUIRES_TORCH}
    manifest = packed(tmp_path / "b", "0.5.13", "0.5.23", with_torch=True)
    old, new = manifest.releases
    stems = [name.rpartition("-")[0] for name in new.trees]
    stubs = ["stub-ipython", "stub-cutlass", "stub-flash-mla", "stub-sklearn"]
    own = ["sglang-0.5.23", "sglang-kernel-0.4.10", "transformers-5.19.0", "xgrammar-0.2.7"]
    assert stems == [*stubs, *own, "sgl-deep-gemm-0.2.3.post2", "torch-2.14.1", "triton-3.8.0", "base", "control"]
    assert (old.torch, new.torch, manifest.torch) == ("", "2.14.1+cu130", TORCH)
    assert (old.programs, new.programs) == ({}, {"TRITON_PTXAS_PATH": "ptxas"})
    assert new.environ.keys() - old.environ.keys() == {
        *("SGLANG_ENABLE_JIT_DEEPGEMM", "PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK")
    }
    stands_for = [name for tree in manifest.trees for name in tree.stands_for]
    assert stands_for == ["IPython", "sklearn", "cutlass", "flash_mla"]
    assert "nvidia-nccl-cu13==2.30.7" not in index.asked


def test_such_a_release_gets_its_own_pins_and_no_flashinfer(index, tmp_path):
    index.requires = {"0.5.23": REQUIRES_TORCH}
    manifest = packed(tmp_path / "b", "0.5.23", with_torch=True)
    assert {"apache-tvm-ffi==0.1.11", "openai==2.6.1", "torchvision==0.29.1"} <= set(index.asked)
    assert not any(one.startswith("flashinfer") for one in index.asked)
    reported = {one.name: (one.wanted, one.carried) for one in manifest.releases[0].differences}
    assert reported["flashinfer-python"] == ("==0.7.2", "")
    assert "apache-tvm-ffi" not in reported


def test_such_a_release_gets_flashinfers_sampling_where_that_is_asked_for(index, tmp_path):
    index.requires = {"0.5.23": REQUIRES_TORCH}
    manifest = packed(tmp_path / "b", "0.5.23", with_torch=True, include=("flashinfer", "fa3"))
    (release,) = manifest.releases
    tree = next(tree for tree in manifest.trees if tree.name.startswith("flashinfer-0.7.2-"))
    held = contents(manifest, tmp_path / "b")
    names = {name.removeprefix(f"{tree.name}/") for name in held if name.startswith(tree.name)}
    assert {name for name in names if "dist-info" not in name} == {
        *("flashinfer/__init__.py", "flashinfer/prefill.py", "flashinfer/version.py", "flashinfer/sampling.py"),
        *("flashinfer/data/include/flashinfer/sampling.cuh", "flashinfer/data/include/curand.h"),
        "flashinfer/data/aot/norm/norm.so",
    }
    assert b"from .version import" in held[f"{tree.name}/flashinfer/__init__.py"]
    assert any(name.endswith("sgl_kernel/flash_ops.abi3.so") for name in held)
    assert (tree.name in release.trees, tree.stands_for) == (True, ("flashinfer",))
    assert [(rule.files, rule.size) for rule in tree.slimmed][:1] == [(3, len(b"import cutlass\n// kernels"))]
    assert release.environ["SGLANG_IS_FLASHINFER_AVAILABLE"] == "false"
    assert "flashinfer-python" not in {one.name for one in release.differences}


def test_a_release_that_imports_flashinfer_wherever_it_runs_gets_it_unasked(index, tmp_path):
    index.requires = {"0.5.22": [one.replace("0.7.2", "0.7.1") for one in REQUIRES_TORCH]}
    (release,) = packed(tmp_path / "b", "0.5.22", with_torch=True).releases
    stems = [name.rpartition("-")[0] for name in release.trees]
    assert stems[-5:] == ["torch-2.14.1", "triton-3.8.0", "flashinfer-0.7.2", "base", "control"]
    assert release.environ["FLASHINFER_USE_CUDA_NORM"] == "1"
    reported = {one.name: (one.wanted, one.carried) for one in release.differences}
    assert reported["flashinfer-python"] == ("==0.7.1", "0.7.2")


def test_a_torch_is_slimmed_to_one_architecture_and_what_went_is_counted(index, tmp_path):
    index.requires = {"0.5.23": REQUIRES_TORCH}
    manifest = packed(tmp_path / "b", "0.5.23", with_torch=True)
    tree = next(tree for tree in manifest.trees if tree.name.startswith("torch-"))
    inside = {name.removeprefix(f"{tree.name}/"): body for name, body in contents(manifest, tmp_path / "b").items()}
    torch = inside["torch/lib/libtorch_cuda.so"]
    assert (OWN.content in torch, OTHER.content in torch) == (True, False)
    assert not {"torch/include/ATen/ATen.h", "triton/backends/nvidia/bin/ptxas"} & set(inside)
    reasons = {rule.reason: rule for rule in tree.slimmed}
    assert reasons["headers"].size == len(b"// headers")
    assert len(OTHER.content) < reasons["symbols, and device code of other cards"].size < len(OTHER.content) + 4000
    libraries = tuple(f"nvidia/{name}" for name in ("cu13", "cudnn", "cusparselt", "nccl", "nvshmem"))
    assert tree.machine == (*libraries, "torch/include/pybind11")


def test_for_several_cards_its_nccl_travels_too(index, tmp_path):
    index.requires = {"0.5.23": REQUIRES_TORCH}
    manifest = packed(tmp_path / "b", "0.5.23", with_torch=True, cards=2)
    (nccl,) = [
        body
        for name, body in contents(manifest, tmp_path / "b").items()
        if name.endswith("/nvidia/nccl/lib/libnccl.so.2")
    ]
    assert (OWN.content in nccl, OTHER.content in nccl) == (True, False)


def test_a_torch_of_which_nothing_is_known_or_of_another_cuda_is_refused(index, tmp_path):
    odd = ["torch==2.99.0", *REQUIRES_TORCH[1:]]
    index.requires = {"0.5.24": odd, "0.5.23": REQUIRES_TORCH}
    with pytest.raises(EnvError, match=r"wants torch==2\.99\.0, of which .*/bundle_contents\.toml says nothing"):
        packed(tmp_path / "b", "0.5.24", with_torch=True)
    assert index.asked == ["sglang==0.5.24"]
    with pytest.raises(EnvError, match=r"torch 2\.14\.1 is published as 2\.14\.1\+cu130, and takes NVIDIA's") as caught:
        packed(tmp_path / "b", "0.5.23", with_torch=True, torch="2.12.0+cu126")
    assert caught.value.next_step.endswith("+cu130")
    assert list(tmp_path.glob("b*")) == []


def test_a_release_that_imports_more_of_flashinfer_than_travels_is_not_packed(index, tmp_path, monkeypatch):
    more = {"sglang/srt/managers/scheduler.py": b"from flashinfer import bmm_fp8, attend\n"}
    monkeypatch.setattr(pretended_wheels, "sglang_files", lambda version: sglang_files(version) | more)
    index.requires = {"0.5.22": REQUIRES_TORCH}
    with pytest.raises(EnvError, match=r"imports names .* that its bundle would lack: flashinfer: attend\n"):
        packed(tmp_path / "b", "0.5.22", with_torch=True)


def test_a_part_can_be_packed_with_the_releases(index, tmp_path):
    manifest = packed(tmp_path / "b", "0.5.13", include=("fa3", "flashinfer"))
    assert any(name.endswith("csrc/batch_prefill.cu") for name in contents(manifest, tmp_path / "b"))
    kernel = next(tree for tree in manifest.trees if tree.name.startswith("sglang-kernel"))
    assert f"{kernel.name}/sgl_kernel/flash_ops.abi3.so" in contents(manifest, tmp_path / "b")
    assert "sgl_kernel/flash_ops*" not in {rule.pattern for rule in kernel.slimmed}


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23"])
def test_a_part_that_no_release_takes_afterwards_is_refused(index, tmp_path, version):
    index.requires = {version: REQUIRES_TORCH}
    with pytest.raises(EnvError, match="none of these releases takes flashinfer") as caught:
        packed(tmp_path / "b", version, with_torch=True, part="flashinfer")
    assert caught.value.next_step == "pack it with them:  --with flashinfer"


def test_files_are_no_larger_than_asked_for_and_hold_everything_once(index, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "LARGE", 10_000)  # flash_ops is an archive of its own
    whole = packed(tmp_path / "whole", "0.5.13", include=("fa3",))
    monkeypatch.setattr(bundle_files, "RESERVE", 24_000)
    manifest = packed(tmp_path / "b", "0.5.13", include=("fa3",), limit=26_000)
    assert len(manifest.files) > 2
    assert manifest.files[0] == f"b.1of{len(manifest.files)}"
    assert sorted(path.name for path in tmp_path.glob("b.*")) == sorted(manifest.files)
    paths = [tmp_path / name for name in manifest.files]
    assert all(path.stat().st_size <= 26_000 for path in paths)
    assert contents(manifest, *reversed(paths)) == contents(whole, tmp_path / "whole")
    assert {archive.part_of for archive in manifest.archives if archive.name == "kernels-1"} == {"kernels"}


def test_a_pip_that_finds_nothing_shows_its_last_lines(index, tmp_path):
    index.fail = lambda command: dependencies.Finished(
        code=1, tail=("ERROR: No matching distribution found for sglang",)
    )
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
    rules = [rule for group in bundle_contents.RULES.values() for rule in group]
    assert all(rule.reason for rule in rules)
    assert {rule.part for rule in rules} == {"", *bundle_contents.PARTS}
    tables = (bundle_contents.PINNED, bundle_contents.CARRIED, bundle_contents.FROM, bundle_contents.LEFT_OUT)
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names)), "a requirement stands in two tables"


@pytest.mark.parametrize("place", ["pack", "output"])
def test_a_disk_that_fills_up_is_named_with_what_to_choose(index, tmp_path, monkeypatch, full_disk, place):
    monkeypatch.setattr(dependencies, "check_room", lambda *_, **__: None)
    folder = full_disk if place == "output" else tmp_path / "home" / "pack"
    if place == "pack":
        folder.parent.mkdir()
        folder.symlink_to(full_disk)
    with pytest.raises(WriteError, match=f"the disk is full: cannot write to {folder}, ") as caught:
        packed(full_disk / "b" if place == "output" else tmp_path / "b", "0.5.13")
    assert ("--output PATH" if place == "output" else "EAGLECHECK_HOME=") in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["0.5.9"], "SGLang 0.5.9 cannot be driven", id="release"),
        pytest.param(["0.5.13", "--with", "fa4"], "unknown --with 'fa4'; did you mean 'fa3'?", id="with"),
        pytest.param(["0.5.13", "--split", "60"], "--split '60' is not a size", id="split"),
        pytest.param(["0.5.13", "--split", "0M"], "--split '0M' is not a size", id="no-size"),
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
    done = call("engines", "pack", "0.5.13", "--output", "sglang.bundle", code=0)
    lines = done.stdout.splitlines()
    assert any(line.split()[:2] == ["sglang-kernel-0.4.3", "4"] for line in lines), done.stdout
    assert lines[-3].startswith("sglang.bundle: ")
    assert lines[-1].endswith("python3 -m harness.machines.unpack sglang.bundle")


def test_an_interrupted_packing_reads_no_further(index, tmp_path, monkeypatch):
    class Interrupted(archives._Content):
        def read(self, size: int | None = -1, /) -> bytes:
            got = super().read(size)
            if self.stop not in seen:
                seen.append(self.stop)
                raise KeyboardInterrupt
            return got

    seen: list[Event] = []
    monkeypatch.setattr(archives, "_Content", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        packed(tmp_path / "b", "0.5.13")
    (stop,) = seen
    with pytest.raises(CancelledError):
        archives._Content(b"more", stop).read()
    assert not (tmp_path / "b").exists()
