"""Unpacking a bundle without a network: what fits, what is refused, and that nothing half done looks finished."""

from __future__ import annotations

import errno
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cases.meta.command_line import call
from cases.meta.pretended_pip import quiet
from cases.meta.pretended_wheels import REQUIRES_TORCH, TORCH, PretendedIndex
from harness.contract.settings import EngineConfig, SpecConfig
from harness.engines import dependencies, envs
from harness.engines.dependencies import EnvError
from harness.engines.launch import build_launch
from harness.machines import bundle, bundle_contents, bundle_files, doctor, fit, kernels, pack, prebuild, unpack
from harness.machines.bundle import BundleError, Manifest
from harness.machines.fit import Card

H100 = Card(name="NVIDIA H100", uuid="GPU-1", memory=81559, free=81079, capability="9.0", driver="580.159.04")
VERSIONS = ("0.5.12.post1", "0.5.13")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """A bundle of two releases for this very Python, and its fa3 part."""
    root = tmp_path_factory.mktemp("bundles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLECHECK_HOME", str(root / "home"))
        patch.setattr(dependencies, "run", PretendedIndex())
        patch.setattr(prebuild, "build", lambda **_: {"norm/norm.so": b"\x7fELFnorm"})
        patch.setattr(bundle_contents, "ON_RUNNER", ("numpy", "packaging"))
        patch.setattr(bundle_contents, "CONTROL_ON_RUNNER", ())
        patch.setattr(pack, "CONTROL_TESTS", {})
        for name, part in (("engines", ""), ("fa3", "fa3")):
            packed(root / name, *VERSIONS, part=part)
    return {"engines": root / "engines", "fa3": root / "fa3"}


def packed(output: Path, *versions: str, **options: Any) -> Manifest:
    options = {"torch": TORCH, "python": dependencies.python_tag(), "progress": quiet} | options
    return pack.pack(versions, output=output, **options)


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> list[Path]:
    """A release with its own torch, in files of a limited size, and the same for several cards in one."""
    root = tmp_path_factory.mktemp("split")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLECHECK_HOME", str(root / "home"))
        patch.setattr(dependencies, "run", PretendedIndex(requires={"0.5.23": REQUIRES_TORCH}))
        patch.setattr(bundle_contents, "ON_RUNNER", ("numpy", "packaging"))
        patch.setattr(bundle_contents, "CONTROL_ON_RUNNER", ())
        patch.setattr(pack, "CONTROL_TESTS", {})
        patch.setitem(bundle_contents.LEFT_OUT, "torchvision", "it comes with the torch")
        patch.setattr(bundle_files, "RESERVE", 24_000)
        manifest = packed(root / "new", "0.5.23", with_torch=True, limit=26_000)
        packed(root / "cards", "0.5.23", with_torch=True, cards=2)
    assert len(manifest.files) > 2
    return [*(root / name for name in manifest.files), root / "cards"]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What lies beside the machine's own torch."""
    folder = tmp_path / "site-packages"
    for name in ("cu13", "cudnn", "cusparselt", "nccl", "nvshmem"):
        (folder / "nvidia" / name / "lib").mkdir(parents=True)
    (folder / "nvidia" / "nccl" / "lib" / "libnccl.so.2").write_text("the machine's")
    (folder / "torch" / "include" / "pybind11").mkdir(parents=True)
    monkeypatch.setattr(fit, "beside_torch", lambda: folder)
    monkeypatch.setattr(fit, "program", lambda name: f"/cuda/bin/{name}")
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine as the bundle wants it, and nothing on it yet."""
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "a home"))
    monkeypatch.setattr(envs, "current", lambda: None)
    monkeypatch.setattr(fit, "torch_version", lambda: TORCH)
    monkeypatch.setattr(fit, "cards", lambda: (H100,))
    monkeypatch.setattr(dependencies, "run", lambda *_, **__: pytest.fail("pip was run"))
    return tmp_path / "a home"


def test_each_release_is_found_with_the_machines_own_python_and_torch(made, home):
    assert unpack.unpack(made["engines"], progress=quiet) == VERSIONS
    found = envs.ensure("0.5.13", quiet)
    assert (found.ready, found.python, found.torch) == (True, Path(sys.executable), TORCH)
    stems = [path.name.rpartition("-")[0] for path in found.pythonpath]
    assert stems[:3] == ["stub-ipython", "stub-sklearn", "sglang-0.5.13"]
    assert all(path.is_dir() and path.parent == home / "parts" for path in found.pythonpath)
    assert dict(found.environ)["TRITON_CACHE_DIR"] == str(home / "kernels" / "triton")
    assert [engine.version for engine in envs.list_installed() if engine.ready] == list(VERSIONS)


def test_what_was_unpacked_can_be_imported(made, home):
    unpack.unpack(made["engines"], progress=quiet)
    found = envs.state("0.5.12.post1")
    path = os.pathsep.join(map(str, found.pythonpath))
    code = "import IPython.display, flashinfer, sgl_kernel, sglang, transformers; print(sglang.__version__)"
    done = subprocess.run(
        [str(found.python), "-P", "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "0.5.12.post1\n"


def test_its_settings_reach_the_engines_process(made, home, tmp_path):
    unpack.unpack(made["engines"], progress=quiet)
    pair = {"target": tmp_path, "draft": tmp_path}
    launch = build_launch(env=envs.state("0.5.13"), spec=SpecConfig(), engine=EngineConfig(), **pair)
    kept = {name: launch.boot["environment"][name] for name in unpack.KERNEL_CACHES}
    assert {Path(place).parent for place in kept.values()} == {home / "kernels"}
    assert len(set(kept.values())) == len(kept)


def test_a_second_call_unpacks_nothing(made, home):
    unpack.unpack(made["engines"], progress=quiet)
    before = {path: path.stat().st_mtime_ns for path in (home / "parts").iterdir()}
    assert unpack.unpack(made["engines"], progress=quiet) == VERSIONS
    assert {path: path.stat().st_mtime_ns for path in (home / "parts").iterdir()} == before != {}


@pytest.mark.parametrize("stage", ["extract", "rename", "marker"])
def test_an_interrupted_call_leaves_nothing_that_looks_finished_and_the_next_goes_on(made, home, monkeypatch, stage):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    done = []

    def rename_one(self: Path, target: Path) -> Path:
        if done:
            raise KeyboardInterrupt
        done.append(target)
        os.rename(self, target)
        return target

    with monkeypatch.context() as patch:
        if stage == "extract":
            patch.setattr(unpack, "_extract", interrupt)
        elif stage == "rename":
            patch.setattr(Path, "rename", rename_one)
        else:
            patch.setattr(dependencies, "write_marker", interrupt)
        with pytest.raises(KeyboardInterrupt):
            unpack.unpack(made["engines"], progress=quiet)
        assert [engine.version for engine in envs.list_installed() if engine.ready] == []
    unpack.unpack(made["engines"], progress=quiet)
    assert [engine.ready for engine in envs.list_installed()] == [True, True]
    assert not (home / ".incoming").exists()


def test_an_interrupt_ends_what_unpacks_beside_it(made, home, monkeypatch):
    extract, ended = unpack._extract, []

    def interrupted(path: Path, target: Path, stop: threading.Event) -> None:
        begun.wait(60)  # what has not begun by then never does
        if path.name == names[0]:
            raise KeyboardInterrupt
        assert stop.wait(60)
        with pytest.raises(InterruptedError):
            extract(path, target, stop)
        ended.append(path.name)

    with bundle_files.opened(made["engines"]) as reader:
        names = [archive.member for archive in reader.manifest.archives]
    begun = threading.Barrier(len(names))
    with monkeypatch.context() as patch:
        patch.setattr(unpack, "_extract", interrupted)
        with pytest.raises(KeyboardInterrupt):
            unpack.unpack(made["engines"], progress=quiet)
    assert sorted(ended) == sorted(names[1:]) != []
    assert not (home / "parts").exists()
    assert unpack.unpack(made["engines"], progress=quiet) == VERSIONS


def test_an_archive_ends_in_the_middle_of_a_file(tmp_path):
    class Later(threading.Event):
        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > 9

    (tmp_path / "large").write_bytes(os.urandom(1 << 20))
    with tarfile.open(tmp_path / "packed", "w:xz", preset=0) as archive:
        archive.add(tmp_path / "large", "unpacked")
    with pytest.raises(InterruptedError):
        unpack._extract(tmp_path / "packed", tmp_path, Later())
    assert (tmp_path / "unpacked").stat().st_size < 1 << 20


@pytest.mark.parametrize("bundle", ["engines", "kernels"])
def test_a_disk_that_refuses_is_named_with_what_to_type(made, home, tmp_path, monkeypatch, capsys, bundle):
    def refuse(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    if bundle == "kernels":
        saved(made, home, tmp_path / "kernels")
    monkeypatch.setattr(Path, "rename", refuse)
    assert unpack.main([str(made.get(bundle, tmp_path / bundle))]) == 3
    assert "No space left on device\n  make room, or choose another place:  export" in capsys.readouterr().err
    assert not (home / ".incoming").exists()


@pytest.mark.parametrize("folder", [".incoming", "parts/.incoming"])
def test_what_a_killed_call_left_behind_survives_until_nobody_unpacks(made, home, folder):
    def waiting(said: str) -> None:
        raise InterruptedError(said)

    stale = home / folder / "sglang-0.5.13-0000000000" / "stale.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    with (
        dependencies.installing("unpack", progress=quiet),
        pytest.raises(InterruptedError, match="another process is installing unpack"),
    ):
        unpack.unpack(made["engines"], progress=waiting)
    assert stale.exists()
    unpack.unpack(made["engines"], progress=quiet)
    assert not (home / folder).exists()


def test_a_part_that_has_gone_makes_its_release_damaged_and_comes_back(made, home):
    unpack.unpack(made["engines"], progress=quiet)
    shutil.rmtree(envs.state("0.5.13").pythonpath[2])
    assert envs.state("0.5.13").why.startswith("damaged: its part sglang-0.5.13-")
    assert envs.state("0.5.12.post1").ready
    unpack.unpack(made["engines"], progress=quiet)
    assert envs.state("0.5.13").ready


def flipped(source: Path, target: Path) -> Path:
    """The last archive with one bit changed."""
    with tarfile.open(source) as members:
        last = members.getmembers()[-1]
    data = bytearray(source.read_bytes())
    data[last.offset_data + last.size // 2] ^= 1
    target.write_bytes(data)
    return target


def cut(source: Path, target: Path) -> Path:
    target.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
    return target


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        pytest.param(flipped, "is damaged: ", id="flipped"),
        pytest.param(cut, "is cut off", id="cut-off"),
        pytest.param(lambda _, target: target, "cannot read", id="absent"),
        pytest.param(lambda _, target: (target.write_text("hello"), target)[1], "no bundle of eaglecheck", id="text"),
    ],
)
def test_a_damaged_file_is_refused_and_nothing_is_installed(made, home, tmp_path, damage, says):
    with pytest.raises(BundleError, match=says) as caught:
        unpack.unpack(damage(made["engines"], tmp_path / "damaged"), progress=quiet)
    assert caught.value.next_step
    assert envs.list_installed() == ()
    assert not (home / "parts").exists()
    assert not (home / ".incoming").exists()


def test_a_bundle_of_another_format_names_both(made):
    with bundle_files.opened(made["engines"]) as reader:
        text = reader.manifest.to_json().replace('"format": 2', '"format": 9')
    with pytest.raises(BundleError, match="format 9, this checkout reads 1 and 2"):
        bundle.parse(text)


def test_a_bundle_of_the_first_format_is_still_read(made):
    """As it was written: without what only the second knows."""
    with bundle_files.opened(made["engines"]) as reader:
        data = json.loads(reader.manifest.to_json())
    del data["files"]
    for tree in data["trees"]:
        del tree["machine"], tree["stands_for"]
    for release in data["releases"]:
        del release["torch"], release["programs"]
    for archive in data["archives"]:
        del archive["pieces"], archive["part_of"]
    with bundle_files.opened(made["engines"]) as reader:
        trees = tuple(replace(tree, stands_for=()) for tree in reader.manifest.trees)
        expected = replace(reader.manifest, format=1, trees=trees)
    assert bundle.parse(json.dumps(data | {"format": 1})) == expected


def test_a_manifest_that_was_changed_is_found_out(made, tmp_path):
    data = made["engines"].read_bytes().replace(b'"sm_90"', b'"sm_80"')
    (tmp_path / "b").write_bytes(data)
    with pytest.raises(BundleError, match="its manifest has another hash"), bundle_files.opened(tmp_path / "b"):
        pass


@pytest.mark.parametrize(
    ("where", "name", "value", "says", "next_step"),
    [
        (fit, "torch_version", "2.13.0+cu130", "for torch 2.11.0.cu130, here is torch 2.13.0.cu130", "--torch 2.13.0"),
        (fit, "torch_version", "", "here is no torch in ", "--torch VERSION"),
        (fit, "cards", (replace(H100, capability="8.0"),), "for sm_90, the card here is .* .sm_80", "Hopper"),
        (dependencies, "python_tag", "3.10", r"is for Python 3\.1\d, this is 3\.10", "--python 3.10"),
        (platform, "libc_ver", ("glibc", "2.5"), r"needs glibc 2\.17 or newer, here is glibc 2\.5", ""),
    ],
)
def test_another_machine_is_refused_with_what_to_pack_for_it(
    made, home, monkeypatch, where, name, value, says, next_step
):
    monkeypatch.setattr(where, name, lambda: value)
    with pytest.raises(BundleError, match=says) as caught:
        unpack.unpack(made["engines"], progress=quiet)
    assert next_step in caught.value.next_step
    assert not home.exists()


@pytest.mark.parametrize(
    ("expected", "version", "lacking"),
    [
        ("no-such-thing", "", "no-such-thing"),
        ("huggingface-hub<2", "2.4.0", "huggingface-hub<2 (2.4.0 is there)"),
        ("huggingface-hub<2", "1.33.0", ""),
    ],
)
def test_a_package_that_is_expected_there_is_named_if_it_lacks(monkeypatch, expected, version, lacking):
    if version:
        monkeypatch.setattr(fit.dependencies.metadata, "version", lambda name: version)
    assert fit._lacking(expected) == lacking


def test_without_a_card_it_unpacks_and_says_so(made, home, monkeypatch):
    monkeypatch.setattr(fit, "cards", lambda: ())
    reported: list[str] = []
    assert unpack.unpack(made["engines"], progress=reported.append) == VERSIONS
    assert reported[0] == "no GPU is seen here; the kernels of this bundle are for sm_90"


def test_a_release_installed_from_an_index_is_not_overwritten(made, home):
    folder = home / "engines" / "0.5.13"
    folder.mkdir(parents=True)
    dependencies.write_marker(
        folder, {"version": "0.5.13", "closure": dependencies.key(), "python": dependencies.python_tag()}
    )
    with pytest.raises(EnvError, match=r"SGLang 0\.5\.13 is installed already") as caught:
        unpack.unpack(made["engines"], progress=quiet)
    assert "EAGLECHECK_HOME" in caught.value.next_step
    assert not (home / "parts").exists()


def test_a_part_is_added_to_every_release_it_was_left_out_of(made, home):
    unpack.unpack(made["engines"], progress=quiet)
    for _ in range(2):
        assert unpack.unpack(made["fa3"], progress=quiet) == ()
    (kernel,) = [path for path in envs.state("0.5.13").pythonpath if path.name.startswith("sglang-kernel")]
    assert (kernel / "sgl_kernel" / "flash_ops.abi3.so").read_bytes().startswith(b"\x7fELFflash")
    assert (kernel / "sgl_kernel" / "flash_ops.abi3.so").stat().st_nlink == 2
    assert envs.state("0.5.13").ready


def test_a_part_without_its_releases_is_refused(made, home):
    with pytest.raises(BundleError, match=r"only adds to sglang-kernel-0\.4\.3, which is not unpacked here"):
        unpack.unpack(made["fa3"], progress=quiet)


def test_a_part_may_be_named_before_its_releases(made, home):
    assert unpack.unpack(made["fa3"], made["engines"], progress=quiet) == VERSIONS
    (kernel,) = [path for path in envs.state("0.5.13").pythonpath if path.name.startswith("sglang-kernel")]
    assert (kernel / "sgl_kernel" / "flash_ops.abi3.so").is_file()


def test_files_of_a_limited_size_unpack_in_any_order_beside_other_bundles(made, split, home, site):
    mixed = [*reversed(split[:-1]), made["engines"]]
    assert set(unpack.unpack(*mixed, progress=quiet)) == {*VERSIONS, "0.5.23"}
    assert all(engine.ready for engine in envs.list_installed())
    assert (envs.state("0.5.23").torch, envs.state("0.5.13").torch) == ("2.14.1+cu130", TORCH)


def test_a_file_that_is_missing_is_named_before_anything_is_unpacked(split, home, site):
    absent = split[1]
    with pytest.raises(BundleError, match=f"in {len(split) - 1} files, of which {absent.name} was not named"):
        unpack.unpack(*(path for path in split[:-1] if path != absent), progress=quiet)
    assert not home.exists()


def test_files_with_nothing_but_what_is_unpacked_already_need_not_be_there(split, home, site):
    unpack.unpack(*split[:-1], progress=quiet)
    shutil.rmtree(home / "parts" / envs.state("0.5.23").pythonpath[0].name)
    with bundle_files.opened(split[0]) as reader:
        wanted = {piece.file for one in unpack._needed(reader.manifest) for piece in one.cut()}
    some = [path for number, path in enumerate(split[:-1]) if number in wanted]
    assert len(some) < len(split) - 1
    assert unpack.unpack(*some, progress=quiet) == ("0.5.23",)
    assert envs.state("0.5.23").ready


@pytest.mark.parametrize(("damage", "says"), [(flipped, "is damaged: "), (cut, "is cut off")])
def test_of_several_files_the_damaged_one_is_named(split, home, site, tmp_path, damage, says):
    damaged = damage(split[0], tmp_path / "copied")
    with pytest.raises(BundleError) as caught:
        unpack.unpack(*split[1:-1], damaged, progress=quiet)
    assert f"{damaged} {says}" in str(caught.value)
    assert envs.list_installed() == ()


def test_its_own_torch_comes_first_and_finds_the_machines_libraries(split, home, site):
    unpack.unpack(*split[:-1], progress=quiet)
    found = envs.state("0.5.23")
    stems = [path.name.rpartition("-")[0] for path in found.pythonpath]
    assert stems.index("torch-2.14.1") < stems.index("base")
    torch = found.pythonpath[stems.index("torch-2.14.1")]
    nccl = torch / "torch" / "lib" / ".." / ".." / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    assert nccl.read_text() == "the machine's"
    assert os.access(torch / "torch" / "bin" / "torch_shm_manager", os.X_OK)
    assert dict(found.environ)["TRITON_PTXAS_PATH"] == "/cuda/bin/ptxas"
    assert dict(found.environ)["PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK"] == "1"


def test_for_several_cards_its_own_nccl_is_used_and_the_machines_stays(split, home, site):
    unpack.unpack(split[-1], progress=quiet)
    torch = next(path for path in envs.state("0.5.23").pythonpath if path.name.startswith("torch-"))
    assert (torch / "nvidia" / "nccl" / "lib" / "libnccl.so.2").read_bytes().startswith(b"\x7fELF")
    assert (torch / "nvidia" / "cudnn").readlink() == site / "nvidia" / "cudnn"
    assert (site / "nvidia" / "nccl" / "lib" / "libnccl.so.2").read_text() == "the machine's"


def test_what_was_slimmed_is_said_by_the_doctor_and_reaches_the_trace(split, home, site, tmp_path, monkeypatch):
    monkeypatch.setattr(fit, "ask_cards", lambda: ())
    unpack.unpack(*split[:-1], progress=quiet)
    found = {finding.name: finding.detail for finding in doctor.diagnose()}
    assert "with its own torch 2.14.1+cu130" in found["SGLang 0.5.23"]
    launch = build_launch(env=envs.state("0.5.23"), spec=SpecConfig(), engine=EngineConfig(), target=home, draft=home)
    said = launch.boot["slimmed"]
    assert found["SGLang 0.5.23 slimmed"] == "; ".join(said)
    (torch,) = [line for line in said if line.startswith("torch-2.14.1: ")]
    assert "without headers, without symbols, and device code of other cards" in torch
    assert torch.endswith("the machine's own nvidia/nvshmem, the machine's own torch/include/pybind11")
    assert {"stub-cutlass: stands in for cutlass", "stub-flash-mla: stands in for flash_mla"} <= set(said)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda patch, site: shutil.rmtree(site / "nvidia" / "cudnn"), "takes what it needs from nvidia/cudnn beside"),
        (lambda patch, site: patch.setattr(fit, "program", lambda name: ""), "needs ptxas, which is not found here"),
    ],
)
def test_a_machine_that_lacks_what_the_torch_needs_is_refused(split, home, site, monkeypatch, change, says):
    change(monkeypatch, site)
    with pytest.raises(BundleError, match=says):
        unpack.unpack(*split[:-1], progress=quiet)
    assert not home.exists()


@pytest.mark.parametrize("where", ["home", "beside-nvcc", "own-triton", "nowhere"])
def test_a_program_is_looked_for_in_the_toolkit_first(tmp_path, monkeypatch, where):
    own = tmp_path / "site" / "triton" / "backends" / "nvidia" / "bin"
    places = {"home": tmp_path / "home" / "bin", "beside-nvcc": tmp_path / "cuda" / "bin", "own-triton": own}
    order = [*places]
    for name, folder in places.items():
        folder.mkdir(parents=True)
        if where in order and order.index(name) >= order.index(where):
            (folder / "ptxas").touch(mode=0o755)
    (tmp_path / "cuda" / "bin" / "nvcc").touch(mode=0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(tmp_path / "cuda" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(fit, "TOOLKIT", tmp_path / "none")
    monkeypatch.setattr(fit, "beside_torch", lambda: tmp_path / "site")
    assert fit.program("ptxas") == (str(places[where] / "ptxas") if where in places else "")


def compiled(home: Path) -> Path:
    """A kernel as tvm-ffi leaves it: the source is older than what was made of it."""
    folder = home / "kernels" / "tvm-ffi" / "clamp_position"
    folder.mkdir(parents=True)
    for name, when in (("cuda.cu", 1_700_000_000.25), ("kernel.so", 1_700_000_009.75), ("build.lock", 1.0)):
        (folder / name).write_bytes(name.encode())
        os.utime(folder / name, (when, when))
    return folder


def saved(made: dict[str, Path], home: Path, path: Path) -> None:
    """A bundle of compiled kernels at `path`, and nothing left of where they were compiled."""
    unpack.unpack(made["engines"], progress=quiet)
    compiled(home)
    kernels.save(path, progress=quiet)
    shutil.rmtree(home)


def test_compiled_kernels_come_back_with_their_order_of_age(made, home, tmp_path):
    unpack.unpack(made["engines"], progress=quiet)
    with pytest.raises(EnvError, match="no kernels have been compiled"):
        kernels.save(tmp_path / "kernels", progress=quiet)
    folder = compiled(home)
    kernels.save(tmp_path / "kernels", progress=quiet)
    shutil.rmtree(home / "kernels")
    assert unpack.unpack(tmp_path / "kernels", progress=quiet) == ()
    assert sorted(path.name for path in folder.iterdir()) == ["cuda.cu", "kernel.so"]
    assert [(folder / name).stat().st_mtime for name in ("cuda.cu", "kernel.so")] == [1_700_000_000, 1_700_000_009]
    reported: list[str] = []
    unpack.unpack(tmp_path / "kernels", progress=reported.append)
    assert reported == ["0 files of compiled kernels placed, 2 left out: their kernels are there already"]


def test_a_kernel_that_is_there_is_not_mixed_with_the_one_that_comes_back(made, home, tmp_path):
    unpack.unpack(made["engines"], progress=quiet)
    folder = compiled(home)
    shutil.copytree(folder, folder.with_name("of-another-width"))
    kernels.save(tmp_path / "kernels", progress=quiet)
    shutil.rmtree(home / "kernels")
    folder.mkdir(parents=True)
    (folder / "cuda.cu").write_text("another process compiles it now")
    reported: list[str] = []
    unpack.unpack(tmp_path / "kernels", progress=reported.append)
    assert reported == ["2 files of compiled kernels placed, 2 left out: their kernels are there already"]
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"cuda.cu": "another process compiles it now"}
    assert (folder.with_name("of-another-width") / "kernel.so").is_file()


@pytest.mark.parametrize(
    ("incoming", "there", "placed"),
    [
        pytest.param("tvm-ffi/k/k.so tvm-ffi/k/obj/k.o", "tvm-ffi/k/k.cu", "", id="begun"),
        pytest.param("tvm-ffi/k/k.so", "tvm-ffi/k/lock", "", id="locked"),
        pytest.param("tvm-ffi/k/k.so", "tvm-ffi/k/", "tvm-ffi/k/k.so", id="empty"),
        pytest.param("tvm-ffi/k/k.so", "tvm-ffi/", "tvm-ffi/k/k.so", id="nothing-yet"),
        pytest.param("ext/1/k/k.so ext/1/l/l.so", "ext/1/.k.lock ext/1/k/k.cu", "ext/1/l/l.so", id="lock-beside"),
        pytest.param("tvm-ffi/index", "tvm-ffi/k/k.so", "tvm-ffi/index", id="file-beside"),
        pytest.param("index", "index", "", id="same-file"),
        pytest.param("triton/k/k.cubin", "triton", "", id="file-in-the-way"),
        pytest.param("inductor/ab/x.py inductor/cd/y.py", "inductor/ab/z.py", "inductor/cd/y.py", id="inductor"),
    ],
)
def test_a_kernel_is_placed_as_a_whole_or_not_at_all(tmp_path, incoming, there, placed):
    for root, names in (("incoming", incoming), ("there", there)):
        for name in names.split():
            place = tmp_path / root / name
            (place if name.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
            if not name.endswith("/"):
                place.write_text(root)
    kernels._place(tmp_path / "incoming", tmp_path / "there")
    found = {str(path.relative_to(tmp_path / "there")): path.read_text() for path in kernels._files(tmp_path / "there")}
    had = [name for name in there.split() if not name.endswith("/")]
    assert found == dict.fromkeys(had, "there") | dict.fromkeys(placed.split(), "incoming")


def test_a_kernel_that_another_process_makes_meanwhile_stays_its_own(tmp_path, monkeypatch):
    (tmp_path / "incoming" / "k").mkdir(parents=True)
    (tmp_path / "incoming" / "k" / "k.so").touch()
    (tmp_path / "there" / "k").mkdir(parents=True)
    (tmp_path / "there" / "k" / "k.cu").touch()
    monkeypatch.setattr(Path, "is_dir", lambda self: self.parent.name != "there" and os.path.isdir(self))
    kernels._place(tmp_path / "incoming", tmp_path / "there")
    assert [path.name for path in kernels._files(tmp_path / "there")] == ["k.cu"]


def test_what_an_interrupted_call_left_is_not_kept_with_the_kernels(made, home, tmp_path, monkeypatch):
    saved(made, home, tmp_path / "kernels")
    unpack.unpack(made["engines"], progress=quiet)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_place", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            unpack.unpack(tmp_path / "kernels", progress=quiet)
    assert not list((home / "kernels").iterdir())
    assert not (home / ".incoming").exists()
    compiled(home)
    for old in (".kernels-1", "kernels-1.tar.xz", ".kernels-1.partial/tvm-ffi/k/k.so", "tvm-ffi/k/lock"):
        (home / "kernels" / old).parent.mkdir(parents=True, exist_ok=True)
        (home / "kernels" / old).touch()
    assert kernels.save(tmp_path / "again", progress=quiet).trees[0].files == 2
    assert not (home / ".incoming").exists()


def test_warming_is_left_to_the_command_that_has_just_been_unpacked(made, home, tmp_path, monkeypatch):
    """In this process the command's packages need not be there."""
    monkeypatch.setattr(os, "execv", lambda program, words: started.append((program, *words)))
    monkeypatch.setattr("harness.machines.warm.warm", lambda versions, **_: (warmed.append(versions), compiled(home)))
    started, warmed = [], []
    typed = [str(made["engines"]), "--warm", "--keep-kernels", str(tmp_path / "kernels")]
    unpack.main(typed)
    command = str(home / "bin" / "eaglecheck")
    assert started == [(command, command, "engines", "unpack", *typed)]
    call(*started[0][2:], code=0)
    assert warmed == [VERSIONS]
    assert (tmp_path / "kernels").is_file()


def test_a_place_for_kernels_that_cannot_be_is_refused_before_anything_is_unpacked(made, home, tmp_path, capsys):
    assert unpack.main([str(made["engines"]), "--keep-kernels", "n" * 300]) == 2
    assert "File name too long\n  name another place:  --keep-kernels PATH" in capsys.readouterr().err
    assert not (home / "engines").exists()


def test_kernels_alone_cannot_be_warmed(made, home, tmp_path, capsys):
    saved(made, home, tmp_path / "kernels")
    assert unpack.main([str(tmp_path / "kernels"), "--warm"]) == 3
    assert "these files hold none" in capsys.readouterr().err
    assert "these files hold none" in call("engines", "unpack", str(tmp_path / "kernels"), "--warm", code=3).output


def test_damaged_kernels_are_not_to_be_packed_but_compiled(made, home, tmp_path):
    saved(made, home, tmp_path / "kernels")
    with pytest.raises(BundleError, match="is damaged") as caught:
        unpack.unpack(flipped(tmp_path / "kernels", tmp_path / "damaged"), progress=quiet)
    assert "--keep-kernels" in caught.value.next_step
    assert "engines pack" not in caught.value.next_step


def test_compiled_kernels_of_a_release_with_its_own_torch_fit_the_machine_they_came_from(split, home, site, tmp_path):
    unpack.unpack(*split[:-1], progress=quiet)
    folder = compiled(home)
    kernels.save(tmp_path / "kernels", progress=quiet)
    shutil.rmtree(home / "kernels")
    unpack.unpack(tmp_path / "kernels", progress=quiet)
    assert (folder / "kernel.so").is_file()


def test_compiled_kernels_of_another_place_are_refused(made, home, tmp_path, monkeypatch):
    unpack.unpack(made["engines"], progress=quiet)
    compiled(home)
    kernels.save(tmp_path / "kernels", progress=quiet)
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(BundleError, match="compiled for an installation in ") as caught:
        unpack.unpack(tmp_path / "kernels", progress=quiet)
    assert f"EAGLECHECK_HOME={shlex.quote(str(home))}" in caught.value.next_step


def test_the_doctor_takes_what_was_left_out_for_no_damage_and_sees_any_other(made, home, monkeypatch):
    monkeypatch.setattr(fit, "ask_cards", lambda: ())
    unpack.unpack(made["engines"], progress=quiet)
    found = {finding.name: finding for finding in doctor.diagnose()}
    assert found["SGLang 0.5.13"].status == "ok"
    assert "out of a bundle" in found["SGLang 0.5.13"].detail
    assert "engine dependencies" not in found  # a bundle needs none
    site = envs.state("0.5.13").pythonpath[2]
    (site / "sglang" / "srt" / "same.py").write_text("# patched")
    damaged = next(finding for finding in doctor.diagnose() if finding.name == "SGLang 0.5.13")
    assert (damaged.status, "sglang/srt/same.py" in damaged.detail) == ("missing", True)
    assert damaged.fix.startswith("rm -r ")


def test_the_launcher_finds_the_checkout_and_the_control_packages(made, home):
    unpack.unpack(made["engines"], progress=quiet)
    code = "import harness, pydantic; print(harness.__file__); print(pydantic.__file__)"
    done = subprocess.run([str(unpack.launcher()), "-c", code], capture_output=True, text=True, cwd="/", check=True)
    ours, theirs = done.stdout.splitlines()
    assert Path(ours).parent.parent == unpack.CHECKOUT
    assert Path(theirs).is_relative_to(home / "parts")


def test_bytecode_is_kept_where_python_is_told_to_write_none(made, home, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    unpack.unpack(made["engines"], progress=quiet)
    code = "import pydantic, sys; print(sys.dont_write_bytecode); print(pydantic.__cached__)"
    done = subprocess.run([str(unpack.launcher()), "-c", code], capture_output=True, text=True, cwd="/", check=True)
    unwritten, compiled_file = done.stdout.splitlines()
    assert unwritten == "False"
    assert Path(compiled_file).is_relative_to(home / "bytecode")
    assert Path(compiled_file).is_file()


def test_it_starts_with_the_standard_library_alone():
    """On the machine it is for, nothing of ours is installed yet."""
    path = f"import sys; sys.path.insert(0, {str(unpack.CHECKOUT)!r})"
    code = f"{path}; import harness.machines.unpack as u; u.main(['/no/such'])"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, cwd="/")
    assert done.stderr.splitlines() == [
        "eaglecheck: cannot read /no/such: No such file or directory",
        "  name a file that `engines pack` or `--keep-kernels` made",
    ]


@pytest.mark.parametrize(
    ("argument", "code", "says"), [("engines", 0, "eaglecheck doctor"), ("/no/such", 2, "cannot read /no/such")]
)
def test_the_command_ends_with_what_to_type(made, home, argument, code, says):
    done = call("engines", "unpack", made.get(argument, argument), code=code)
    assert says in done.output
