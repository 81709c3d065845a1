"""What the reference says it takes is at least what it had, and not many times as much, by the profiler."""

import dataclasses
import json

import pytest
import torch

from benchmarks.make_real_size import SHAPES, make
from cases.meta.published import SMALL_SHAPE, make_target, peak_of
from cases.meta.speculating import FreeSession
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.settings import SpecConfig
from harness.driving.checkpoint_files import read_checkpoint
from harness.driving.footprint import footprint
from reference.pairs import load_pair


@pytest.mark.parametrize(
    ("name", "prompt", "new", "vocab"),
    [("llama-1b", 40, 24, 4000), ("llama-8b", 900, 8, 4000), ("qwen3-4b", 30, 30, 16000)],
)
def test_what_is_said_is_kept_and_is_not_many_times_too_much(tmp_path, name, prompt, new, vocab):
    shape = dataclasses.replace(SHAPES[name], vocab=vocab, **SMALL_SHAPE)
    pair = make(name, tmp_path, seed=1, device="cpu", plain=True, shape=shape)
    spec = SpecConfig(algorithm="EAGLE3" if shape.eagle3 else "EAGLE")
    request = RequestSpec(rid="a", input_ids=tuple(range(2, 2 + prompt)), max_new_tokens=new)
    files = [read_checkpoint("--target", pair / part) for part in ("target", "draft")]
    scenario = Scenario(
        name="x",
        checkpoint="x",
        spec=spec,
        requests=(request,),
        script=({"kind": "submit", "rids": ["a"]}, {"kind": "drain"}),
    )
    said = footprint(*files, [scenario], held="bfloat16")

    target, head = load_pair(pair / "target", pair / "draft", torch.float32, held=torch.bfloat16)
    session = FreeSession(target, head, spec)
    peak = peak_of(lambda: session.replay(scenario, session.speculate(request))) + said.weights / 2**20
    assert peak <= said.mib
    assert said.mib <= 2.5 * peak


def test_states_of_recurrent_layers_are_in_what_is_said(tmp_path):
    """A matrix a head behind every row of a text, while a layer runs: of a published model 2 MiB a row."""
    raw = make_target("qwen3_next", 1, tmp_path).config.to_dict() | {"architectures": ["Qwen3NextForCausalLM"]}
    said = []
    for heads in (raw["linear_num_value_heads"], 32):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"linear_num_value_heads": heads}))
        files = read_checkpoint("--target", tmp_path)
        request = RequestSpec(rid="a", input_ids=tuple(range(2, 402)), max_new_tokens=8)
        script = ({"kind": "submit", "rids": ["a"]}, {"kind": "drain"})
        scenario = Scenario(name="x", checkpoint="x", requests=(request,), script=script)
        said.append(footprint(files, files, [scenario], held="bfloat16").work)
    state = raw["linear_key_head_dim"] * raw["linear_value_head_dim"] * 4
    assert said[1] - said[0] >= 2 * 400 * (32 - raw["linear_num_value_heads"]) * state
