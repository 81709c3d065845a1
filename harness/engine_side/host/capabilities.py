"""What one release can run in its own environment, found by importing. Engine side: started by path.

Prints one JSON line, behind the mark it is started with and after whatever SGLang prints. It must not start an engine,
nor leave anything on a card.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

#: What an attention backend's module imports besides SGLang's own file of it.
BACKENDS = {"triton": ("triton",), "flashinfer": ("flashinfer",), "fa3": ("sgl_kernel.flash_ops",)}
FILES = {"triton": "triton_backend", "flashinfer": "flashinfer_backend", "fa3": "flashattention_backend"}


def main() -> None:
    answer: dict[str, Any] = {"error": _try("sgl_kernel") or _try("sglang.srt.managers.scheduler")}
    if not answer["error"]:
        answer["backends"] = {name: _backend(name) for name in BACKENDS}
        answer["sampling"] = _try("flashinfer.sampling")
        answer["graphs"] = _graphs()
    answer |= _torch()
    print(f"\n{sys.argv[1]}{json.dumps(answer)}", flush=True)


def _torch() -> dict[str, Any]:
    import torch

    seen = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "card": torch.cuda.get_device_name(0) if seen else "",
    }


def _backend(name: str) -> str:
    """What keeps an attention backend from being used, empty if nothing does."""
    for module in (*BACKENDS[name], f"sglang.srt.layers.attention.{FILES[name]}"):
        if why := _try(module):
            return why
    return _flashinfer_kernels() if name == "flashinfer" else ""


def _flashinfer_kernels() -> str:
    """flashinfer compiles its attention when it is first used; without sources it cannot."""
    data = Path(str(importlib.util.find_spec("flashinfer").origin)).with_name("data")  # type: ignore[union-attr]
    return "" if (data / "csrc" / "batch_prefill.cu").is_file() else "its sources were left out of the bundle"


def _graphs() -> str:
    """From 0.5.16 on, capturing graphs imports deep_gemm."""
    import sglang

    late = tuple(int(part) for part in sglang.__version__.split(".")[:3] if part.isdigit()) >= (0, 5, 16)
    return _try("deep_gemm") if late else ""


def _try(module: str) -> str:
    """Why a module cannot be imported, empty if it can."""
    try:
        importlib.import_module(module)
    except BaseException as error:  # a compiled module may fail in any way, and that is the answer
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"{module}: {lines[0][:160]}"
    return ""


if __name__ == "__main__":
    main()
    sys.exit(0)
