"""0.5.11 hands a grammar tensors, which the xgrammar that it pins takes for numbers and a newer one does not."""

from types import SimpleNamespace

import torch

from harness.engine_side.hooks import ImportHooks
from harness.engine_side.replacement_kernels.cpu_ops import CpuOps


def of_tensors(after, beside, draft_tokens, grammar, mask, vocab_size=None):
    for curr in after:
        grammar.accept_token(draft_tokens[curr])
        grammar.fill_vocab_mask(mask, curr)
    return grammar.is_terminated()


def of_numbers(after, beside, draft_tokens, grammar, mask, vocab_size=None):
    for curr in after:
        grammar.accept_token(int(draft_tokens[curr]))


class Grammar:
    """As of xgrammar 0.2.8: a number is a number."""

    def __init__(self):
        self.seen = []

    def accept_token(self, token):
        assert type(token) is int
        self.seen.append(token)

    def fill_vocab_mask(self, mask, node):
        assert type(node) is int
        mask[node] = 1

    def is_terminated(self):
        return True


def patched(traverse):
    """(the module's function, what the header says) once it is imported."""
    ops, module = CpuOps(ImportHooks()), SimpleNamespace(__name__="srt.spec_utils", traverse_tree=traverse)
    ops._apply("token_numbers", "traverse_tree", "torch")(module)
    return module.traverse_tree, ops.describe()


def test_a_grammar_is_handed_numbers_and_the_header_names_who_makes_them():
    traverse, (entry,) = patched(of_tensors)
    grammar, mask = Grammar(), torch.zeros(3)
    assert traverse(torch.tensor([0, 2]), None, torch.tensor([5, 6, 7]), grammar, mask, vocab_size=9)
    assert grammar.seen == [5, 7]
    assert mask.tolist() == [1, 0, 1]
    assert (entry["operation"], entry["by"]) == ("srt.spec_utils.traverse_tree", "remap")


def test_a_release_that_makes_them_itself_is_left_alone():
    assert patched(of_numbers) == (of_numbers, [])
