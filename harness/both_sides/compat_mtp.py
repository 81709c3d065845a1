"""The hook table of a release for its multi-layer MTP worker, which is a class beside the EAGLE worker.

Engine side: standard library only. It must hold data and look-ups, no behaviour.
"""

from __future__ import annotations

from dataclasses import replace

from .compat import Release, Seam, parse

_WORKER = "sglang.srt.speculative.multi_layer_eagle_worker_v2"
#: Up to this row the worker builds the parents of a chain of two or more on the device called "cuda", whatever it
#: runs on.
_LAST_WITH_CUDA = "0.5.15"
#: Rows whose eager forwards of this worker run on what an earlier forward planned: F-011, and what lets them plan.
_UNPLANNED = ("0.5.13", "0.5.14", "0.5.15")
_PLAN: tuple[Seam, ...] = (
    ("sglang.srt.model_executor.forward_batch_info", "unplanned", "mark_forward_metadata_ready"),
)


def multi_layer(release: Release) -> Release:
    """`release` with the multi-layer worker as its worker; LookupError where only the v1 scheduling was asked for."""
    if release.generation == "v1":
        raise LookupError("the v1 multi-layer worker has no hook table; leave overlap at the release's default")
    own: tuple[Seam, ...] = ()
    if parse(release.first) <= parse(_LAST_WITH_CUDA):
        own = ((_WORKER, "device_name", "full"),)
    sample = release.sample
    if sample is not None and sample[0] == release.worker_module:  # each worker imports the name for itself
        sample = (_WORKER, sample[1])
    return replace(
        release,
        sample=sample,
        worker_module=_WORKER,
        worker="MultiLayerEagleWorkerV2",
        draft="MultiLayerEagleDraftWorker",
        seams=(*release.seams, *own),
        plan_seams=_PLAN if release.first in _UNPLANNED else (),
        layered=True,
    )
