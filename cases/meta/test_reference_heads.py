"""EAGLE and EAGLE-3 heads in every published variant against Hugging Face's layers, and what is refused of them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases.meta.files import edit_json
from cases.meta.published import VOCAB
from cases.meta.published_eagle import HEADS
from reference.checkpoint import CheckpointError
from reference.pairs import load_pair

DOUBLE = torch.float64
CLOSE = 1e-4
LENGTH = 50


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("kind", HEADS)
def test_a_published_head_says_what_hf_layers_say(kind, seed, tmp_path):
    made = HEADS[kind](seed, tmp_path)
    target, head = load_pair(made.target, made.draft, DOUBLE)
    assert head.algorithm == {"eagle1": "EAGLE", "eagle3": "EAGLE3"}[kind]
    tokens = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed))
    for mine, theirs in made.beside(head, tokens):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=CLOSE)
    if made.ids is not None:
        states = target.read(tokens, keep=head.states).states
        g = head.enter(head.features(states))
        proposable = torch.isfinite(head.logits(g)).all(0).nonzero().flatten()
        assert torch.equal(proposable, made.ids)


def changed(folder, *, raw=(), drop=(), add=()):
    """A draft folder with other keys and tensors."""
    edit_json(folder / "config.json", **dict(raw))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(tuple(drop))} if drop else tensors
    save_file(kept | dict(add), folder / "model.safetensors")


def as_safetensors(folder):
    if (folder / "pytorch_model.bin").exists():
        save_file(torch.load(folder / "pytorch_model.bin"), folder / "model.safetensors")
        (folder / "pytorch_model.bin").unlink()


def test_an_embedding_that_is_not_the_targets_is_said_and_one_rounded_to_another_dtype_is_a_copy(tmp_path):
    made = HEADS["eagle1"](0, tmp_path)
    as_safetensors(made.draft)
    embed = made.hf.get_input_embeddings().weight.detach()
    prefix = "model." if "model.fc.weight" in load_file(made.draft / "model.safetensors") else ""
    for own, notes in ((embed.to(torch.bfloat16), 0), (embed + 0.5, 1)):
        changed(made.draft, add={f"{prefix}embed_tokens.weight": own.contiguous()})
        _, head = load_pair(made.target, made.draft, DOUBLE)
        assert len(head.notes) == notes
        assert (head.embedding is None) == (notes == 0)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("eagle1", {"raw": {"eagle_config": {"x": 1}}}, "eagle_config is"),
        ("eagle1", {"raw": {"attention_bias": True}, "drop": ["proj.bias"]}, "attention_bias is true, and there is no"),
        ("eagle1", {"add": {"layers.0.self_attn.g_proj.weight": torch.zeros(2, 2)}}, "nothing reads tensor"),
        ("eagle1", {"add": {"lm_head.weight": torch.zeros(VOCAB, 32)}}, "'lm_head.weight' is not the target's"),
        ("eagle3", {"add": {"fc_norm.7.weight": torch.zeros(32)}}, r"nothing reads tensor 'fc_norm\.7"),
        ("eagle3", {"raw": {"eagle_config": {"use_aux_hidden_state": False}}}, "use_aux_hidden_state is False"),
        ("eagle3", {"raw": {"eagle_config": {"surprise": 3}}}, r"eagle_config\.surprise is 3"),
        ("eagle3", {"raw": {"architectures": ["GemmaEagle3"]}}, "GemmaEagle3"),
        ("eagle3", {"raw": {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic"}}}, "rope_type is 'dynamic'"),
    ],
)
def test_a_head_that_asks_for_more_is_refused_by_name(kind, change, words, tmp_path):
    made = HEADS[kind](1, tmp_path)
    as_safetensors(made.draft)
    if "rope_scaling" in change.get("raw", {}):
        change["raw"]["rope_parameters"] = None
    changed(made.draft, **change)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_pair(made.target, made.draft)
    assert str(made.draft) in str(caught.value)
