"""What SGLang needs to run on a CPU: replacement kernels, and the flags that reach its own Triton kernels.

Engine side: standard library, torch and SGLang only. Every entry is named in the trace header; a check whose
subject is replaced by our code is "not exercised" there. Nothing here may decide *what* is computed: metadata,
indices, positions and masks stay SGLang's.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..hooks import ImportHooks
from .cpu_attention import decode_attention, extend_attention
from .cpu_delta import chunk_delta_rule
from .cpu_experts import squared_experts
from .cpu_hicache import load_layer_of_pages, store_layers_in_pages, transfer_rows
from .cpu_sampling import renorm_top_k, renorm_top_p, verify_sampled
from .cpu_tree import build_tree, verify_greedy

#: Importable but never used on this path; SGLang imports them at module level.
STUB_PACKAGES = ("torchvision", "vllm", "sgl_kernel")


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


class _Seen:
    """A module of torch's as one of SGLang's sees it: some of it is ours, everything else is torch's."""

    def __init__(self, module: Any, **ours: Any) -> None:
        self.__dict__ |= {"_module": module, **ours}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


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
    ("sglang.srt.models.deepseek_v2", "plain_rope", "get_rope_wrapper"),
    ("sglang.srt.models.ernie4", "flat_bias", "TopK"),
    ("sglang.kernels.ops.attention.fla.layernorm_gated", "one_processor", "_get_sm_count"),
)


class _AnyMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Anything(metaclass=_AnyMeta):
    """A name that can be imported, subclassed and constructed (SGLang does so at import time) and does nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass


class _StubLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "99.0"  # type: ignore[attr-defined]

        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Anything

        module.__getattr__ = missing  # type: ignore[method-assign]


class _StubFinder(importlib.abc.MetaPathFinder):
    """A stub for each of STUB_PACKAGES that is not there, or that this machine cannot load.

    `sgl_kernel` of an index or a bundle wants CUDA's libraries. A real package that loads always wins.
    """

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self._note = note
        self._unloadable: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = name.split(".")[0]
        if package not in STUB_PACKAGES:
            return None
        real = None if package in self._unloadable else importlib.machinery.PathFinder.find_spec(name, path, target)
        if real is None or real.loader is None:
            return importlib.machinery.ModuleSpec(name, _StubLoader(), is_package=True)
        if name == package:
            self._watch(real.loader, package)
        return real

    def _watch(self, loader: Any, package: str) -> None:
        """Where executing the package fails, it becomes the stub, and so does what it holds."""
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            try:
                execute(module)
            except (ImportError, OSError) as error:
                self._unloadable.add(package)
                for name in [one for one in sys.modules if one.startswith(f"{package}.")]:
                    del sys.modules[name]
                _StubLoader().exec_module(module)
                lines = [line for line in str(error).splitlines() if line.strip()]
                self._note(package, f"cannot be loaded on this machine: {''.join(lines[:1])}")

        loader.exec_module = exec_module


def _of_a_copy(forward: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """A forward that may change the fields of its batch, of nobody else's."""
    return forward(replace(batch), *args, **kwargs)


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory of torch that pins nothing."""
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory of torch that takes device "cuda" for the CPU."""

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        return make(*args, **{**kwargs, "device": "cpu"} if kwargs.get("device") == "cuda" else kwargs)

    return call


class CpuOps:
    """Registers every replacement and remembers which of them took effect in this process."""

    def __init__(self, hooks: ImportHooks, *, padded: bool = False) -> None:
        self._hooks = hooks
        self._padded = padded
        self.applied: list[Replacement] = []

    def install(self, *, patches: Sequence[tuple[str, str, str]], attention: str) -> None:
        """`patches`: (module, what, argument) rows of the release's compatibility table."""
        stubs = _StubFinder(lambda package, why: self._note(package, "import stub", "none", why))
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

    def _apply(self, what: str, argument: str, attention: str) -> Callable[[types.ModuleType], None]:
        refused = self._padded and argument == "decode_attention_fwd"  # by SGLang's own kernel: F-008

        def act(module: types.ModuleType) -> None:
            if what in KERNELS:
                self._replace(module, what)
            elif what != "attention" or attention != "interpreted" or refused:
                getattr(self, f"_patch_{what}")(module, argument)

        return act

    def _replace(self, module: types.ModuleType, what: str) -> None:
        for name, kernel, by, subject in KERNELS[what]:
            setattr(module, name, kernel)
            self._note(f"{module.__name__}.{name}", by, subject, "no CPU build")

    def _patch_flag(self, module: types.ModuleType, argument: str) -> None:
        name, subject = argument.split("=")
        setattr(module, name, True)
        self._note(f"{module.__name__}.{name}", "flag", subject, "selects SGLang's own Triton kernel, interpreted")

    def _patch_one_element(self, module: types.ModuleType, argument: str) -> None:
        """Interpreters before Triton 3.7 make a number of an array of one element, which NumPy from 2.4 on refuses."""
        original = getattr(module, argument)
        if "int(self.handle.data)" not in inspect.getsource(original):
            return

        def patched(tensor: Any, scope: Any) -> None:
            original(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda one: int(one.handle.data.item()))

        setattr(module, argument, patched)
        self._note(f"{module.__name__}.{argument}", "remap", "none", "NumPy 2.4 makes no number of an array")

    def _patch_any_device(self, module: types.ModuleType, argument: str) -> None:
        """SGLang's own Triton kernels, interpreted, whose launchers refuse tensors that are not a GPU's."""
        for name in argument.split(","):
            code = getattr(module, name).__code__
            names = tuple("is_cpu" if one == "is_cuda" else one for one in code.co_names)
            getattr(module, name).__code__ = code.replace(co_names=names)
            self._note(f"{module.__name__}.{name}", "flag", "none", "its kernel is interpreted; it asks for a GPU")

    def _patch_cuda_noop(self, module: types.ModuleType, argument: str) -> None:
        for name in argument.split(","):
            setattr(torch.cuda, name, lambda *_a, **_k: None)
            self._note(f"torch.cuda.{name} (for {module.__name__})", "no-op", "none", "called without a device check")

    def _patch_unpinned(self, module: types.ModuleType, argument: str) -> None:
        why = "there is nothing to pin memory for"
        module.torch = _Seen(torch, tensor=_unpinned(torch.tensor), zeros=_unpinned(torch.zeros))  # type: ignore[attr-defined]
        self._note(f"{module.__name__}: torch.tensor(pin_memory=)", "no-op", "none", why)
        if argument:
            torch.Tensor.pin_memory = lambda pinned, *_args: pinned  # type: ignore[method-assign]
            self._note(f"Tensor.pin_memory (for {module.__name__})", "no-op", "none", why)

    def _patch_cpu_device(self, module: types.ModuleType, argument: str) -> None:
        module.torch = _Seen(torch, empty=_on_cpu(torch.empty), full=_on_cpu(torch.full))  # type: ignore[attr-defined]
        what = f"{module.__name__}: torch.empty, torch.full (device='cuda')"
        self._note(what, "no-op", "none", "names a device instead of asking for the batch's")

    def _patch_empty_rope(self, module: types.ModuleType, argument: str) -> None:
        original = module.RotaryEmbedding.forward_native

        def forward_native(self: Any, positions: torch.Tensor, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            if positions.numel() == 0:
                return query, key
            return original(self, positions, query, key, *args, **kwargs)

        module.RotaryEmbedding.forward_native = forward_native
        what = f"{module.__name__}.RotaryEmbedding.forward_native (no rows)"
        self._note(what, "no-op", "none", "the CPU version cannot view an empty batch")

    def _patch_unregistered(self, module: types.ModuleType, argument: str) -> None:
        def call(output: torch.Tensor, input: torch.Tensor, group_name: str) -> None:
            getattr(module._groups[group_name](), f"_{argument}")(output, input)

        setattr(module, f"reg_{argument}", call)
        self._note(
            f"{module.__name__}.reg_{argument}", "flag", "none", "calls SGLang's own method; only CUDA is registered"
        )

    def _patch_idle_metadata(self, module: types.ModuleType, argument: str) -> None:
        """Not a matter of the CPU: SGLang's own code fails on an idle batch. Only where a run assumes that it does."""
        original = module.TritonAttnBackend.init_forward_metadata

        def init_forward_metadata(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            spec_info = forward_batch.spec_info
            if not forward_batch.forward_mode.is_idle() or getattr(spec_info, "kv_indptr", None) is not None:
                return original(self, forward_batch, *args, **kwargs)
            forward_batch.spec_info = None
            try:
                return original(self, forward_batch, *args, **kwargs)
            finally:
                forward_batch.spec_info = spec_info

        module.TritonAttnBackend.init_forward_metadata = init_forward_metadata
        what = f"{module.__name__}.TritonAttnBackend.init_forward_metadata (idle batch)"
        self._note(what, "stand-in", "idle", "assumed F-007: an idle rank dies here")

    def _patch_unplanned(self, module: types.ModuleType, argument: str) -> None:
        """Not a matter of the CPU: a batch is marked as planned for, and nobody has. Only where a run assumes that."""
        setattr(module.ForwardBatch, argument, lambda *_a, **_k: None)  # so that each forward asks SGLang to plan
        what = f"{module.__name__}.ForwardBatch.{argument}"
        self._note(what, "stand-in", "plan", "assumed F-011: eager MTP forwards run with an earlier one's metadata")

    def _patch_layer_batches(self, module: types.ModuleType, argument: str) -> None:
        """Not a matter of the CPU: MTP layers share a batch, which each pads. Only where a run assumes that they do."""
        prepare, worker = module.prepare_for_draft_extend, getattr(module, argument)
        original = worker._draft_extend_for_decode

        def of_every_row(draft_input: Any, *args: Any, **kwargs: Any) -> Any:
            draft_input.num_tokens_for_logprob_per_req = draft_input.num_tokens_per_req
            return prepare(draft_input, *args, **kwargs)

        def draft_extend(self: Any, *args: Any, **kwargs: Any) -> Any:
            for runner in self.draft_runner_list:
                runner.forward = functools.partial(_of_a_copy, runner.forward)
            try:
                return original(self, *args, **kwargs)
            finally:
                for runner in self.draft_runner_list:
                    del runner.forward

        module.prepare_for_draft_extend, worker._draft_extend_for_decode = of_every_row, draft_extend  # type: ignore[attr-defined]
        what = f"{module.__name__}.{argument}._draft_extend_for_decode"
        self._note(what, "stand-in", "plan", "assumed F-091: MTP layers share a batch that each pads")

    def _patch_batch_invariant(self, module: types.ModuleType, argument: str) -> None:
        setattr(module, argument, lambda: None)
        what, why = f"{module.__name__}.{argument}", "wants an accelerator; asked for only where seeds decide"
        self._note(what, "no-op", "none", why)

    def _patch_token_mask(self, module: types.ModuleType, argument: str) -> None:
        """Releases that have no kernel for a mask of tokens on a CPU get the one that newer releases call there.

        And those that pin its memory whatever they run on do not.
        """
        owner, makes = getattr(module, argument), getattr(module, "_allocate_token_bitmask", None)
        if makes is not None and "is_pin_memory_available" not in inspect.getsource(makes):
            module.torch = _Seen(torch, full=_unpinned(torch.full))  # type: ignore[attr-defined]
            what = f"{module.__name__}: torch.full(pin_memory=)"
            self._note(what, "no-op", "none", "there is nothing to pin memory for")
        if '"cpu"' in inspect.getsource(owner.apply_vocab_mask):
            return

        def apply_vocab_mask(self: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
            import xgrammar

            xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)

        owner.apply_vocab_mask = apply_vocab_mask
        what = f"{module.__name__}.{argument}.apply_vocab_mask"
        self._note(what, "remap", "none", "xgrammar's own kernel for a CPU, as newer releases call it")

    def _patch_sampled_path(self, module: types.ModuleType, argument: str) -> None:
        """The flag that selects Triton kernels also sends a sampled batch down the greedy path; not while it is one."""
        original = module.eagle_sample

        def eagle_sample(verify_input: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if batch.sampling_info.is_all_greedy:
                return original(verify_input, batch, *args, **kwargs)
            setattr(module, argument, False)
            try:
                return original(verify_input, batch, *args, **kwargs)
            finally:
                setattr(module, argument, True)

        module.eagle_sample = eagle_sample  # type: ignore[attr-defined]

    def _patch_murmur(self, module: types.ModuleType, argument: str) -> None:
        def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
            shape = (len(seed), len(columns))
            hashed = torch.empty(shape, dtype=torch.uint32)
            blocks = -(-len(columns) // 1024)
            module.murmur_hash32_kernel[(len(seed), blocks)](seed, positions, columns, hashed, *shape, BLOCK_SIZE=1024)
            return hashed

        module.murmur_hash32 = murmur_hash32  # type: ignore[attr-defined]
        what = f"{module.__name__}.murmur_hash32"
        self._note(what, "flag", "none", "selects SGLang's own Triton kernel, interpreted; no CPU build")

    def _patch_config_dtype(self, module: types.ModuleType, argument: str) -> None:
        original = getattr(module, argument).__init__
        what, why = f"{module.__name__}.{argument}: config.dtype", "that of the checkpoint, whatever the engine's is"

        def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            config.dtype = torch.get_default_dtype()
            note(what, "remap", "none", why)
            original(self, config, *args, **kwargs)

        note = self._note  # every model is imported, and hardly ever this one built
        getattr(module, argument).__init__ = __init__

    def _patch_plain_rope(self, module: types.ModuleType, argument: str) -> None:
        original, what = getattr(module, argument), f"{module.__name__}.{argument} (no rope_scaling)"

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("rope_scaling") is not None:
                return original(*args, **kwargs)
            note(what, "remap", "none", "SGLang's own rotation, as on a GPU; on a CPU it has YaRN's alone")
            return original(*args, **{**kwargs, "device": None})

        note = self._note
        setattr(module, argument, wrapper)

    def _patch_flat_bias(self, module: types.ModuleType, argument: str) -> None:
        original, what = getattr(module, argument), f"{module.__name__}.{argument} (correction_bias)"

        def flat(*args: Any, correction_bias: torch.Tensor | None = None, **kwargs: Any) -> Any:
            if correction_bias is not None and correction_bias.dim() == 2:
                note(what, "remap", "none", "of one dimension, as SGLang makes it for its CPU engine")
                correction_bias = correction_bias.squeeze(0)
            return original(*args, correction_bias=correction_bias, **kwargs)

        note = self._note
        setattr(module, argument, flat)

    def _patch_one_processor(self, module: types.ModuleType, argument: str) -> None:
        setattr(module, argument, lambda _device: 1)
        module.device_context = lambda _device: nullcontext()  # type: ignore[attr-defined]
        self._note(
            f"{module.__name__}.{argument}", "remap", "none", "how many rows a block has; a CPU is one processor"
        )

    def _patch_squared_experts(self, module: types.ModuleType, argument: str) -> None:
        original, native = getattr(module, argument).__init__, "sglang.srt.layers.moe.fused_moe_native"

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            note(f"{native}.moe_forward_native", "stand-in", "experts", "knows no such activation on a CPU")
            importlib.import_module(native).moe_forward_native = squared_experts  # type: ignore[attr-defined]
            original(self, *args, **kwargs)

        note = self._note  # every model is imported, and hardly ever this one built
        getattr(module, argument).__init__ = __init__

    def _patch_wide_product(self, module: types.ModuleType, argument: str) -> None:
        """The router's product, for which torch takes an `out_dtype` on a GPU alone."""

        def product(left: torch.Tensor, right: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
            return torch.mm(left, right).to(out_dtype or left.dtype)

        module.torch = _Seen(torch, **{argument: product})  # type: ignore[attr-defined]
        self._note(f"{module.__name__}: torch.{argument}(out_dtype=)", "remap", "none", "torch has it on a GPU alone")

    def _patch_portable_conv(self, module: types.ModuleType, argument: str) -> None:
        """The convolution of Mamba-2 layers, which SGLang imports on named devices only; `argument`: where it is."""
        portable = importlib.import_module(argument)
        for name in ("causal_conv1d_fn", "causal_conv1d_update"):
            for said in (name, f"{name}_triton"):
                setattr(module, said, getattr(portable, name))
            self._note(f"{module.__name__}.{name}", "flag", "none", "SGLang's own Triton kernel, interpreted")

    def _patch_untuned(self, module: types.ModuleType, argument: str) -> None:
        """SGLang's own Triton kernels in package `argument`, interpreted: with one of the tile sizes that they choose
        from by timing, which wants a GPU, and without naming the device that they start on."""
        for name, part in list(sys.modules.items()):
            for kernel in vars(part).values() if name.startswith(argument) else ():
                if type(kernel).__name__ == "Autotuner":
                    kernel.configs = kernel.configs[-1:]
        torch.cpu.device = lambda _index: nullcontext()  # type: ignore[attr-defined]
        self._note(argument, "flag", "none", "one size of tiles, on the only device there is")

    def _patch_record_stream(self, module: types.ModuleType, argument: str) -> None:
        torch.Tensor.record_stream = lambda *_a, **_k: None  # type: ignore[method-assign]
        self._note("torch.Tensor.record_stream", "no-op", "none", "CPU streams are not concurrent")

    def _patch_no_event(self, module: types.ModuleType, argument: str) -> None:
        """Events of streams, which the module makes of `torch.cuda` whatever it runs on; `argument`: their class."""
        event = types.SimpleNamespace(**dict.fromkeys(("record", "wait", "synchronize"), lambda *_a: None))
        module.torch = _Seen(torch, cuda=_Seen(torch.cuda, **{argument: lambda *_a, **_k: event}))  # type: ignore[attr-defined]
        self._note(f"{module.__name__}: torch.cuda.{argument}", "no-op", "none", "CPU streams are not concurrent")

    def _patch_kept(self, module: types.ModuleType, argument: str) -> None:
        """A setting that SGLang takes back on a CPU, where the release has such a place."""
        if hasattr(module, argument):
            setattr(module, argument, lambda *_a, **_k: None)
            self._note(f"{module.__name__}.{argument}", "no-op", "none", "the scheduling that a GPU has, as asked for")

    def _patch_unregistered_host(self, module: types.ModuleType, argument: str) -> None:
        setattr(module, argument, lambda *_a, **_k: None)
        self._note(f"{module.__name__}.{argument}", "no-op", "none", "there is no GPU to register host memory with")

    def _patch_unreserved_host(self, module: types.ModuleType, argument: str) -> None:
        setattr(module, argument, 0)
        self._note(f"{module.__name__}.{argument}", "no-op", "none", "10 GB kept free for a pool of some kB")

    def _patch_own_device(self, module: types.ModuleType, argument: str) -> None:
        """The device that torch was built for, which the module asks for whatever it runs on; `argument`: by what."""
        asked = getattr(torch, argument)
        if asked() is not torch.cpu:
            own = {argument: lambda device=None: torch.cpu if device is None else asked(device)}
            module.torch = _Seen(module.torch, **own)  # type: ignore[attr-defined]
            self._note(f"{module.__name__}: torch.{argument}", "remap", "none", "a torch with CUDA means a card by it")

    def _patch_device_name(self, module: types.ModuleType, argument: str) -> None:
        module.torch = _Seen(torch, **{argument: _on_cpu(getattr(torch, argument))})  # type: ignore[attr-defined]
        self._note(
            f"{module.__name__}: torch.{argument}", "remap", "none", 'names the device "cuda" whatever it runs on'
        )

    def _patch_attention(self, module: types.ModuleType, argument: str) -> None:
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
