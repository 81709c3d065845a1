"""The doctor beside a GPU: recorded answers of nvidia-smi, and what a release's own environment says it can run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cases.meta.pretended_pip import PretendedPip
from harness.engines import dependencies, envs
from harness.engines.envs import EngineEnv
from harness.machines import doctor, doctor_gpu, fit, prebuild

#: As one H100 answered the question that `fit.ask_cards` puts (driver 580.159.04).
H100 = "NVIDIA H100 80GB HBM3, GPU-ca7fb467-45f2-2bba-e902-2b44098be98e, 81559, 81079, 9.0, 580.159.04"
OTHER = "NVIDIA A100-SXM4-40GB, GPU-5d5a2f9c-0000-1111-2222-333344445555, 40960, 40339, 8.0, 580.159.04"
FULL = H100.replace("81079", "1011")
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running."
)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """smi(lines, code=0) puts an nvidia-smi on PATH that says these."""
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(envs, "current", lambda: None)
    monkeypatch.setattr(dependencies, "run", PretendedPip())
    monkeypatch.setattr(fit, "torch_version", lambda: "2.11.0+cu130")
    monkeypatch.setattr(prebuild, "nvcc", lambda: None)

    def say(*lines: str, code: int = 0) -> None:
        text = "\n".join(lines)
        (place / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
        (place / "nvidia-smi").chmod(0o755)

    return say


def named(name):
    return [finding for finding in doctor.diagnose() if finding.name == name]


def test_each_card_is_named_with_its_uuid_its_memory_and_its_driver(smi):
    smi(H100, OTHER)
    assert [finding.status for finding in named("GPU")] == ["ok", "warn"]
    what = ("NVIDIA H100 80GB", "GPU-ca7fb467-45f2-2bba-e902-2b44098be98e", "79.2 of 79.6 GiB", "sm_90", "580.159.04")
    assert [word for word in what if word not in named("GPU")[0].detail] == []


@pytest.mark.parametrize(
    ("line", "says", "fix"),
    [
        pytest.param(OTHER, "sm_80, driver 580.159.04; bundles are made for sm_90", "", id="other-card"),
        pytest.param(FULL, "1.0 of 79.6 GiB free", "nvidia-smi", id="full"),
    ],
)
def test_a_card_that_will_not_do_is_a_warning(smi, line, says, fix):
    smi(line)
    (found,) = named("GPU")
    assert (found.status, says in found.detail, found.fix[:10]) == ("warn", True, fix)


@pytest.mark.parametrize(
    ("lines", "code", "says"),
    [
        pytest.param((NO_DRIVER,), 9, "couldn't communicate with the NVIDIA driver", id="no-driver"),
        pytest.param(("No devices were found",), 6, "No devices were found", id="no-devices"),
        pytest.param(("NVIDIA H100, GPU-1, [N/A], 81079, 9.0, 580",), 0, "[N/A]", id="unreadable"),
        pytest.param(("something else",), 0, "something else", id="other-words"),
    ],
)
def test_an_nvidia_smi_that_does_not_answer_is_quoted(smi, lines, code, says):
    smi(*lines, code=code)
    (found,) = named("GPU")
    assert found.status == "warn"
    assert says in found.detail
    assert fit.cards() == ()


def test_without_an_nvidia_smi_engines_run_on_the_cpu(smi, monkeypatch):
    monkeypatch.setattr(doctor_gpu, "by_driver", list)
    monkeypatch.setenv("PATH", "/nowhere")
    (found,) = named("GPU")
    assert (found.status, found.detail) == ("ok", "none: engines run on the CPU")
    assert named("torch") == named("CUDA compiler") == []


@pytest.mark.parametrize(("version", "status"), [("2.11.0+cu130", "ok"), ("2.13.0+cpu", "warn"), ("", "warn")])
def test_a_torch_without_cuda_is_reported_beside_a_card(smi, monkeypatch, version, status):
    monkeypatch.setattr(fit, "torch_version", lambda: version)
    smi(H100)
    (found,) = named("torch")
    assert found.status == status


def test_a_cuda_compiler_is_reported_beside_a_card_with_its_release_or_missing(smi, monkeypatch, tmp_path):
    smi(H100)
    (found,) = named("CUDA compiler")
    assert found.status == "warn"
    assert found.fix.startswith("export CUDA_HOME=")
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(prebuild, "nvcc", lambda: compiler)
    (found,) = named("CUDA compiler")
    assert found.detail.startswith(f"13.0 at {compiler}")


ALL = {"triton": "", "flashinfer": "", "fa3": ""}
SEEN = {
    "error": "",
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "card": "NVIDIA H100",
    "graphs": "",
    "sampling": "",
    "backends": ALL,
}


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({}, "ok", "attention triton, flashinfer, fa3; eager and CUDA graphs; float16, bfloat16"),
        (
            {"backends": {**ALL, "fa3": "sgl_kernel.flash_ops: No module named 'sgl_kernel.flash_ops'"}},
            "ok",
            "no fa3 (sgl_kernel.flash_ops: No module",
        ),
        ({"graphs": "deep_gemm: No module named 'deep_gemm'"}, "warn", "no CUDA graphs (deep_gemm: No module"),
        ({"backends": {**ALL, "triton": "triton: broken"}}, "missing", "no triton attention: triton: broken"),
        ({"card": ""}, "missing", "its torch 2.11.0+cu130 (CUDA 13.0) sees no card"),
        ({"error": "sgl_kernel: libcuda.so.1: cannot open"}, "missing", "cannot be imported: sgl_kernel: libcuda.so.1"),
    ],
)
def test_what_a_release_says_of_itself_is_judged(changes, status, says):
    found = doctor_gpu.judge("0.5.13", {**SEEN, **changes})
    assert (found.name, found.status) == ("SGLang 0.5.13 on GPU", status)
    assert says in found.detail
    assert bool(found.fix) == (found.status == "missing" or "no fa3" in found.detail)


def test_each_attention_that_a_bundle_lacks_comes_with_what_to_pack():
    found = doctor_gpu.judge("0.5.13", {**SEEN, "backends": {"triton": "", "flashinfer": "no", "fa3": "no"}})
    assert found.status == "ok"
    for part in ("flashinfer", "fa3"):
        assert f"eaglecheck engines pack 0.5.13 --part {part} --output {part}.bundle" in found.fix


def test_a_release_with_its_own_torch_gets_the_parts_that_there_are_for_it():
    lacking = {**SEEN, "backends": {"triton": "", "flashinfer": "no", "fa3": "no"}}
    found = doctor_gpu.judge("0.5.23", lacking, own_torch=True)
    assert found.fix.startswith("eaglecheck engines pack 0.5.23 --with-torch --part fa3 --output fa3.bundle  #")
    bare = {**lacking, "sampling": "flashinfer.sampling: No module named 'flashinfer'"}
    found = doctor_gpu.judge("0.5.23", bare, own_torch=True)
    assert "no sampled requests (flashinfer.sampling: No module named" in found.detail
    assert found.fix.startswith("eaglecheck engines pack 0.5.23 --with-torch --with flashinfer --output 0.5.23.bundle")


def engine(tmp_path: Path, **modules: str) -> EngineEnv:
    """A release made of these modules (dotted, __ for a dot), in this very Python."""
    site = tmp_path / "site"
    base = {"sgl_kernel": "", "sglang": "__version__ = '0.5.17'", "sglang__srt__managers__scheduler": "", "triton": ""}
    for name in ("triton", "flashinfer", "flashattention"):
        base[f"sglang__srt__layers__attention__{name}_backend"] = ""
    for name, text in {**base, **modules}.items():
        folder = site.joinpath(*name.split("__"))
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(text)
    return EngineEnv(
        version="0.5.17",
        python=Path(sys.executable),
        pythonpath=(site,),
        torch="2.11.0",
        ready=True,
        environ=(("EAGLECHECK_SEEN", "1"),),
    )


FAKE_TORCH = """
import os
class cuda:
    is_available = staticmethod(lambda: os.environ.get("EAGLECHECK_SEEN") == "1")
    get_device_name = staticmethod(lambda number: "H100")
class version:
    cuda = "13.0"
__version__ = "2.11.0+cu130"
print("SGLang says something first")
"""


def test_a_release_is_asked_in_its_own_environment(tmp_path):
    answer = doctor_gpu.ask(engine(tmp_path, torch=FAKE_TORCH, flashinfer=""))
    assert answer["card"] == "H100"  # so its settings reached it
    assert answer["backends"] == {
        "triton": "",
        "flashinfer": "its sources were left out of the bundle",
        "fa3": "sgl_kernel.flash_ops: No module named 'sgl_kernel.flash_ops'",
    }
    assert answer["graphs"].startswith("deep_gemm: ")  # not there, or that of an SGLang in this very environment
    assert answer["sampling"] == "flashinfer.sampling: No module named 'flashinfer.sampling'"


def test_what_was_added_to_a_release_is_seen(tmp_path):
    release = engine(tmp_path, torch=FAKE_TORCH, flashinfer__sampling="", sgl_kernel__flash_ops="", deep_gemm="")
    (release.pythonpath[0] / "flashinfer" / "__init__.py").touch()
    sources = release.pythonpath[0] / "flashinfer" / "data" / "csrc"
    sources.mkdir(parents=True)
    (sources / "batch_prefill.cu").touch()
    answer = doctor_gpu.ask(release)
    assert answer["backends"] == ALL
    assert (answer["graphs"], answer["sampling"]) == ("", "")


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ({"sgl_kernel": "raise OSError('libcuda.so.1: cannot open shared object file')"}, "sgl_kernel: libcuda.so.1"),
        ({"torch": "import os, sys; print('killed', file=sys.stderr); os._exit(9)"}, "killed"),
    ],
)
def test_a_release_that_cannot_be_imported_says_why(tmp_path, modules, says):
    assert says in doctor_gpu.ask(engine(tmp_path, **{"torch": FAKE_TORCH, **modules}))["error"]


def test_an_interpreter_that_has_gone_is_an_answer_too(tmp_path):
    release = EngineEnv(version="0.5.13", python=tmp_path / "gone", pythonpath=(), torch="", ready=True)
    assert "gone" in doctor_gpu.ask(release)["error"]


def test_without_a_card_no_release_is_asked(smi, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_gpu, "ask", lambda release: pytest.fail("a release was imported"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert list(doctor_gpu.abilities([engine(tmp_path)])) == []


def test_beside_a_card_each_unpacked_release_is_asked(smi, tmp_path):
    smi(H100)
    release = engine(tmp_path, torch=FAKE_TORCH, flashinfer="", deep_gemm="")
    (found,) = doctor_gpu.abilities([release])
    assert (found.name, found.status) == ("SGLang 0.5.17 on GPU", "ok")
    assert json.dumps(found.detail).count("triton") == 1
