"""The trained pair and the code that trained it: kept whole, read as Hugging Face reads it, and good at drafting."""

import hashlib
import json
import shutil
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from cases import trained_weights
from cases.meta.speculating import FreeSession
from cases.pairs import RECIPES
from cases.recipes import Noise
from cases.trained_weights import TrainedEagle3Recipe
from cases.training.model import Head, Target
from cases.training.train import chain_loss, save
from harness.contract.requests import RequestSpec
from harness.contract.settings import SpecConfig
from reference import pairs
from reference.attention import Sight

NAMES = ("trained-eagle1", "trained-eagle3")
KINDS = pytest.mark.parametrize("three", [False, True], ids=["eagle1", "eagle3"])
SMALL = TrainedEagle3Recipe(
    name="small",
    vocab=40,
    hidden=32,
    intermediate=48,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=8,
    aux_layers=(0, 1, 2),
    draft_vocab=16,
)
#: Not of the standard library, and none of the snippets of the suite.
HELD_OUT = '''class Shelf:
    """Boxes in the order in which they were put there."""

    def __init__(self, boxes=()):
        self._boxes = list(boxes)

    def put(self, box):
        """Add a box at the end."""
        if box is None:
            raise ValueError("no box")
        self._boxes.append(box)

'''


@pytest.fixture(scope="module", params=NAMES)
def pair(request, made_pair):
    return made_pair(request.param)


def digests(root):
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in root.glob("*/*")
    }


def test_the_kept_files_are_those_of_the_manifest():
    manifest = json.loads((trained_weights.FOLDER / trained_weights.MANIFEST).read_text())
    assert manifest["files"] == digests(trained_weights.FOLDER)
    assert sum(path.stat().st_size for path in trained_weights.FOLDER.rglob("*") if path.is_file()) < 12e6


def test_a_pair_is_the_kept_files_byte_for_byte(pair):
    kept = digests(trained_weights.FOLDER)
    head = RECIPES[pair.name].head
    assert digests(pair.root) == {
        name.replace(head, "draft"): one for name, one in kept.items() if name.startswith(("target/", f"{head}/"))
    }


def test_the_recipe_says_what_lies_there(pair):
    recipe = RECIPES[pair.name]
    for folder, layers in ((pair.target, recipe.layers), (pair.draft, 1)):
        config = json.loads((folder / "config.json").read_text())
        assert config["num_hidden_layers"] == layers
        assert (config["vocab_size"], config["hidden_size"]) == (recipe.vocab, recipe.hidden)
        assert (config["num_attention_heads"], config["num_key_value_heads"]) == (recipe.heads, recipe.kv_heads)
        assert (config["head_dim"], config["intermediate_size"]) == (recipe.head_dim, recipe.intermediate)
        assert (config["max_position_embeddings"], config["rope_theta"]) == (recipe.max_position, recipe.rope_theta)
    if recipe.algorithm == "EAGLE3":
        assert config["draft_vocab_size"] == recipe.draft_vocab
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(recipe.aux_layers)


def test_a_damaged_file_is_refused(tmp_path):
    folder = tmp_path / "trained"
    shutil.copytree(trained_weights.FOLDER, folder)
    file = folder / "eagle3" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    recipe = RECIPES["trained-eagle3"]
    with pytest.raises(trained_weights.TrainedPairError, match=r"eagle3/model\.safetensors is damaged: sha256"):
        trained_weights.pair(Noise(0), recipe, folder=folder)
    assert trained_weights.pair(Noise(0), RECIPES["trained-eagle1"], folder=folder).draft


def test_the_target_is_read_as_hugging_face_reads_it(pair):
    tokens = torch.tensor(list(HELD_OUT.encode()))[:200]
    assert len(tokens) == 200
    hf = AutoModelForCausalLM.from_pretrained(pair.target, attn_implementation="eager", dtype=torch.float32)
    target = pairs.load_target(pair.target)
    with torch.no_grad():
        theirs = hf(tokens[None], output_hidden_states=True)
    mine = target.hidden_states(tokens)
    for state, other in zip(mine, theirs.hidden_states, strict=True):
        assert torch.allclose(state, other[0], rtol=1e-5, atol=1e-4)
    assert torch.allclose(target.logits(mine[-1]), theirs.logits[0], rtol=0, atol=1e-4)


@torch.inference_mode()
def test_each_draft_step_agrees_often_on_text_that_was_not_trained_on(pair):
    target, head = pairs.load_pair(pair.target, pair.draft)
    spec = SpecConfig(algorithm=head.algorithm, num_steps=4, eagle_topk=1, num_draft_tokens=5)
    session, lengths = FreeSession(target, head, spec), Counter()
    for cut in (60, 200, len(HELD_OUT)):
        request = RequestSpec(rid="a", input_ids=tuple(HELD_OUT[:cut].encode()), max_new_tokens=96)
        # The last round is cut short by max_new_tokens.
        rounds = [record for record in session.speculate(request).rounds if record.mode == "DECODE"][:-1]
        lengths.update(record.lens[0] for record in rounds)
    reached = [sum(count for length, count in lengths.items() if length > step) for step in range(5)]
    rates = [after / before for before, after in pairwise(reached)]
    assert min(rates) > 0.6, (rates, lengths)


def small(three):
    """A target and a head of random weights, rounded to what is kept, and a text int64 [2,13]."""
    torch.manual_seed(5)
    target = Target(SMALL)
    ids = torch.arange(0, SMALL.vocab, 2)[: SMALL.draft_vocab]
    head = Head(SMALL, three=three, ids=ids)
    for parameter in [*target.parameters(), *head.parameters()]:
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)  # norms of one would hide one that is left out
        else:
            torch.nn.init.normal_(parameter, std=0.15)
        parameter.data = parameter.data.half().float()
    return target, head, torch.randint(SMALL.vocab, (2, 13))


def unrolled(head, target, tokens, steps):
    """g of each of `steps` steps over all rows at once, as the training does it: [B,T,h] each."""
    _, states = target(tokens)
    embedded = F.embedding(tokens[:, 1:], target.embed.weight)
    hidden, cache, found = head.start([state[:, :-1] for state in states]), [], []
    for _ in range(steps):
        found.append(head.step(embedded, hidden, cache))
        hidden = F.pad(found[-1], (0, 0, 1, 0))[:, :-1]
    return embedded, head.start([state[:, :-1] for state in states]), found


@KINDS
@torch.no_grad()
def test_an_unrolled_training_step_is_a_plain_causal_run_of_the_same_chain(three):
    target, head, tokens = small(three)
    embedded, start, found = unrolled(head, target, tokens, 4)
    for step, together in enumerate(found):
        for row in range(step, together.shape[1]):
            hidden = start[:, : row + 1 - step]
            for _ in range(step + 1):  # one causal run for each token of the chain, without a cache
                alone = head.step(embedded[:, : hidden.shape[1]], hidden, [])[:, -1:]
                hidden = torch.cat((hidden, alone), dim=1)
            assert torch.allclose(together[:, row], alone[:, 0], rtol=1e-5, atol=1e-5), (step, row)


@KINDS
@torch.no_grad()
def test_the_reference_reads_what_training_writes_as_training_computed_it(three, tmp_path):
    heads = {kind: small(kind) for kind in (False, True)}  # of the same seed, so of the same target
    target, head, tokens = heads[three]
    save(tmp_path, target, heads[True][1], heads[False][1])
    read, draft = pairs.load_pair(tmp_path / "target", tmp_path / ("eagle3" if three else "eagle1"))
    logits, _ = target(tokens)
    states = read.hidden_states(tokens[0])
    assert torch.allclose(read.logits(states[-1]), logits[0], rtol=1e-4, atol=1e-4)
    _, _, (g, *_) = unrolled(head, target, tokens, 1)
    rows = tokens.shape[1] - 1
    mine = draft.forward(
        tokens[0, 1:], draft.enter(draft.features(states)[:rows]), torch.arange(rows), Sight.causal(rows)
    )[0]
    assert torch.allclose(mine, g[0], rtol=1e-4, atol=1e-4)
    assert torch.allclose(draft.logits(mine)[:, head.ids], head.logits(g, target)[0], rtol=1e-4, atol=1e-4)


@KINDS
def test_the_loss_of_all_steps_teaches_every_weight_of_the_head_and_none_of_the_target(three):
    target, head, tokens = small(three)
    target.requires_grad_(False)
    logits, states = target(tokens)
    loss, hits = chain_loss(head, target, tokens, logits, states, chain=3)
    torch.autograd.backward(loss)
    assert torch.isfinite(loss)
    assert len(hits) == 3
    assert all(0 <= one <= 1 for one in hits)
    assert all(parameter.grad.abs().max() > 0 for parameter in head.parameters())
