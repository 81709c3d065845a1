"""Calls the release's own code that makes a draft input of what was handed over, without an engine: component level.

Engine side: started by path inside SGLang's environment, standard library, torch and SGLang only; prints one JSON line.
Started with the argument `mla` it asks what `component_mla` asks instead. The requests are our own stand-ins, with what
the code reads; so nothing here says that an engine gets that far. It must not wrap anything of the code it asks about.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import json
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HARNESS = Path(__file__).resolve().parents[2]
MARK = "component:"
WIDTH, VOCABULARY_ID, PROMPT = 8, 7, 3


def _own_package() -> None:
    package = types.ModuleType("eaglecheck_engine")
    package.__path__ = [str(_HARNESS)]
    package.__spec__ = importlib.machinery.ModuleSpec("eaglecheck_engine", None, is_package=True)
    sys.modules["eaglecheck_engine"] = package


class Relay:
    """What stands for SGLang's relay of draft states: it remembers who wrote into it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)

        return call


def _request(torch: Any, number: int, *, hidden: bool = True) -> Any:
    return types.SimpleNamespace(
        rid=f"r{number}",
        output_ids=[VOCABULARY_ID + number],
        output_topk_p=torch.ones(16),
        output_topk_index=torch.full((16,), number, dtype=torch.int64),
        hidden_states_tensor=torch.full((WIDTH,), float(number)) if hidden else None,
        output_dsa_topk_indices=None,
        grammar=None,
        swa_branching_seqlen=None,
        skip_radix_cache_insert=True,
    )


def _batch(torch: Any, reqs: list[Any], algorithm: Any) -> Any:
    count = len(reqs)
    return types.SimpleNamespace(
        reqs=reqs,
        device="cpu",
        enable_overlap=False,
        spec_algorithm=algorithm,
        spec_info=None,
        tree_cache=types.SimpleNamespace(cache_unfinished_req=lambda *_a, **_k: None),
        req_pool_indices=torch.arange(count),
        seq_lens=torch.full((count,), PROMPT, dtype=torch.int64),
        extend_lens=[PROMPT] * count,
        input_ids=torch.zeros(PROMPT * count, dtype=torch.int64),
        forward_mode=types.SimpleNamespace(is_idle=lambda: False),
        model_config=types.SimpleNamespace(vocab_size=512, hf_config=types.SimpleNamespace()),
    )


_SPEC = {
    "speculative_eagle_topk": 1,
    "speculative_num_steps": 3,
    "enable_multi_layer_eagle": False,
    "speculative_use_rejection_sampling": False,
}


def _prebuild(torch: Any, reqs: list[Any], algorithm: Any) -> Any:
    """The release's `process_prebuilt` on a batch; what the batch holds afterwards."""
    mixin: Any = importlib.import_module("sglang.srt.disaggregation.decode_schedule_batch_mixin")
    if hasattr(mixin, "checkpoint_kv_cache"):  # belongs to the cache, and wants a real request
        mixin.checkpoint_kv_cache = lambda *_a, **_k: None
    process = mixin.ScheduleBatchDisaggregationDecodeMixin.process_prebuilt
    batch, relay = _batch(torch, reqs, algorithm), Relay()
    known = {"server_args": types.SimpleNamespace(**_SPEC), "future_map": relay}
    process(batch, **{name: known[name] for name in inspect.signature(process).parameters if name in known})
    return batch, relay


def _say(torch: Any, batch: Any, relay: Relay) -> dict[str, Any]:
    made = batch.spec_info
    if made is None:
        return {"outcome": "no draft input", "relay": relay.calls}
    fields = ("hidden_states", "topk_index", "bonus_tokens", "verified_id")
    shapes = {
        name: list(value.shape) for name in fields if isinstance(value := getattr(made, name, None), torch.Tensor)
    }
    return {"outcome": "built", "what": type(made).__name__, "shapes": shapes}


def _ask(torch: Any, reqs: list[Any], algorithm: Any) -> dict[str, Any]:
    return answered(lambda: _say(torch, *_prebuild(torch, reqs, algorithm)))


def answered(asking: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was answered; an exception is an answer too, with SGLang's innermost frame."""
    try:
        return asking()
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/sglang/" in frame.filename]
        where = f"{frames[-1].filename.split('/sglang/')[-1]}:{frames[-1].name}" if frames else "not in SGLang"
        return {"outcome": "raises", "error": f"{type(error).__name__}: {error}".splitlines()[0], "site": where}


def _custom(name: str, answer: Any) -> Any:
    """A plugin's algorithm, registered as a plugin would; LookupError where the release has no such thing."""
    info = importlib.import_module("sglang.srt.speculative.spec_info")
    registry = importlib.import_module("sglang.srt.speculative.spec_registry")
    if not hasattr(registry.CustomSpecAlgo, "build_disagg_draft_input"):
        raise LookupError("its process_prebuilt does not ask the algorithm")
    own = {} if answer is None else {"build_disagg_draft_input": lambda self, *args, **kwargs: answer}
    kind = type(f"{name.title()}Algorithm", (registry.CustomSpecAlgo,), own)
    info.SpeculativeAlgorithm.register(name, spec_class=kind)(lambda server_args: None)
    return info.SpeculativeAlgorithm.from_string(name)


def _ask_custom(torch: Any, name: str, answer: Any) -> dict[str, Any]:
    try:
        algorithm = _custom(name, answer)
    except (LookupError, ImportError, AttributeError) as error:
        return {"outcome": "cannot be asked", "error": str(error)}
    return _ask(torch, [_request(torch, 0), _request(torch, 1)], algorithm)


def main() -> None:
    _own_package()
    from eaglecheck_engine.engine_side.hooks import ImportHooks
    from eaglecheck_engine.engine_side.replacement_kernels.cpu_ops import CpuOps

    hooks = ImportHooks()
    hooks.install()
    CpuOps(hooks).install(seams=(), attention="interpreted")
    import torch

    sglang = importlib.import_module("sglang")
    if sys.argv[1:] == ["mla"]:
        from eaglecheck_engine.engine_side.host import component_mla

        answers = component_mla.answers(torch)
    else:
        answers = _answers(torch)
    print(f"\n{MARK}{json.dumps({'release': sglang.__version__, 'torch': torch.__version__, 'answers': answers})}")


def _answers(torch: Any) -> dict[str, dict[str, Any]]:
    info = importlib.import_module("sglang.srt.speculative.spec_info")
    _give_settings()
    eagle = info.SpeculativeAlgorithm.EAGLE
    return {
        "two requests": _ask(torch, [_request(torch, 0), _request(torch, 1)], eagle),
        "no request": _ask(torch, [], eagle),
        "no hidden state": _ask(torch, [_request(torch, 0, hidden=False)], eagle),
        "one of two without": _ask(torch, [_request(torch, 0), _request(torch, 1, hidden=False)], eagle),
        "plugin returns None": _ask_custom(torch, "plainplugin", None),
        "plugin returns its own": _ask_custom(torch, "ownplugin", types.SimpleNamespace()),
    }


def _give_settings() -> None:
    """Newer releases read the speculation settings from a context of the process instead of an argument."""
    try:
        builder: Any = importlib.import_module("sglang.srt.speculative.eagle_disaggregation")
    except ImportError:
        return
    if hasattr(builder, "get_spec"):
        builder.get_spec = lambda: types.SimpleNamespace(**_SPEC)
    if hasattr(builder, "should_remap_pd_dsa_seed_to_local_slots"):
        builder.should_remap_pd_dsa_seed_to_local_slots = lambda: False


if __name__ == "__main__":
    main()
