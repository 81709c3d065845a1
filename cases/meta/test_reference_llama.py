"""Files of Llama-like targets: which layouts are read, what is refused. test_reference_architectures compares them."""

import json

import pytest
import torch

from cases.meta.published import VOCAB, make_target, tokens_of
from reference.checkpoint import CheckpointError, Weights
from reference.pairs import load_target

DOUBLE = torch.float64


@torch.no_grad()
def test_sharded_files_and_torch_files_hold_the_same(tmp_path):
    hf, tokens = make_target("qwen2", 3, tmp_path / "one"), tokens_of(20, VOCAB, seed=3)
    plain = load_target(tmp_path / "one", DOUBLE).forward(tokens)
    config = (tmp_path / "one" / "config.json").read_text()
    for name in ("sharded", "bin", "bins"):
        (tmp_path / name).mkdir()
    hf.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    tensors = {name: tensor.contiguous() for name, tensor in hf.state_dict().items()}
    torch.save(tensors, tmp_path / "bin" / "pytorch_model.bin")
    files = {name: f"pytorch_model-{i % 3}.bin" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        torch.save({name: tensors[name] for name in files if files[name] == file}, tmp_path / "bins" / file)
    (tmp_path / "bins" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    (tmp_path / "sharded" / "consolidated.safetensors").write_bytes(b"another format's, and not in the index")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    for name in ("sharded", "bin", "bins"):
        (tmp_path / name / "config.json").write_text(config)
        assert torch.equal(load_target(tmp_path / name, DOUBLE).forward(tokens), plain), name
    (tmp_path / "bins" / "pytorch_model-1.bin").unlink()
    with pytest.raises(CheckpointError, match=r"names pytorch_model-1\.bin, which is not there"):
        load_target(tmp_path / "bins")


def test_a_tensor_that_nobody_reads_is_refused_and_code_in_a_torch_file_does_not_run(tmp_path):
    hf = make_target("llama", 1, tmp_path)
    hf.register_parameter("stray", torch.nn.Parameter(torch.zeros(3)))
    raw = (tmp_path / "config.json").read_text()
    hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(raw)
    with pytest.raises(CheckpointError, match="nothing reads tensor 'stray'"):
        load_target(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    torch.save({"model.norm.weight": print}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: damaged"):
        Weights(tmp_path, DOUBLE)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"rope_parameters": None, "rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ("llama", {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}}, "'yarn' and 'linear'"),
        ("llama", {"sliding_window": 8}, "sliding_window is 8"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; this reference builds only 'silu'"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is {'quant_method': 'fp8'}"),
        ("qwen3", {"layer_types": ["full_attention"]}, r"layer_types is \['full_attention'\]"),
        ("qwen2", {"num_attention_heads": None}, "has no 'num_attention_heads'"),
        ("mistral", {"sliding_window": 8, "softcap": 3.0}, r"softcap is 3\.0; this reference does not know"),
    ],
)
def test_what_is_not_built_or_not_known_is_refused_by_its_key(family, changes, words, tmp_path):
    make_target(family, 1, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    if "rope_scaling" in changes:
        raw.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(CheckpointError, match=words) as caught:
        load_target(tmp_path, provider="paper")
    assert str(tmp_path / "config.json") in str(caught.value)
