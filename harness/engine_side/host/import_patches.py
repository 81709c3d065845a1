"""What is put into SGLang's modules as they are imported: CPU replacement kernels, our transfers, a plugin's algorithm.

And which of its model files are not.

Engine side: nothing of SGLang or torch is imported before what is prepared here stands.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...both_sides import compat, plugin_algorithm
from ..hooks import ImportHooks

#: SGLang's environment variable for model files that it does not import.
DISABLED = "SGLANG_DISABLED_MODEL_ARCHS"


def install_patches(boot: dict[str, Any]) -> tuple[ImportHooks, Any]:
    """The import hooks of this process, with everything prepared; and who knows what was replaced, or None."""
    hooks = ImportHooks()
    hooks.install()
    ops = _prepare_cpu(hooks, boot) or _prepare_index(hooks, boot)
    _prepare_handoff(hooks, boot)
    _prepare_plugin(hooks, boot)
    return hooks, ops


def release_of(boot: dict[str, Any]) -> compat.Release:
    """The hook table for what is about to boot."""
    release = compat.lookup(boot["release"], overlap=boot["overlap"])
    return compat.multi_layer(release) if boot["layered"] else release


def _prepare_cpu(hooks: ImportHooks, boot: dict[str, Any]) -> Any:
    """Install the CPU patches of the release; returns the CpuOps (None on a GPU)."""
    if boot["device"] != "cpu":
        return None
    from ..replacement_kernels.cpu_ops import CpuOps

    ops = CpuOps(hooks, padded="F-008" in boot["assumed"])
    release, assumed = release_of(boot), boot["assumed"]
    patches = [*release.patches]
    if boot["arguments"]["enable_dp_attention"]:
        patches += release.dp_patches
        patches += release.idle_patches if "F-007" in assumed else ()
        patches += compat.PATCHES["layer_batches"] if "F-091" in assumed else ()
    patches += release.plan_patches if "F-011" in assumed else ()
    for word in ("lora", "host_cache", "overlap"):
        patches += compat.PATCHES[word] if boot.get(word) else ()
    ops.install(patches=patches, attention=boot["cpu_attention"])
    return ops


def _prepare_index(hooks: ImportHooks, boot: dict[str, Any]) -> Any:
    """Scores of a sparse indexer, where the engine's backend asks for them, and who notes what it chooses; or None."""
    if not boot.get("indexer"):
        return None
    from ..replacement_kernels.index_scores import IndexScores

    if folder := boot.get("chosen"):
        from ..probes.index_probe import IndexProbe

        IndexProbe(hooks, Path(folder))
    return IndexScores()


def _prepare_handoff(hooks: ImportHooks, boot: dict[str, Any]) -> None:
    """Our transfer backend, where this engine is one side of a disaggregated pair."""
    if boot.get("handoff"):
        from ..transfer_backend.classes import register

        folder = boot["handoff"]["folder"]
        hooks.after("sglang.srt.disaggregation.utils", lambda module: register(module, folder=folder))


def _prepare_plugin(hooks: ImportHooks, boot: dict[str, Any]) -> None:
    """A plugin's algorithm, where the scenario asks for one."""
    if boot.get("plugin"):
        release = release_of(boot)
        hooks.after(
            "sglang.srt.speculative.spec_info",
            lambda module: plugin_algorithm.register(
                module, kind=boot["plugin"], worker=(release.worker_module, release.worker)
            ),
        )


def leave_out_models(needed: Sequence[str]) -> None:
    """By SGLang's own switch only these of its model files are imported, where any are named: a tenth of its imports.

    It would import all of them, 250 in 0.5.23, to know which architectures it serves.
    """
    spec = importlib.util.find_spec("sglang")
    if needed and spec is not None and spec.origin is not None and not os.environ.get(DISABLED):
        every = {file.stem for file in (Path(spec.origin).parent / "srt" / "models").glob("*.py")}
        os.environ[DISABLED] = ",".join(sorted(every - set(needed)))
