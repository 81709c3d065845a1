"""F-022: What a seed draws depends on whether a neighbour in the batch is greedy, or uses top-k or top-p

target prefill two runs differ: request late on DP rank 0, committed length 0, round 3, row 5
  engine 33, expected 79 (same seed other token)
  signature NONDETERMINISM:seeds:PREFILL:same-seed-other-token

SGLang 0.5.23 on cpu, with
    --device cpu
    --context-length 512
    --disable-overlap-schedule
    --speculative-algorithm EAGLE
    --speculative-num-steps 3
    --speculative-eagle-topk 1
    --speculative-num-draft-tokens 4
    --dtype float32
    --attention-backend triton
    --sampling-backend pytorch
    --grammar-backend none
    --skip-tokenizer-init
    --disable-cuda-graph
    --disable-radix-cache
    --page-size 1
    --max-running-requests 8
    --tp-size 1
    --dp-size 1
    --enable-deterministic-inference
    --disable-hybrid-swa-memory
    --max-total-tokens 4096
    --schedule-conservativeness 1.0
    --chunked-prefill-size -1

    python F-022.py        0: it is not there; 1: it is there; 3: this cannot be said

Needs SGLang and what it brings; makes its own tiny checkpoint.
On a CPU, what has no CPU build is stubbed or replaced by a few lines of torch (module `cpu` below). SGLang's own Triton
kernels run interpreted: slow, but they are SGLang's.
Made by `eaglecheck export`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.abc
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path
from typing import Any, Callable, ClassVar

for needed in ("sglang", "torch", "numpy", "safetensors") if __name__ == "__main__" else ():
    if importlib.util.find_spec(needed) is None:
        print(f"{sys.executable} has no {needed}: run this with the Python that SGLang is installed for\nCANNOT BE SAID")
        sys.exit(3)

import numpy as np

GIVEN = json.loads(r"""
{
"device": "cpu",
"show": {"kind": "seeds", "rids": ["first", "late"], "tokens": 1},
"requests": [{"rid": "first", "input_ids": [5, 17, 130, 42, 9, 77], "dp_rank": 0, "sampling": {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": true, "sampling_seed": 7}}, {"rid": "same", "input_ids": [5, 17, 130, 42, 9, 77], "dp_rank": 0, "sampling": {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": true, "sampling_seed": 7}}, {"rid": "other", "input_ids": [5, 17, 130, 42, 9, 77], "dp_rank": 0, "sampling": {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": true, "sampling_seed": 8}}, {"rid": "greedy", "input_ids": [44, 45, 46, 47], "dp_rank": 0, "sampling": {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": true}}, {"rid": "late", "input_ids": [5, 17, 130, 42, 9, 77], "dp_rank": 0, "sampling": {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": true, "sampling_seed": 7}}],
"script": [{"kind": "submit", "rids": ["first", "same", "other", "greedy"], "count": 1}, {"kind": "step", "rids": [], "count": 3}, {"kind": "submit", "rids": ["late"], "count": 1}, {"kind": "drain", "rids": [], "count": 1}],
"engines": {"": {"environment": {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "SGLANG_GRAMMAR_POLL_INTERVAL": "60", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}, "arguments": {"device": "cpu", "context_length": 512, "disable_overlap_schedule": true, "speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4, "dtype": "float32", "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none", "skip_tokenizer_init": true, "disable_cuda_graph": true, "disable_radix_cache": true, "page_size": 1, "max_running_requests": 8, "tp_size": 1, "dp_size": 1, "enable_dp_attention": false, "disable_custom_all_reduce": false, "enable_priority_scheduling": false, "enable_deterministic_inference": true, "disable_hybrid_swa_memory": true, "max_total_tokens": 4096, "schedule_conservativeness": 1.0, "chunked_prefill_size": -1, "mem_fraction_static": 0.5, "random_seed": 0, "log_level": "info"}, "optional": {"disable_piecewise_cuda_graph": true}}},
"plugin": null,
"worker": ["sglang.srt.speculative.eagle_worker_v2", "EAGLEWorkerV2"],
"releases": [
 {"first": [0, 5, 11, 0], "gate": ["sglang.srt.managers.scheduler", "Scheduler.recv_requests"], "patches": [["sglang.srt.batch_invariant_ops", "batch_invariant", "enable_batch_invariant_mode"], ["sglang.srt.models.llama", "cuda_noop", "synchronize,empty_cache"], ["sglang.srt.speculative.eagle_utils", "tree", ""], ["sglang.srt.speculative.eagle_utils", "verify", ""], ["sglang.srt.speculative.eagle_info_v2", "flag", "_is_musa=none"], ["sglang.srt.speculative.eagle_info_v2", "sampling", ""]]},
 {"first": [0, 5, 13, 0], "gate": ["sglang.srt.managers.scheduler_components.request_receiver", "SchedulerRequestReceiver.recv_requests"], "patches": [["sglang.srt.batch_invariant_ops", "batch_invariant", "enable_batch_invariant_mode"], ["sglang.srt.models.llama", "cuda_noop", "synchronize,empty_cache"], ["sglang.srt.speculative.eagle_utils", "tree", ""], ["sglang.srt.speculative.eagle_utils", "verify", ""], ["sglang.srt.speculative.triton_ops.cache_locs", "flag", "_is_musa=none"], ["sglang.srt.speculative.eagle_info_v2", "sampling", ""]]},
 {"first": [0, 5, 14, 0], "gate": ["sglang.srt.managers.scheduler_components.request_receiver", "SchedulerRequestReceiver.recv_requests"], "patches": [["sglang.srt.batch_invariant_ops", "batch_invariant", "enable_batch_invariant_mode"], ["sglang.srt.models.llama", "cuda_noop", "synchronize,empty_cache"], ["sglang.srt.speculative.eagle_utils", "tree", ""], ["sglang.srt.speculative.eagle_utils", "verify", ""], ["sglang.srt.speculative.triton_ops.cache_locs", "flag", "_is_musa=none"]]},
 {"first": [0, 5, 15, 0], "gate": ["sglang.srt.managers.scheduler_components.request_receiver", "SchedulerRequestReceiver.recv_requests"], "patches": [["sglang.srt.batch_invariant_ops", "batch_invariant", "enable_batch_invariant_mode"], ["sglang.srt.models.llama", "cuda_noop", "synchronize,empty_cache"], ["sglang.srt.speculative.eagle_utils", "flag", "_is_xpu=none"], ["sglang.srt.speculative.triton_ops.cache_locs", "flag", "_is_musa=none"]]},
 {"first": [0, 5, 16, 0], "gate": ["sglang.srt.managers.scheduler_components.request_receiver", "SchedulerRequestReceiver.recv_requests"], "patches": [["sglang.srt.batch_invariant_ops", "batch_invariant", "enable_batch_invariant_mode"], ["sglang.srt.models.llama", "cuda_noop", "synchronize,empty_cache"], ["sglang.srt.speculative.eagle_utils", "flag", "_is_xpu=none"], ["sglang.srt.speculative.eagle_utils", "sampled_path", "_is_xpu"], ["sgl_kernel", "sampling", ""], ["sglang.kernels.ops.speculative.cache_locs", "flag", "_is_musa=none"]]},
 {"first": [0, 5, 23, 0], "gate": ["sglang.srt.managers.scheduler_components.request_receiver", "SchedulerRequestReceiver.recv_requests"], "patches": [["sglang.srt.batch_invariant_ops", "batch_invariant", "enable_batch_invariant_mode"], ["sglang.srt.models.llama", "cuda_noop", "synchronize,empty_cache"], ["sglang.kernels.ops.speculative.spec_tree", "flag", "_is_xpu=none"], ["sglang.srt.speculative.eagle_utils", "sampling", ""], ["sglang.kernels.ops.speculative.cache_locs", "flag", "_is_musa=none"], ["sglang.kernels.ops.sampling.murmur_hash", "murmur", ""]]}],
"seconds": 900,
"idle_seconds": 5
}
""")
REQUESTS = GIVEN["requests"]

SOURCES: dict[str, str] = {}  # modules that this file brings along, at its end


def load(name: str) -> Any:
    """A module of SOURCES, behind those before it, which it may import."""
    for each, source in SOURCES.items():
        if f"repro_{name}" in sys.modules:
            break
        if f"repro_{each}" not in sys.modules:
            module = sys.modules[f"repro_{each}"] = types.ModuleType(f"repro_{each}")
            exec(compile(source, f"{each}.py", "exec"), module.__dict__)
    return sys.modules[f"repro_{name}"]


def make_checkpoint(folder: Path) -> None:
    from safetensors.numpy import save_file

    module, make, numbers = ("llama_weights", "pair", "Recipe(name='eagle-tiny', seed=20240626, vocab=512, hidden=64, intermediate=128, layers=3, heads=4, kv_heads=2, head_dim=32, rope_theta=10000.0, max_position=512, score_std=2.5, attention_gain=2.0, mlp_gain=1.5, upper_gain=0.1, hidden_gain=0.05, draft_scale=0.4, logit_std=3.0)")
    recipes = load("recipes")
    recipe = eval(numbers, vars(recipes))
    made = getattr(load(module), make)(recipes.Noise(recipe.seed), recipe)
    for name, config, weights in (
        ("target", made.target_config, made.target), ("draft", made.draft_config, made.draft)
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        ordered = {key: np.ascontiguousarray(weights[key]) for key in sorted(weights)}
        save_file(ordered, folder / name / "model.safetensors", metadata={"format": "pt"})


# --- In SGLang's processes: what a CPU needs, the order of the requests, and what is watched --------------------------

AFTER: dict[str, list[Callable[[types.ModuleType], None]]] = {}  # module -> what is done once it is imported


class _After(importlib.abc.MetaPathFinder):
    busy: ClassVar[set[str]] = set()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in AFTER or name in self.busy:
            return None
        self.busy.add(name)
        spec = importlib.util.find_spec(name)
        self.busy.discard(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            for act in AFTER[name]:
                act(module)

        spec.loader.exec_module = exec_module
        return spec


def of_this_release() -> dict[str, Any]:
    """Where requests are taken, and what a CPU needs: of the newest row that is not newer than this SGLang."""
    numbers = [int(number) for number in re.findall(r"\d+", importlib.metadata.version("sglang"))]
    version = [*numbers, 0][:4]
    return [row for row in GIVEN["releases"] if row["first"] <= version][-1]


class Script:
    """Lets the requests in, and aborts them, in the passes of the scheduler loop in which the fault shows.

    Ranks pass their loops together: each notes in which pass a request reached it, and what is due comes one later.
    """

    def __init__(self, folder: Path, ops: list[dict[str, Any]]) -> None:
        self.folder, self.ops, self.held = folder, list(ops), dict[str, Any]()
        self.passed = self.wait = 0

    def __call__(self, received: Any) -> list[Any]:
        self.passed += 1
        names, out = {one["rid"] for one in REQUESTS}, []
        for one in received or []:
            rid = getattr(one, "rid", None)
            if rid in names - {*self.held} and hasattr(one, "sampling_params"):
                self.held[rid] = one
                hidden = self.folder / f"{rid}.{os.getpid()}"
                hidden.write_text(str(self.passed))
                hidden.replace(self.folder / f"{rid}.held")
            else:
                out.append(one)
        there = [file.read_text() for file in self.folder.glob("*.held")]
        started = len(there) == len(names) and max(map(int, there)) < self.passed
        return [*out, *self.due()] if started else out

    def due(self) -> list[Any]:
        if self.wait:
            self.wait -= 1
            return []
        let: list[Any] = []
        while self.ops:
            op = self.ops.pop(0)
            mine = [self.held[rid] for rid in op["rids"] if rid in self.held]
            if op["kind"] == "submit":
                let += mine
            elif op["kind"] == "abort":
                from sglang.srt.managers.io_struct import AbortReq

                let += [AbortReq(rid=one.rid) for one in mine]
            elif op["kind"] == "step":
                self.wait = op["count"] - 1
                break
        return let


def order_requests(module: types.ModuleType) -> None:
    owner, name = of_this_release()["gate"][1].split(".")
    original = getattr(getattr(module, owner), name)
    folder = Path(os.environ["REPRO_FOLDER"], "held")
    folder.mkdir(exist_ok=True)
    script = Script(folder, GIVEN["script"])
    setattr(getattr(module, owner), name, lambda self, *args, **kwargs: script(original(self, *args, **kwargs)))


def watch_draft(module: types.ModuleType) -> None:
    """Appends what every forward of the draft model is fed, and the states that it hands on, to forwards.jsonl."""
    original = module.ModelRunner.forward

    def forward(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_draft_worker:
            return original(self, forward_batch, *args, **kwargs)
        fed = {"ids": forward_batch.input_ids.tolist(), "positions": forward_batch.positions.tolist()}
        out = original(self, forward_batch, *args, **kwargs)
        logits = out[0] if isinstance(out, tuple) else getattr(out, "logits_output", out)
        states = getattr(logits, "hidden_states", None)
        note("forwards", {**fed, "states": None if states is None else states.float().tolist()})
        return out

    module.ModelRunner.forward = forward


def watch_resumed(module: types.ModuleType) -> None:
    """Appends what a request's first draft step is fed on the decode side, whenever it begins or resumes."""
    owner = module.ScheduleBatchDisaggregationDecodeMixin
    original = owner.process_prebuilt

    def process_prebuilt(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        for row, req in enumerate(self.reqs):
            length, draft = len(req.origin_input_ids) + len(req.output_ids), self.spec_info
            fed = {"token": int(draft.topk_index[row][0]), "state": draft.hidden_states[row].float().tolist()}
            note("resumed", {"rid": req.rid, "length": length, **fed})
        return out

    owner.process_prebuilt = process_prebuilt


def note(name: str, what: dict[str, Any]) -> None:
    with Path(os.environ["REPRO_FOLDER"], f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\n")


def noted(folder: Path, name: str) -> list[dict[str, Any]]:
    file = folder / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def install() -> None:
    """In every process of SGLang's: its schedulers import this file before anything of SGLang."""
    plain, side, release = os.environ["REPRO"] == "plain", os.environ["REPRO_SIDE"], of_this_release()
    if GIVEN["device"] == "cpu":
        for module, what, argument in release["patches"]:
            act = lambda found, what=what, argument=argument: load("cpu").patch(found, what, argument)
            AFTER.setdefault(module, []).append(act)
    if not plain:
        if side != "decode":
            AFTER.setdefault(release["gate"][0], []).append(order_requests)
        if side != "prefill":
            AFTER.setdefault("sglang.srt.model_executor.model_runner", []).append(watch_draft)
        if GIVEN["show"]["kind"] == "resumed":
            AFTER["sglang.srt.disaggregation.decode_schedule_batch_mixin"] = [watch_resumed]
        if side:  # carried through the folder, in the place of a network between the two engines
            moved = os.environ["REPRO_FOLDER"] + "/moved"
            AFTER["sglang.srt.disaggregation.utils"] = [lambda module: load("classes").register(module, folder=moved)]
        if GIVEN["plugin"]:
            worker = tuple(GIVEN["worker"])
            register = lambda module: load("plugin_algorithm").register(module, kind=GIVEN["plugin"], worker=worker)
            AFTER["sglang.srt.speculative.spec_info"] = [register]
    if GIVEN["device"] == "cpu":
        sys.meta_path.insert(0, stubs())
    sys.meta_path.insert(0, _After())


def stubs() -> Any:
    """What SGLang imports and does not use here, where it is not there or cannot be loaded."""
    found = load("stub_packages")
    return found.StubFinder(lambda *_: None, (*found.STUB_PACKAGES, "datasets"))


def fork_children() -> None:
    """On a CPU a boot is mostly imports, three times over: SGLang's processes are forked from this one instead."""
    from multiprocessing import context, popen_fork

    context.Process._Popen = staticmethod(popen_fork.Popen)


def serve(folder: Path) -> None:
    """A process that holds an engine: every request, and what came back, as JSON in the folder."""
    import sglang
    from sglang.srt.server_args import ServerArgs

    plain, side = os.environ["REPRO"] == "plain", os.environ["REPRO_SIDE"]
    given = GIVEN["engines"][side]
    known = {name for base in ServerArgs.__mro__ for name in getattr(base, "__annotations__", {})}
    arguments = {**given["arguments"], "model_path": str(folder / "target")}
    arguments |= {name: value for name, value in given["optional"].items() if name in known}
    arguments["speculative_draft_model_path"] = str(folder / "draft")
    if plain:
        arguments = {name: value for name, value in arguments.items() if not name.startswith("speculative")}
    if GIVEN["device"] == "cpu" and arguments["tp_size"] == 1:
        fork_children()
    engine = sglang.Engine(**arguments)

    async def ask(room: int, one: dict[str, Any]) -> Any:
        rank = {"routed_dp_rank": one["dp_rank"]} if arguments["dp_size"] > 1 else {}
        meet = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": room} if side else {}
        asked = {"input_ids": one["input_ids"], "sampling_params": one["sampling"], **rank, **meet}
        return await engine.async_generate(rid=one["rid"], **asked)

    async def answers() -> list[Any]:
        asked = [ask(room, one) for room, one in enumerate(REQUESTS, 1)]
        return [await one for one in asked] if plain else await asyncio.gather(*asked)

    ends = asyncio.get_event_loop().run_until_complete(answers())
    outputs = {one["rid"]: list(end["output_ids"]) for one, end in zip(REQUESTS, ends)}
    (folder / f"{os.environ['REPRO']}{side}.json").write_text(json.dumps(outputs))
    time.sleep(GIVEN["idle_seconds"])  # SGLang checks its pools when it has nothing to do
    (folder / f"idle{side}").write_text("")
    engine.shutdown()


# --- What is expected and what is observed ----------------------------------------------------------------------------

DEAD = "SIGQUIT received"  # a process of the engine's has ended by an error, which is in the log


def run(folder: Path, how: str) -> tuple[dict[str, list[int]], str, bool]:
    """Outputs by request ({} if none came back), the log, and whether the engine stayed until the end."""
    sides, started = list(GIVEN["engines"]), []
    answer, log = folder / f"{how}{sides[-1]}.json", folder / f"{how}.log"
    for side in sides:
        (folder / f"idle{side}").unlink(missing_ok=True)
        own = {"REPRO": how, "REPRO_SIDE": side, "REPRO_FOLDER": str(folder)}
        own["TMPDIR"] = str(folder)  # SGLang leaves its socket files behind; this folder goes with this process
        environment = {**os.environ, **GIVEN["engines"][side]["environment"], **own}
        with log.open("a") as file:
            command = [sys.executable, "-P", __file__, str(folder)]
            started.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True))
    end = time.monotonic() + GIVEN["seconds"]
    try:
        while time.monotonic() < end and any(one.poll() is None for one in started):
            time.sleep(0.2)
            if DEAD in log.read_text(errors="replace") or any(one.poll() for one in started):
                break  # what follows is a minute of waiting for dumps
    finally:
        for one in started:
            try:
                os.killpg(one.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            one.wait()
    idle = all((folder / f"idle{side}").exists() for side in sides)
    return json.loads(answer.read_text()) if answer.exists() else {}, log.read_text(errors="replace"), idle


def judge(folder: Path) -> int:
    show = GIVEN["show"]
    outputs, log, idle = run(folder, "speculative")
    if show["kind"] == "end":
        pattern = show["site"] or f".*{re.escape(show['error'])}.*"
        errors = re.findall(pattern, log)[:1]
        print("expected: every request is answered, and the engine stays")
        print(f"observed: {errors[0].strip() if errors else 'so it is' if idle else f'another end{tail(log)}'}")
        return 1 if errors else 0 if idle else 3
    if show["kind"] == "hang" and "Traceback" not in log:
        print(f"expected: every request is answered within {GIVEN['seconds']} s of the start")
        print(f"observed: {outputs or 'nothing'}")
        return 0 if outputs else 1
    if not outputs:
        print(f"nothing came back{tail(log)}")
        return 3
    if show["kind"] == "limit":
        over = {one["rid"]: outputs[one["rid"]] for one in REQUESTS if _over(one["sampling"], outputs[one["rid"]])}
        print("expected: no answer is longer than max_new_tokens, or goes on behind a stop token")
        print(f"observed: {over or outputs}")
        return 1 if over else 0
    if show["kind"] == "seeds":
        first, other = (next(one for one in REQUESTS if one["rid"] == rid) for rid in show["rids"])
        drawn = [outputs[rid][: show["tokens"]] for rid in show["rids"]]
        print(f"requests {first['rid']} and {other['rid']}: the same prompt, {first['sampling']}")
        print("expected: they draw the same, whoever is in the batch")
        print(f"observed: {drawn[0]} and {drawn[1]}")
        return 0 if drawn[0] == drawn[1] else 1
    if show["kind"] == "text":
        truth, log, _ = run(folder, "plain")
        if not truth:
            print(f"nothing came back without speculation{tail(log)}")
            return 3
        wrong = [rid for rid in truth if outputs[rid] != truth[rid]]
        for rid in wrong or truth:
            print(f"request {rid}, greedy\n  expected (no speculation): {truth[rid]}\n  observed: {outputs[rid]}")
        return 1 if wrong else 0
    return _resumed(folder) if show["kind"] == "resumed" else _forwards(folder, show)


def tail(log: str) -> str:
    return f"; the log ends with\n{log[-2000:]}"


def _over(sampling: dict[str, Any], ids: list[int]) -> bool:
    stops = [at for at, token in enumerate(ids) if token in sampling.get("stop_token_ids", ())]
    return len(ids) > sampling["max_new_tokens"] or bool(stops and stops[0] + 1 < len(ids))


def _resumed(folder: Path) -> int:
    """A state is that of one token: a request that has grown since cannot be fed the same one again."""
    begun: dict[str, dict[str, Any]] = {}
    fed = noted(folder, "resumed")
    again = [(begun[one["rid"]], one) for one in fed if begun.setdefault(one["rid"], one) is not one]
    if not again:
        print("no request was taken back")
        return 3
    first, then = again[0]
    same = first["state"] == then["state"]
    print(f"request {then['rid']} began with {first['length']} tokens, and after a retraction with {then['length']}")
    print("expected: its first draft step is fed the state of its last token")
    print(f"observed: it is fed {'the state of its beginning, bit for bit' if same else 'another state'}; "
          f"token {then['token']}, at the beginning {first['token']}; state {np.round(then['state'][:4], 4)} …")
    return int(same)


def _fed(want: dict[str, Any], forward: dict[str, Any], whole: bool) -> list[int]:
    """The rows of a forward that are fed what is wanted, in order; an extend has others too, of refused tokens."""
    pairs, rows = list(zip(forward["ids"], forward["positions"])), list[int]()
    for pair in zip(want["ids"], want["positions"]):
        rows += [row for row in range(rows[-1] + 1 if rows else 0, len(pairs)) if pairs[row] == pair][:1]
    fits = len(rows) == len(want["ids"]) and not (whole and len(rows) < len(pairs))
    return rows if fits else []


def _state(forward: dict[str, Any], row: int) -> list[float] | None:
    """What it hands on of a row; of a prompt only what the last row of each request says."""
    states, positions = forward["states"] or [], forward["positions"]
    if len(states) == len(positions):
        return states[row]
    ends = [at for at, here in enumerate(positions, 1) if at == len(positions) or positions[at] != here + 1]
    return states[ends.index(row + 1)] if len(ends) == len(states) and row + 1 in ends else None


def _forwards(folder: Path, show: dict[str, Any]) -> int:
    forwards, whole = noted(folder, "forwards"), show["whole"]
    print(f"the draft forward of {show['where']}, made in SGLang by {show['made_by']}")
    if show["kind"] == "inputs":
        seen = [side for side in ("observed", "expected") if any(_fed(show[side], one, whole) for one in forwards)]
        for side, what in (("expected", "expected"), (seen[0] if seen else "", "observed")):
            print(f"{what}: {'ids {ids}, positions {positions}'.format(**show[side]) if side else 'neither'}")
        return 3 if not seen else 1 if seen[0] == "observed" else 0
    same = [(one, rows[show["row"]]) for one in forwards if (rows := _fed(show, one, whole))]
    state = _state(*same[0]) if same else None
    if state is None:
        print("it did not happen")
        return 3
    off, near = (float(np.abs(np.subtract(state, show[side])).max()) for side in ("expected", "observed"))
    print(f"expected: state {np.round(show['expected'][:4], 4)} …")
    print(f"observed: state {np.round(state[:4], 4)} …, off by up to {off:.2g} (allowed: {show['limit']:.2g})")
    return 0 if off <= show["limit"] else 1 if near <= show["limit"] else 3


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        try:
            make_checkpoint(Path(folder))
            there = judge(Path(folder))
        except Exception:
            traceback.print_exc()
            there = 3
    print({0: "NOT THERE", 1: "THE FAULT IS THERE"}.get(there, "CANNOT BE SAID"))
    return there


# --- What this file brings along: the weights are seeded, and the same bytes everywhere -------------------------------

SOURCES['stub_packages'] = r'''
"""Stubs for packages that SGLang imports and never uses on a CPU, and that are not there or cannot be loaded."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

#: Importable but never used on this path; SGLang imports them at module level.
STUB_PACKAGES = ("torchvision", "vllm", "sgl_kernel")


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


class StubFinder(importlib.abc.MetaPathFinder):
    """A stub for each of `packages` that is not there, or that this machine cannot load.

    `sgl_kernel` of an index or a bundle wants CUDA's libraries. A real package that loads always wins.
    """

    def __init__(self, note: Callable[[str, str], None], packages: Sequence[str]) -> None:
        self._note = note
        self._packages = packages
        self._unloadable: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = name.split(".")[0]
        if package not in self._packages:
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
'''
SOURCES['recipes'] = r'''
"""What decides the bytes of a tiny pair, and the numbers it is made from. Pure data; it must not write files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar
import numpy as np

Weights = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the bytes of a pair. Gains are relative to unit-RMS inputs.

    algorithm: what SGLang calls this kind of head.
    """

    algorithm: ClassVar[str] = "EAGLE"
    target_architecture: ClassVar[str] = "LlamaForCausalLM"
    target_type: ClassVar[str] = "llama"

    name: str
    seed: int
    vocab: int = 512
    hidden: int = 64
    intermediate: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10000.0  # the default everywhere, since releases disagree where the config keeps it
    max_position: int = 512
    score_std: float = 2.5  # standard deviation of attention scores: above ~2 a few tokens win
    attention_gain: float = 2.0  # size of the first layer's attention output against the token itself
    mlp_gain: float = 1.5
    upper_gain: float = 0.1  # target layers after the first: what the draft cannot know
    hidden_gain: float = 0.05  # how much the hidden state weighs that the draft it is handed
    draft_scale: float = 0.4  # brings the un-normed draft output to about unit RMS, where logits are not one-hot
    logit_std: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What is written: a config.json and the tensors of each side."""

    target_config: dict[str, Any]
    target: Weights
    draft_config: dict[str, Any]
    draft: Weights


class Noise:
    """Normal-like numbers from raw PCG64 words: only exact integer and IEEE arithmetic, so portable bit for bit."""

    def __init__(self, seed: int) -> None:
        self._words = np.random.PCG64(seed)

    def draw(self, *shape: int, std: float) -> np.ndarray:
        """float32 `shape`, mean 0; the sum of four uniforms (Irwin-Hall) stands in for a normal."""
        count = int(np.prod(shape))
        uniform = (self._words.random_raw(4 * count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        quarters = uniform.reshape(4, count)
        total = ((quarters[0] + quarters[1]) + quarters[2]) + quarters[3]
        normal: np.ndarray = (total - 2.0) * (3.0**0.5 * std)
        return normal.astype(np.float32).reshape(shape)
'''
SOURCES['llama_weights'] = r'''
"""Llama-shaped pairs: the target that all others are made from, its EAGLE-1 head, and the Qwen3 target.

No matrix product takes part, so thread counts and BLAS builds cannot change a bit. It must not write files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
import numpy as np
from repro_recipes import Noise, Pair, Recipe, Weights

#: Norms of a target's first layer that an EAGLE-1 head has none of.
ABSENT = ("input_layernorm.weight", "q_norm.weight", "k_norm.weight")


def pair(noise: Noise, recipe: Recipe) -> Pair:
    """A Llama with an EAGLE-1 head."""
    made = target(noise, recipe)
    return Pair(
        target=made,
        target_config=config(recipe, layers=recipe.layers),
        draft=head(noise, recipe, made),
        draft_config=config(recipe, layers=1, architecture="LlamaForCausalLMEagle"),
    )


def _layer(noise: Noise, recipe: Recipe, *, gain: float) -> Weights:
    """One Llama layer; `gain` scales what it adds to the residual stream."""
    r, unit = recipe, recipe.hidden**-0.5
    wide, narrow = r.heads * r.head_dim, r.kv_heads * r.head_dim
    sharp = r.score_std**0.5 * unit
    return {
        "self_attn.q_proj.weight": noise.draw(wide, r.hidden, std=sharp),
        "self_attn.k_proj.weight": noise.draw(narrow, r.hidden, std=sharp),
        "self_attn.v_proj.weight": noise.draw(narrow, r.hidden, std=unit),
        "self_attn.o_proj.weight": noise.draw(r.hidden, wide, std=gain * r.attention_gain * wide**-0.5),
        "mlp.gate_proj.weight": noise.draw(r.intermediate, r.hidden, std=2 * unit),
        "mlp.up_proj.weight": noise.draw(r.intermediate, r.hidden, std=unit),
        "mlp.down_proj.weight": noise.draw(r.hidden, r.intermediate, std=gain * r.mlp_gain * r.intermediate**-0.5),
        "input_layernorm.weight": np.ones(r.hidden, dtype=np.float32),
        "post_attention_layernorm.weight": np.ones(r.hidden, dtype=np.float32),
    }


def target(noise: Noise, recipe: Recipe, *, own: Callable[[float], Weights] = lambda _gain: {}) -> Weights:
    """own: what a layer of that gain has beside, or instead of, a Llama's."""
    weights: Weights = {
        "model.embed_tokens.weight": noise.draw(recipe.vocab, recipe.hidden, std=1.0),
        "model.norm.weight": np.ones(recipe.hidden, dtype=np.float32),
        "lm_head.weight": noise.draw(recipe.vocab, recipe.hidden, std=recipe.logit_std * recipe.hidden**-0.5),
    }
    weights["lm_head.weight"][recipe.vocab - 2 :] = 0.0  # bos and eos: a logit of 0 is never the largest
    for index in range(recipe.layers):
        gain = 1.0 if index == 0 else recipe.upper_gain
        layer = _layer(noise, recipe, gain=gain)
        layer |= own(gain)
        weights |= {f"model.layers.{index}.{name}": value for name, value in layer.items()}
    return weights


def head(noise: Noise, recipe: Recipe, target: Weights) -> Weights:
    """The target's first layer behind an fc that passes the token through and mixes the hidden state in.

    Scaling fc and down_proj by s and dividing q and k by s scales the output by s and changes nothing else.
    """
    scale = np.float32(recipe.draft_scale)
    mix = noise.draw(recipe.hidden, recipe.hidden, std=recipe.hidden_gain * recipe.hidden**-0.5)
    weights: Weights = {
        "fc.weight": np.concatenate([np.eye(recipe.hidden, dtype=np.float32), mix], axis=1) * scale,
        "fc.bias": noise.draw(recipe.hidden, std=0.05) * scale,
    }
    factor = {"self_attn.q_proj": 1 / scale, "self_attn.k_proj": 1 / scale, "mlp.down_proj": scale}
    for name, value in target.items():
        if name.startswith("model.layers.0.") and not name.endswith(ABSENT):
            short = name.removeprefix("model.layers.0.")
            scaled = value * np.float32(factor.get(short.removesuffix(".weight"), 1.0))
            weights[f"layers.0.{short}"] = scaled
    return weights


def config(recipe: Recipe, *, layers: int, architecture: str = "") -> dict[str, Any]:
    """An HF Llama config; without an architecture the target's. bos and eos, the last two ids, are never proposed."""
    return {
        "architectures": [architecture or recipe.target_architecture],
        "model_type": "llama" if architecture else recipe.target_type,
        "vocab_size": recipe.vocab,
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": recipe.max_position,
        "rms_norm_eps": 1e-6,
        "rope_theta": recipe.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": recipe.vocab - 2,
        "eos_token_id": recipe.vocab - 1,
        "torch_dtype": "float32",
        "use_cache": True,
    }
'''
SOURCES['cpu_sampling'] = r'''
"""Sampled tree verification in plain torch, for releases whose kernels have no CPU build.

Engine side: torch only. Ours, written from what the tensors mean: inverse-transform sampling of the target's
distribution along a tree (speculative sampling, arXiv 2211.17192; several candidates a step, arXiv 2305.09781), with
uniforms that the release has drawn. Where these run, the verify kernel is *not* the release's own, and the trace
header says so.
"""

from __future__ import annotations

from typing import Any

import torch


def verify_sampled(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    **_kwargs: Any,
) -> None:
    """Walk each tree by its uniforms; same in/out tensors as SGLang's function.

    candidates, uniform_samples [b, n]; uniform_samples_for_final_sampling [b]; target_probs [b, n, V]. The children of
    a node share its uniform: they divide the unit interval among them in order, and one beyond them all refuses them.
    """
    for b in range(candidates.shape[0]):
        node, accepted = 0, 0
        accept_index[b, 0] = retrive_index[b, 0]
        refused: list[int] = []
        while accepted + 1 < accept_index.shape[1]:
            refused, child = [], int(retrive_next_token[b, node])
            uniform, taken = float(uniform_samples[b, node]), 0.0
            while child != -1:
                token = int(candidates[b, child])
                mass = float(target_probs[b, node, token])
                taken += mass
                if mass > 0 and (uniform < taken / threshold_acc or mass >= threshold_single):
                    break
                refused.append(token)
                child = int(retrive_next_sibling[b, child])
            if child == -1:
                break
            predicts[int(retrive_index[b, node])] = candidates[b, child]
            accepted += 1
            accept_index[b, accepted] = retrive_index[b, child]
            node, refused = child, []
        left = target_probs[b, node].clone()
        left[refused] = 0.0
        predicts[int(retrive_index[b, node])] = _draw(left, float(uniform_samples_for_final_sampling[b]))
        accept_token_num[b] = accepted


def _draw(mass: torch.Tensor, uniform: float) -> int:
    """The first token at which the running sum of mass [V] exceeds uniform · the whole; else the last possible one."""
    running = mass.cumsum(0)
    above = torch.nonzero(running > uniform * running[-1])
    return int(above[0]) if len(above) else int(torch.nonzero(mass)[-1])


def renorm_top_k(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """probs [r, V] with all but each row's top_k [r] likeliest tokens at zero, ties kept, divided by what is left."""
    kept = top_k.reshape(-1, 1).clamp(max=probs.shape[-1]).long()
    least = probs.sort(dim=-1, descending=True).values.gather(1, kept - 1)
    return _renormed(probs, probs >= least)


def renorm_top_p(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """probs [r, V] with only the smallest set of likeliest tokens whose mass reaches top_p [r], divided by its mass."""
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    keep = torch.zeros_like(probs, dtype=torch.bool).scatter(1, order, before < top_p.reshape(-1, 1))
    return _renormed(probs, keep)


def _renormed(probs: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    kept = probs * keep
    return kept / kept.sum(-1, keepdim=True)
'''
SOURCES['cpu_tree'] = r'''
"""Tree building and greedy tree verification in plain torch, for releases whose kernels have no CPU build.

Engine side: torch only. Ours, written from what the tensors mean (EAGLE-2, arXiv 2406.16858): where these run, tree
and verify kernels are *not* the release's own, and the trace header says so.
"""

from __future__ import annotations

from typing import Any

import torch


def build_tree(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int = 0,
) -> None:
    """Fill mask, positions and child/sibling links in place.

    parent_list [b, 1 + t·(k-1)]: candidate index a group of t children grew from (-1: the root). selected_index
    [b, n-1]: the kept candidates, ascending. positions [b·n], retrieve_* [b, n]. Only full masks are supported.
    """
    if int(tree_mask_mode) != 0:
        raise NotImplementedError(
            f"the CPU replacement of tree building makes full masks only, not mode {tree_mask_mode}"
        )
    n = draft_token_num
    offset = 0
    for b, committed in enumerate(seq_lens.tolist()):
        parents = _parents(parent_list[b].tolist(), selected_index[b].tolist(), topk)
        width = committed + n
        block = tree_mask[offset : offset + n * width].view(n, width)
        offset += n * width
        tree = block[:, committed:]
        tree.fill_(False)
        for node, parent in enumerate(parents):
            tree[node, node] = True
            position = committed
            if parent >= 0:
                tree[node] |= tree[parent]
                position = int(positions[b * n + parent]) + 1
            positions[b * n + node] = position
            retrieve_index[b, node] = b * n + node
        _link(parents, retrieve_next_token[b], retrieve_next_sibling[b])


def _parents(parent_list: list[int], selected: list[int], topk: int) -> list[int]:
    """Parent node of every node, the root (node 0) first with -1."""
    node_of = {candidate: node + 1 for node, candidate in enumerate(selected)}
    parents = [-1]
    for candidate in selected:
        group = candidate // topk
        parents.append(0 if group == 0 else node_of[parent_list[group]])
    return parents


def _link(parents: list[int], next_token: torch.Tensor, next_sibling: torch.Tensor) -> None:
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        next_sibling[node] = next_token[parent]
        next_token[parent] = node


def verify_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
    **_kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk each tree along the target's choices; same in/out tensors as SGLang's function of this name.

    accept_token_num counts accepted drafts without the bonus; accept_index [b, k+1] holds flat node indices.
    """
    for b in range(candidates.shape[0]):
        node, accepted = 0, 0
        accept_index[b, 0] = retrieve_index[b, 0]
        while True:
            choice = int(target_predict[b, node])
            predicts[int(retrieve_index[b, node])] = choice
            child = int(retrieve_next_token[b, node])
            while child != -1 and int(candidates[b, child]) != choice:
                child = int(retrieve_next_sibling[b, child])
            if child == -1 or accepted + 1 >= accept_index.shape[1]:
                break
            accepted += 1
            accept_index[b, accepted] = retrieve_index[b, child]
            node = child
        accept_token_num[b] = accepted
    return predicts, accept_index, accept_token_num
'''
SOURCES['cpu'] = r'''
"""What has no CPU build: each function below changes one module of SGLang, once that is imported."""

from __future__ import annotations

import inspect
from typing import Any, Callable

import torch
from repro_cpu_tree import build_tree
from repro_cpu_sampling import renorm_top_k
from repro_cpu_sampling import renorm_top_p
from repro_cpu_tree import verify_greedy
from repro_cpu_sampling import verify_sampled




class Cpu:
    def _note(self, *_what: str) -> None:
        pass

    def _patch_batch_invariant(self, module: types.ModuleType, argument: str) -> None:
        setattr(module, argument, lambda: None)
        what, why = f"{module.__name__}.{argument}", "wants an accelerator; asked for only where seeds decide"
        self._note(what, "no-op", "none", why)

    def _patch_cuda_noop(self, module: types.ModuleType, argument: str) -> None:
        for name in argument.split(","):
            setattr(torch.cuda, name, lambda *_a, **_k: None)
            self._note(f"torch.cuda.{name} (for {module.__name__})", "no-op", "none", "called without a device check")

    def _patch_flag(self, module: types.ModuleType, argument: str) -> None:
        name, subject = argument.split("=")
        setattr(module, name, True)
        self._note(f"{module.__name__}.{name}", "flag", subject, "selects SGLang's own Triton kernel, interpreted")

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


KERNELS: dict[str, dict[str, Callable[..., Any]]] = {'sampling': {'tree_speculative_sampling_target_only': verify_sampled, 'top_k_renorm_prob': renorm_top_k, 'top_p_renorm_prob': renorm_top_p}, 'tree': {'sgl_build_tree_kernel_efficient': build_tree}, 'verify': {'verify_tree_greedy_func': verify_greedy}}


def patch(module: Any, what: str, argument: str) -> None:
    for name, kernel in KERNELS.get(what, {}).items():
        setattr(module, name, kernel)
    if what not in KERNELS:
        getattr(Cpu(), f"_patch_{what}")(module, argument)
'''

if "REPRO" in os.environ:
    install()


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("serve", nargs="?", type=Path, help=argparse.SUPPRESS)  # an engine's own process
    if serving := words.parse_args().serve:
        serve(serving)
    else:
        sys.exit(main())
