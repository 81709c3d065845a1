"""What a bundle carries, what it leaves out and why: one table, one reason a line.

Measured on one H100 (Python 3.12, torch 2.11.0+cu130, CUDA 13.0), text-only Llama target and EAGLE draft. A requirement
of a release that stands in none of the tables stops the packing: it has to be looked at first.

This module must not download or write anything: it is data.
"""

from __future__ import annotations

from dataclasses import dataclass

#: (CUDA architecture of a bundle, the folder of sglang-kernel that serves it).
CUDA_ARCH = "sm_90"

#: Carried at the version that the release itself pins: others break it.
#: transformers 5.17.0 registers 'qwen3_asr' a second time, and SGLang 0.5.13 no longer imports.
PINNED = ("sglang-kernel", "transformers")

#: Carried for every release at one version: absent from a machine that only has torch, or there in another version.
CARRIED = {
    "orjson": "3.13.0",
    "fastapi": "0.121.0",
    "uvicorn": "0.54.0",
    "pyzmq": "27.3.0",
    "msgspec": "0.22.0",
    "setproctitle": "1.3.8",
    "pybase64": "1.5.1",
    "python-multipart": "0.0.34",
    "partial-json-parser": "0.2.1.1.post7",
    "interegular": "0.3.3",
    "compressed-tensors": "0.20.0",
    "openai": "2.6.1",
    "watchfiles": "1.3.0",
    "gguf": "0.19.0",
    "apache-tvm-ffi": "0.1.9",
    "flashinfer-python": "0.6.12",
    "distro": "1.9.0",
}
#: What those import in turn, and no release names.
CARRIED_FOR_OTHERS = {
    "starlette": "0.49.1",  # fastapi
    "jiter": "0.19.0",  # openai
    "sniffio": "1.3.1",  # openai
    "dill": "0.4.1",  # sglang's own serialization
    "loguru": "0.7.3",  # compressed-tensors
    "tokenizers": "0.22.2",  # transformers refuses newer ones
}
#: The control side needs these as well as the engines; torch images lack them.
CONTROL = {
    "pydantic": "2.12.3",
    "pydantic-core": "2.41.4",
    "annotated-types": "0.8.0",
    "typing-inspection": "0.4.5",
}
#: Only `pytest` needs it (snapshots of rendered output).
CONTROL_TESTS = {"syrupy": "7.0.2"}

#: Carried from the first of these releases on, at the release's own pin.
FROM = {"sgl-deep-gemm": ("0.5.16", "imported when CUDA graphs are on; older releases do without")}

#: What the machine's own Python must have beside torch, `<` where a carried package refuses newer ones.
ON_RUNNER = (
    "aiohttp",
    "einops",
    "huggingface-hub<2",  # transformers' own limit
    "ninja",
    "numpy",
    "nvidia-ml-py",
    "packaging",
    "pillow",
    "prometheus-client",
    "psutil",
    "requests",
    "safetensors",
    "scipy",
    "sentencepiece",
    "tiktoken",
    "torchvision",
    "tqdm",
    "uvloop",
)
#: The control side's own needs that are expected there; `doctor` names the missing ones again.
CONTROL_ON_RUNNER = (
    "filelock",
    "hypothesis",
    "jinja2",
    "pandas",
    "pyarrow",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "rich",
    "typer",
)

#: Requirements of the releases that nothing on our way imports.
LEFT_OUT = {
    "anthropic": "an API that is not served here",
    "av": "video",
    "blobfile": "remote files",
    "build": "only builds packages",
    "cuda-python": "bindings that torch images have under other names; nothing on our way imports them",
    "datasets": "benchmarks",
    "decord2": "video",
    "easydict": "models that are not driven here",
    "flash-attn-4": "an attention backend of other cards",
    "flashinfer-cubin": "compiled attention of other cards, 500 MB",
    "helion": "kernels of models that are not driven here",
    "humming-kernels": "quantized matrix products",
    "ipython": "a stub takes its place",
    "kernels": "a kernel hub, which would want a network",
    "llguidance": "grammars: the engine runs without a grammar backend",
    "mistral-common": "tokenizers of other models",
    "modelscope": "a model hub, which would want a network",
    "numba": "n-gram speculation only",
    "nvidia-cutlass-dsl": "kernels of other cards",
    "nvidia-mathdx": "kernels of models that are not driven here",
    "openai-harmony": "a chat format of other models",
    "outlines": "grammars: the engine runs without a grammar backend",
    "py-spy": "a profiler for people",
    "quack-kernels": "kernels of other cards",
    "smg-grpc-servicer": "a server front end",
    "soundfile": "sound; without cffi it breaks transformers",
    "tilelang": "kernels of models that are not driven here",
    "timm": "images",
    "tokenspeed-mla": "attention of other models",
    "torch": "the machine's own",
    "torch-memory-saver": "weights that come and go, which nothing here does",
    "torchao": "quantization",
    "torchaudio": "sound",
    "torchcodec": "video",
    "xgrammar": "grammars; from 0.5.16 on a stub takes its place",
    "xxhash": "nothing on our way imports it",
    "zstandard": "nothing on our way imports it",
}

#: Where a release asks for another version of a carried package, and why ours does.
DIFFERENT_BECAUSE = {
    "flashinfer-python": "one for all releases: with triton attention only its norm and sampling kernels run",
    "apache-tvm-ffi": "one for all releases, and the prebuilt kernels were built against it",
}
DIFFERENT_ANYWAY = "one version for all releases"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Files of a wheel that are left out; `pattern` as in fnmatch, over the whole path: the first that fits counts."""

    pattern: str
    reason: str
    part: str = ""  # the piece of its own in which these files can be had


RULES: dict[str, tuple[Rule, ...]] = {
    "sglang": (
        Rule(pattern="sglang/multimodal_gen/*", reason="image and video generation"),
        Rule(pattern="sglang/test/*", reason="SGLang's own tests"),
        Rule(pattern="sglang/*/tests/*", reason="tests of kernels"),
        Rule(pattern="sglang/*/benchmark/*", reason="benchmarks of kernels"),
        Rule(pattern="*/_core.cpython*.so", reason="the gRPC and HTTP servers, which nothing here starts"),
        Rule(pattern="*configs*.json", reason="tuned launch tables of mixture-of-experts and quantized kernels"),
        Rule(pattern="tools/*", reason="no part of the package"),
    ),
    "sglang-kernel": (
        Rule(pattern="sgl_kernel/flash_ops*", reason="flash attention 3, 1.07 GB", part="fa3"),
        Rule(pattern="sgl_kernel/flashmla*", reason="attention of other models"),
        Rule(pattern="sgl_kernel/infllm_ops*", reason="sparse attention of other models"),
        Rule(pattern="sgl_kernel/sm100/*", reason="another card"),
        Rule(pattern="lib/*", reason="communication between machines"),
        Rule(pattern="lib64/*", reason="communication between machines"),
        Rule(pattern="include/*", reason="headers of that communication"),
        Rule(pattern="mscclpp*", reason="communication between machines"),
        Rule(pattern="_mscclpp*", reason="communication between machines"),
        Rule(pattern="triton_kernels/*", reason="mixture of experts"),
        Rule(pattern="deep_gemm/*", reason="quantized matrix products, with headers (0.4.2 brings its own copy)"),
    ),
    "flashinfer-python": (
        Rule(pattern="flashinfer/data/cutlass/test/*", reason="tests of a library"),
        Rule(pattern="flashinfer/data/cutlass/examples/*", reason="examples of a library"),
        Rule(pattern="flashinfer/data/cutlass/python/*", reason="a library's Python side, which nothing calls"),
        Rule(pattern="flashinfer/data/cccl/python/*", reason="a library's Python side, which nothing calls"),
        Rule(pattern="flashinfer/data/csrc/*", reason="sources; two kernels are prebuilt", part="flashinfer"),
        Rule(pattern="flashinfer/data/include/*", reason="sources", part="flashinfer"),
        Rule(pattern="flashinfer/data/cutlass/*", reason="sources", part="flashinfer"),
        Rule(pattern="flashinfer/data/cccl/*", reason="sources", part="flashinfer"),
        Rule(pattern="flashinfer/data/spdlog/*", reason="sources", part="flashinfer"),
    ),
    "sgl-deep-gemm": (Rule(pattern="deep_gemm/include/*", reason="sources of kernels that are switched off"),),
}

#: Pieces of their own, unpacked after the releases: name → (the wheel they come out of, what they are for).
PARTS = {
    "flashinfer": ("flashinfer-python", "attention through flashinfer, compiled at first use"),
    "fa3": ("sglang-kernel", "flash attention 3"),
}

#: Modules in place of packages that are imported and never used.
STUBS: dict[str, dict[str, str]] = {
    "stub-ipython": {
        "IPython/__init__.py": '"""Stands in for IPython: sglang.utils imports two names for notebooks."""\n'
        "from . import display as display\n",
        "IPython/display.py": "def HTML(data=None, **_options):\n    return data\n\n\n"
        "def display(*_shown, **_options):\n    return None\n",
    },
    "stub-xgrammar": {
        "xgrammar/__init__.py": '"""Stands in for xgrammar: names are imported, no grammar is ever compiled."""\n'
        "from pydantic import BaseModel\n\n\nclass StructuralTag(BaseModel):\n    pass\n\n\n"
        "def __getattr__(name):\n    if name.startswith('__'):\n        raise AttributeError(name)\n"
        "    return type(name, (BaseModel,), {})\n",
        "xgrammar/structural_tag.py": "from pydantic import BaseModel\n\n\n"
        "def __getattr__(name):\n    if name.startswith('__'):\n        raise AttributeError(name)\n"
        "    return type(name, (BaseModel,), {})\n",
    },
}
#: A stub, and the first release that needs it.
STUBS_FROM = {"stub-ipython": "0", "stub-xgrammar": "0.5.16"}

#: Settings, and the first release that needs them.
ENVIRON_FROM = {"0.5.16": {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}}  # deep_gemm comes without what it would compile

#: Kernels of flashinfer that `sgl_kernel` and the sampler call: module → (sources, flags).
PREBUILT: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "norm": (("norm.cu", "flashinfer_norm_binding.cu"), ("-DENABLE_BF16", "-DENABLE_FP8")),
    "sampling": (("sampling.cu", "renorm.cu", "flashinfer_sampling_binding.cu"), ()),
}
