"""What stands in for DeepGEMM where a sparse attention indexer is driven without it."""

import importlib.util
import sys

import pytest
import torch

from harness.engine_side.replacement_kernels import index_scores
from harness.engine_side.replacement_kernels.index_scores import (
    PACKAGE,
    IndexScores,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
)

HEADS, WIDTH, PAGE = 3, 16, 64
INF = float("inf")
FILES = ("__init__.py", "include/deep_gemm/common.cuh")


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_score_is_the_sum_over_heads_of_a_weight_times_relu_and_the_keys_scale():
    q, k = (drawn(*shape).to(torch.float8_e4m3fn) for shape in ((2, HEADS, WIDTH), (5, WIDTH)))
    scales, weights = drawn(5).abs(), drawn(2, HEADS)
    starts, ends = torch.tensor([0, 1]), torch.tensor([3, 5])
    found = fp8_mqa_logits(q, (k, scales), weights, starts, ends, clean_logits=False)
    assert (found.shape, found.stride()) == ((2, 5), (64, 1))
    for row in range(2):
        for key in range(5):
            products = [max(0.0, float(q[row, one].float() @ k[key].float())) for one in range(HEADS)]
            score = float(scales[key]) * sum(float(weights[row, one]) * products[one] for one in range(HEADS))
            wanted = score if starts[row] <= key < ends[row] else -INF
            assert found[row, key] == -INF if wanted == -INF else abs(found[row, key] - wanted) < 1e-4


def test_pages_hold_what_a_row_of_keys_does():
    """Two requests with two queries each, the keys of one request on pages 3 and 1, of the other on page 2."""
    keys, scales = drawn(4, PAGE, WIDTH).to(torch.float8_e4m3fn), drawn(4, PAGE).abs()
    parts = (keys.view(torch.uint8).reshape(4, -1), scales.view(torch.uint8).reshape(4, -1))
    cache = torch.cat(parts, dim=1).reshape(4, PAGE, 1, WIDTH + 4)
    table, lengths = torch.tensor([[3, 1, -1], [2, 1 << 30, 4]]), torch.tensor([[69, 70], [4, 5]])
    q, weights = drawn(2, 2, HEADS, WIDTH).to(torch.float8_e4m3fn), drawn(4, HEADS)
    found = fp8_paged_mqa_logits(q, cache, weights, lengths, table, torch.zeros(0), 80)
    for number, pages in enumerate(((3, 1), (2,))):
        for each in range(2):
            row, end = 2 * number + each, lengths[number, each : each + 1]
            of = (torch.cat([keys[page] for page in pages]), torch.cat([scales[page] for page in pages]))
            plain = fp8_mqa_logits(q[number, each : each + 1], of, weights[row : row + 1], torch.tensor([0]), end)
            assert torch.allclose(found[row, : int(end)], plain[0, : int(end)], rtol=1e-5, atol=1e-5)
            assert (found[row, int(end) :] == -INF).all()


def test_one_length_holds_for_all_queries_of_a_request():
    keys = torch.zeros(1, PAGE, 1, WIDTH + 4, dtype=torch.uint8)
    q = torch.zeros(1, 3, HEADS, WIDTH).to(torch.float8_e4m3fn)
    found = fp8_paged_mqa_logits(
        q, keys, torch.ones(3, HEADS), torch.tensor([[7]]), torch.tensor([[0]]), torch.zeros(0), 64
    )
    assert ((found == 0).sum(dim=1) == 7).all()


@pytest.mark.parametrize(
    ("files", "stands_in"),
    [((), True), (FILES[:1], True), (FILES, True), ((*FILES, "cuda/bin/nvcc"), False)],
    ids=["not-there", "without-headers", "without-a-compiler", "whole"],
)
def test_it_stands_in_for_a_package_that_is_not_whole_and_says_so(files, stands_in, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    if not files:  # nor in the environment of these tests
        monkeypatch.setattr(sys, "path", [str(tmp_path), *(one for one in sys.path if "site-packages" not in one)])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / PACKAGE / "cuda"))
    monkeypatch.setattr(index_scores, "CUDA", str(tmp_path))
    monkeypatch.setattr(index_scores.shutil, "which", lambda name: None)
    for name in files:
        (tmp_path / PACKAGE / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / PACKAGE / name).write_text("")
    scores = IndexScores()
    assert importlib.util.find_spec(PACKAGE) is not None
    assert {one["subject"] for one in scores.describe()} == ({"index scores"} if stands_in else set())
    assert (PACKAGE in sys.modules) == stands_in
    if stands_in:
        assert sys.modules[PACKAGE].fp8_mqa_logits is fp8_mqa_logits
        monkeypatch.delitem(sys.modules, PACKAGE)
