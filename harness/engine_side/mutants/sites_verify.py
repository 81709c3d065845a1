"""Where mutants of a verify act: the tree, its walk, masks of grammars, and what decides sampled tokens.

Engine side: standard library, torch and SGLang only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..hooks import Original
from ..probes.names import TAIL_COPIER, sampled_walks
from ..probes.verify_probe import mask_of
from .armed import Place, Sites

#: Value of a site -> argument of what walks a tree by uniforms, attribute of what is verified.
UNIFORMS = {"nodes": "uniform_samples", "final": "uniform_samples_for_final_sampling", "distribution": "target_probs"}
TREE = {"next_token": "retrieve_next_token", "next_sibling": "retrieve_next_sibling", "mask": "custom_mask"}
SETTINGS = ("temperatures", "top_ks", "top_ps", "logit_bias")


class VerifySites(Sites):
    """Around a verify, and around what is sampled after a prompt."""

    def places(self) -> Iterator[Place]:
        release = self._release
        yield Place(release.worker_module, f"{release.draft}.draft", self._tree)
        yield Place(release.greedy, "verify_tree_greedy_func", self._accept)
        if release.sample is not None:  # the v1 worker's verify is one with its walk
            module, sample = release.sample
            yield Place(module, sample, self._masks, outside=True)
            yield Place(module, sample, self._verify_settings)
            yield Place(
                "sglang.srt.model_executor.model_runner", "ModelRunner._preprocess_logits", self._first_settings
            )
            if hasattr(sys.modules[module], TAIL_COPIER):  # 0.5.13 and later
                yield Place(module, TAIL_COPIER, self._tails)
        for owner, walk in sampled_walks(release):
            yield Place(owner.__name__, walk, self._uniforms)

    def _tree(self, original: Original, worker: Any, *args: Any, **kwargs: Any) -> Any:
        verify_input = original(worker, *args, **kwargs)
        if self._mutants.at("tree", "VERIFY") and verify_input.retrieve_next_token is not None:
            shares = self._mutants.shares("VERIFY", verify_input.retrieve_next_token.numel())
            self._mutants.change("tree", verify_input, TREE, phase="VERIFY", shares=shares)
        return verify_input

    def _tails(self, original: Original, pool: Any, rows: Any, base: Any, tail: Any, *args: Any, **kwargs: Any) -> Any:
        changed = self._mutants.apply("tails", {"last_page": tail}, phase="DRAFT")
        return original(pool, rows, base, changed.get("last_page", tail), *args, **kwargs)

    def _accept(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        predict, accept_index, drafts = original(*args, **kwargs)
        values = {"predict": predict, "accept_index": accept_index, "drafts": drafts}
        links = {"next_token": kwargs["retrieve_next_token"], "target": kwargs["target_predict"]}
        made = values | self._mutants.apply("accept", values | links, phase="VERIFY")
        return made["predict"], made["accept_index"], made["drafts"]

    def _masks(self, original: Original, verify_input: Any, *args: Any, **kwargs: Any) -> Any:
        mask = mask_of(args, kwargs)
        if mask is not None and self._mutants.at("masks"):
            bits = getattr(mask, "vocab_mask", mask)
            each = bits.view(-1, int(verify_input.draft_token_num), bits.shape[-1])
            changed = self._mutants.apply("masks", {"bits": each}, phase="VERIFY")
            bits.copy_(changed.get("bits", each).reshape(bits.shape))
        return original(verify_input, *args, **kwargs)

    def _verify_settings(self, original: Original, given: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self._asked(batch.sampling_info, "VERIFY"):
            return original(given, batch, *args, **kwargs)

    def _first_settings(self, original: Original, runner: Any, output: Any, info: Any, *args: Any, **kw: Any) -> Any:
        with self._asked(info, "PREFILL"):
            return original(runner, output, info, *args, **kw)

    @contextmanager
    def _asked(self, info: Any, phase: str) -> Iterator[None]:
        """What a batch asks of its tokens, for as long as they are chosen."""
        own = {} if info is None else {name: getattr(info, name, None) for name in SETTINGS}
        values = {name: value for name, value in own.items() if value is not None}
        changed = self._mutants.apply("settings", values, phase=phase) if values else {}
        for name, value in changed.items():
            setattr(info, name, value)
        try:
            yield
        finally:
            for name in changed:
                setattr(info, name, own[name])

    def _uniforms(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        values = {name: kwargs[own] for name, own in UNIFORMS.items()}
        changed = self._mutants.apply("uniforms", values, phase="VERIFY")
        return original(*args, **{**kwargs, **{UNIFORMS[name]: value for name, value in changed.items()}})
