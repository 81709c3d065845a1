"""What a sparse indexer chose: recorded beside a stand-in for SGLang's class, and judged on a choice of our own."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks import indexer as bench
from harness.engine_side.hooks import ImportHooks
from harness.engine_side.probes import index_probe
from reference.pairs import load_pair

MOST = 64


class Mode(SimpleNamespace):
    def is_extend_without_speculative(self):
        return self.name == "EXTEND"


@pytest.mark.parametrize("fused", ["0", "1"])
@pytest.mark.parametrize("mode", ["EXTEND", "TARGET_VERIFY"])
def test_positions_that_are_not_chosen_are_recorded_and_places_that_are_none(tmp_path, monkeypatch, fused, mode):
    """Two requests with two rows each, at positions 2 and 3; each leaves one out, and the last has one place twice."""
    monkeypatch.setenv(index_probe.FUSED, fused)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    slots = torch.tensor([[0, 0, 0, 0], [7, 5, 6, 9], [1, 2, 3, 4]])
    chosen = torch.tensor([[0, 2, -1], [3, 1, 0], [1, 2, 3], [3, 3, 0]])

    class Indexer:
        wq_b = SimpleNamespace(weight=torch.full((2, 2), 0.5))

        def forward_cuda(self, x, q_lora, positions, forward_batch, layer_id):
            place = torch.tensor([1, 1, 2, 2])
            taken = slots[place[:, None], chosen.clamp(min=0)] if fused == "1" else chosen
            return torch.where(chosen < 0, -1, taken)

    class ReqToTokenPool:
        def __init__(self):
            self.req_to_token = slots

    pools, module = ModuleType(index_probe.POOL), ModuleType(index_probe.MODULE)
    pools.ReqToTokenPool, module.Indexer = ReqToTokenPool, Indexer
    monkeypatch.setitem(sys.modules, index_probe.POOL, pools)
    monkeypatch.setitem(sys.modules, index_probe.MODULE, module)
    index_probe.IndexProbe(ImportHooks(), tmp_path)
    pools.ReqToTokenPool()
    batch = SimpleNamespace(
        forward_mode=Mode(name=mode),
        req_pool_indices=torch.tensor([1, 2]),
        extend_seq_lens_cpu=[2, 2],
        input_ids=torch.arange(4),
    )
    module.Indexer().forward_cuda(None, None, torch.tensor([2, 3, 2, 3]), batch, layer_id=0)
    (line,) = [json.loads(one) for file in tmp_path.iterdir() for one in file.read_text().splitlines()]
    assert (line["queries"], line["mode"], line["tokens"]) == (2.0, mode, [0, 1, 2, 3])
    assert line["left"] == [[1], [2], [0], [1, 2]]
    assert line["wrong"] == [0, 0, 1, 1]  # 3 is behind the third row, and the fourth has it twice


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A target, a text, and the lines of what its layers choose in FP8."""
    root = tmp_path_factory.mktemp("indexer")
    target, head = load_pair(*[bench.written(root / "target", MOST, shared=False)] * 2, torch.float32)
    text = torch.randint(0, 500, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    lines = []

    class Noting:
        def choose(self, router, values, chosen):
            indexers = [one.indexer for one in bench.sparse_layers(target, head)]
            layer, rows = indexers.index(router), len(values)
            kept = torch.zeros(rows, rows, dtype=torch.bool).scatter_(1, chosen, True)
            first = int(layer == len(indexers) - 1)
            for chunk, asked in ((range(20), False), (range(20, rows), True)):  # of the first one nothing is chosen
                lines.append(
                    {
                        "queries": float(router.queries.double().sum()),
                        "mode": "EXTEND",
                        "tokens": [text[row + first] for row in chunk],
                        "positions": list(chunk),
                        "left": [(~kept[row, : row + 1]).nonzero()[:, 0].tolist() for row in chunk if asked],
                        "wrong": [0 for row in chunk if asked],
                    }
                )
            return chosen

    with bench.in_fp8(target, head):
        bench.run(target, head, text, Noting())
    return root, text, lines


def judged(recorded, lines):
    root, text, _ = recorded
    (root / "chosen-1.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return bench.said(root / "target", [text], MOST)


def test_a_choice_in_fp8_is_ours_and_that_of_the_row_before_is_not(recorded, capsys):
    assert judged(recorded, recorded[2]) == 0
    assert capsys.readouterr().out.count("69 rows, 25 of them above 64; 0 wrong") == 4


def test_a_best_row_left_out_and_a_row_too_few_are_found(recorded, capsys):
    left = [list(one) for one in recorded[2][3]["left"]]
    worst, taken = left[60][0], next(row for row in range(20) if row not in left[60])
    left[60] = sorted([*left[60][1:], taken])
    left[10] = [4]
    lines = [*recorded[2][:3], recorded[2][3] | {"left": left}, *recorded[2][4:]]
    found = judged(recorded, lines)
    said = capsys.readouterr().out
    assert "row 30: 30 of 31 rows" in said
    assert found == 1
    assert worst != taken


def test_nothing_recorded_is_no_verdict(recorded):
    assert judged(recorded, []) == 3
