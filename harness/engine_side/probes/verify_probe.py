"""Hooks on the verify: what was accepted, the uniforms that decided it, and what branches of a paged tree begin with.

Engine side: standard library, torch and SGLang only. It must not change any value SGLang computes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...both_sides.compat import Release
from ..hooks import HookRegistry, Original, around
from .names import (
    ACCEPTED_DRAFTS,
    ACCEPTED_INDICES,
    ACCEPTED_TOKENS,
    SAMPLING,
    TAIL_COPIER,
    as_tensor,
    first_of,
    sampled_walks,
)
from .recorder import Recorder

#: The place of the tokens' mask among what a verify is given: behind batch and logits.
MASK = 2


class VerifyProbe:
    """The verify hooks of one release in one scheduler process."""

    def __init__(self, recorder: Recorder, release: Release, hooks: HookRegistry) -> None:
        self._recorder, self._release, self._hooks = recorder, release, hooks

    def install(self) -> None:
        """Call after the worker modules were imported."""
        release = self._release
        if release.sample is None:
            self._hooks.wrap(sys.modules[release.worker_module], f"{release.worker}.verify", around(self._verify_v1))
        else:
            self._hooks.wrap(sys.modules[release.sample[0]], release.sample[1], self._sample)
        for owner, name in sampled_walks(release):
            self._hooks.wrap(owner, name, self._uniforms)
        pages = sys.modules.get(release.sample[0]) if release.sample else None
        if pages is not None and hasattr(pages, TAIL_COPIER):
            self._hooks.wrap(pages, TAIL_COPIER, around(self._tails))

        self._hooks.wrap(sys.modules[SAMPLING], "SamplingBatchInfo.update_regex_vocab_mask", self._first_masks)

    def _masks(self, phase: str, grammars: Sequence[Any], mask: Any) -> None:
        """Which tokens the grammars of a batch allow: bits [b·n or b, words], those of others say nothing."""
        current = self._recorder.round
        if mask is not None and current is not None and len(grammars) == len(current.rids):
            copy = self._recorder.copied({"bits": getattr(mask, "vocab_mask", mask)})
            constrained = [i for i, grammar in enumerate(grammars) if grammar is not None]
            self._recorder.note("masks", copy, phase=phase, requests=constrained)

    def _first_masks(self, original: Original) -> Original:
        """Those for the token after a prompt."""

        def update(sampling: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(sampling, *args, **kwargs)
            current = self._recorder.round
            if current is not None and current.mode == "PREFILL" and sampling.grammars:
                self._masks("PREFILL", sampling.grammars, mask_of((), vars(sampling)))
            return result

        return update

    def _sample(self, original: Original) -> Original:
        # Layers without CUDA graphs move their inputs up in place, by a kernel that PyTorch does not see writing, and
        # the inputs of the first are these very tokens.
        keep = self._recorder.copied if self._release.layered else self._recorder.held

        def sample(verify_input: Any, *args: Any, **kwargs: Any) -> Any:
            self._masks("VERIFY", [req.grammar for req in args[0].reqs or ()], mask_of(args, kwargs))
            result = original(verify_input, *args, **kwargs)
            current = self._recorder.round
            if current is not None and current.mode == "DECODE":
                predict, accept_lens, accept_index = result
                copy = keep({"predict": predict, "lens": accept_lens, "index": accept_index})
                assert copy is not None
                current.accepted = copy
                current.extend_rids = list(range(len(current.rids)))
                self._recorder.note("sampled", copy, width=int(verify_input.draft_token_num))
            return result

        return sample

    def _tails(
        self,
        original: Original,
        pool: Any,
        rows: Any,
        base: Any,
        tail: Any,
        pages: Any,
        topk: int,
        page_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """What branches of a paged tree begin with, once it was copied."""
        result = original(pool, rows, base, tail, pages, topk, page_size, *args, **kwargs)
        current = self._recorder.round
        if current is not None and current.rids:
            found = holes(rows, base, tail, pages, topk=topk, page=page_size)
            owners, wrong = [owner for owner, _, _ in found], wrong_copies(pool, found)
            requests = range(len(current.rids))
            self._recorder.put(
                {
                    "ev": "tails",
                    "round": current.index,
                    "rids": current.rids,
                    "attempts": current.attempts,
                    "committed": current.starts,
                    "holes": [owners.count(i) for i in requests],
                    "wrong": [wrong.count(i) for i in requests],
                }
            )
        return result

    def _uniforms(self, original: Original) -> Original:
        """The random numbers of a sampled verify, before the kernel gets them."""
        recorder = self._recorder

        def walk(*args: Any, **kwargs: Any) -> Any:
            if recorder.round is not None:
                names = {"nodes": "uniform_samples", "final": "uniform_samples_for_final_sampling"}
                recorder.note(
                    "uniforms",
                    recorder.copied({name: kwargs[given] for name, given in names.items()}),
                    rule=getattr(original, "__name__", type(original).__name__),
                    thresholds=[float(kwargs.get(name, 1.0)) for name in ("threshold_single", "threshold_acc")],
                )
            return original(*args, **kwargs)

        return walk

    def _verify_v1(self, original: Original, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        spec_info = args[0] if args else batch.spec_info
        result = original(worker, batch, *args, **kwargs)
        current = self._recorder.round
        if current is not None and current.mode == "DECODE":
            output = result[1]
            current.accepted = [1 + int(count) for count in first_of(output, ACCEPTED_DRAFTS)]
            current.extend_rids = [i for i, req in enumerate(batch.reqs) if not req.finished()]
            found = {"nodes": ACCEPTED_INDICES, "tokens": ACCEPTED_TOKENS}
            copy = self._recorder.copied({name: as_tensor(first_of(output, names)) for name, names in found.items()})
            facts = {"lens": current.accepted, "extends": current.extend_rids}
            self._recorder.note("verified", copy, width=int(spec_info.draft_token_num), **facts)
        return result


def mask_of(args: Sequence[Any], names: Mapping[str, Any]) -> Any:
    """The tokens' mask that a verify is given, or that is kept for a first token; None where there is none."""
    if len(args) > MASK:
        return args[MASK]
    return next((names[name] for name in ("grammar_mask", "vocab_mask") if names.get(name) is not None), None)


def holes(
    rows: torch.Tensor, base: torch.Tensor, tail: torch.Tensor, pages: torch.Tensor, *, topk: int, page: int
) -> list[tuple[int, int, int]]:
    """(request, slot of the tail, slot of its copy) of every hole.

    A branch draws whole pages. Where the committed length is not a multiple of the page, the first page of every branch
    but the first begins with holes, and backends that read by page find the prefix's tail there only if it was copied.

    rows [b, width]: slots by position. base, tail, pages [b]: where the prefix's last page begins, how much of it is
    the prefix's, and how many pages a branch has.
    """
    found = []
    for b, (start, length, each) in enumerate(zip(base.tolist(), tail.tolist(), pages.tolist(), strict=True)):
        for branch in range(1, topk):
            for offset in range(length):
                copy = start + branch * each * page + offset
                found.append((b, int(rows[b, start + offset]), int(rows[b, copy])))
    return found


def wrong_copies(pool: Any, found: list[tuple[int, int, int]]) -> list[int]:
    """The request of every hole whose keys or values in the pool's first layer are not the tail's."""
    if not found:
        return []
    layer = getattr(pool, "start_layer", None) or 0
    owners, sources, copies = zip(*found, strict=True)
    differ = torch.zeros(len(found), dtype=torch.bool)
    for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
        pair = (buffer[list(slots)].flatten(1).cpu() for slots in (sources, copies))
        differ |= (next(pair) != next(pair)).any(dim=1)
    return [owner for owner, wrong in zip(owners, differ.tolist(), strict=True) if wrong]
