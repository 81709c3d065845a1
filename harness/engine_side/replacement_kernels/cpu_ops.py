"""What SGLang needs to run on a CPU: replacement kernels, and the flags that reach its own Triton kernels.

Engine side: standard library, torch and SGLang only. Every entry is named in the trace header; a check whose
subject is replaced by our code is "not exercised" there. Nothing here may decide *what* is computed: metadata,
indices, positions and masks stay SGLang's.
"""

from __future__ import annotations

import functools
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from ..hooks import ImportHooks
from . import patches_assumed, patches_kernels, patches_models, patches_torch  # noqa: F401  they register themselves
from .cpu_attention import decode_attention, extend_attention
from .cpu_delta import chunk_delta_rule
from .cpu_hicache import load_layer_of_pages, store_layers_in_pages, transfer_rows
from .cpu_sampling import renorm_top_k, renorm_top_p, verify_sampled
from .cpu_tree import build_tree, verify_greedy
from .patches import PATCHES
from .stub_packages import STUB_PACKAGES, StubFinder


@dataclass(frozen=True)
class Replacement:
    """One operation that is not the release's own on this device.

    subject: what a check would have to be about to be affected ('tree', 'verify', 'sampled', 'attention', 'cache_locs',
    'host copies', 'experts', 'index scores', 'none').
    by: 'stand-in' (a replacement kernel of ours), 'stand-in when sampling' (the same, and greedy batches never ask),
    'flag' (SGLang's own Triton kernel, reached by a module flag, interpreted),
    'no-op', 'remap' (same operation, on the device it runs on), 'import stub'.
    """

    operation: str
    by: str
    subject: str
    reason: str


#: Patch -> (name, replacement, by, subject) of each kernel it replaces; attention is one of its own.
KERNELS: dict[str, tuple[tuple[str, Callable[..., Any], str, str], ...]] = {
    "tree": (("sgl_build_tree_kernel_efficient", build_tree, "stand-in", "tree"),),
    "verify": (("verify_tree_greedy_func", verify_greedy, "stand-in", "verify"),),
    "delta_rule": (("chunk_gated_delta_rule", chunk_delta_rule, "stand-in", "recurrent"),),
    "sampling": (
        ("tree_speculative_sampling_target_only", verify_sampled, "stand-in when sampling", "sampled"),
        ("top_k_renorm_prob", renorm_top_k, "stand-in when sampling", "sampled"),
        ("top_p_renorm_prob", renorm_top_p, "stand-in when sampling", "sampled"),
    ),
    "host_copies": (
        ("transfer_kv_direct", transfer_rows, "stand-in", "host copies"),
        ("transfer_kv_per_layer_direct_pf_lf", load_layer_of_pages, "stand-in", "host copies"),
        ("transfer_kv_all_layer_direct_lf_pf", store_layers_in_pages, "stand-in", "host copies"),
    ),
}

#: Patches of every release, whatever its table says.
EVERYWHERE = (
    ("triton.runtime.interpreter", "one_element", "_patch_lang_tensor"),
    ("sglang.srt.batch_invariant_ops", "batch_invariant", "enable_batch_invariant_mode"),
    ("sglang.srt.constrained.xgrammar_backend", "token_mask", "XGrammarGrammar"),
    ("sglang.srt.speculative.spec_utils", "token_numbers", "traverse_tree"),
    ("sglang.srt.models.deepseek_v2", "plain_rope", "get_rope_wrapper"),
    ("sglang.srt.models.ernie4", "flat_bias", "TopK"),
    ("sglang.kernels.ops.attention.fla.layernorm_gated", "one_processor", "_get_sm_count"),
)


class CpuOps:
    """Registers every replacement and remembers which of them took effect in this process."""

    def __init__(self, hooks: ImportHooks, *, padded: bool = False) -> None:
        self._hooks = hooks
        self._padded = padded
        self.applied: list[Replacement] = []

    def install(self, *, patches: Sequence[tuple[str, str, str]], attention: str) -> None:
        """`patches`: (module, what, argument) rows of the release's compatibility table."""
        stubs = StubFinder(lambda package, why: self._note(package, "import stub", "none", why), STUB_PACKAGES)
        behind = sys.meta_path.index(self._hooks) + 1 if self._hooks in sys.meta_path else 0
        sys.meta_path.insert(behind, stubs)
        for package in STUB_PACKAGES:
            if importlib.machinery.PathFinder.find_spec(package) is None:
                self._note(package, "import stub", "none", "imported at module level, never used on this path")
        for module, what, argument in (*EVERYWHERE, *patches):
            self._hooks.after(module, self._apply(what, argument, attention))

    def describe(self) -> list[dict[str, str]]:
        return [asdict(item) for item in self.applied]

    def _note(self, operation: str, by: str, subject: str, reason: str) -> None:
        self.applied.append(Replacement(operation, by, subject, reason))

    def _apply(self, what: str, argument: str, attention: str) -> Callable[[ModuleType], None]:
        refused = self._padded and argument == "decode_attention_fwd"  # by SGLang's own kernel: F-008

        def act(module: ModuleType) -> None:
            if what in KERNELS:
                self._replace(module, what)
            elif what != "attention":
                PATCHES[what](module, argument, self._note)
            elif attention != "interpreted" or refused:
                self._replace_attention(module, argument)

        return act

    def _replace(self, module: ModuleType, what: str) -> None:
        for name, kernel, by, subject in KERNELS[what]:
            setattr(module, name, kernel)
            self._note(f"{module.__name__}.{name}", by, subject, "no CPU build")

    def _replace_attention(self, module: ModuleType, argument: str) -> None:
        kernels: dict[str, Callable[..., None]] = {
            "decode_attention_fwd": functools.partial(decode_attention, padded=self._padded),
            "extend_attention_fwd": extend_attention,
        }
        ours, theirs = kernels[argument], getattr(module, argument)
        signature = inspect.signature(theirs)

        @functools.wraps(theirs)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return ours(bound.arguments)

        setattr(module, argument, call)
        self._note(f"{module.__name__}.{argument}", "stand-in", "attention", "the interpreted kernel takes 100 ms")
        if self._padded and argument == "decode_attention_fwd":
            what = f"{module.__name__}.{argument} (padded rows)"
            self._note(what, "stand-in", "idle", "assumed F-008: the kernel refuses them")
