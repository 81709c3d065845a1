"""What mutants change is what they say, on copies only."""

import pytest
import torch

from harness.engine_side.mutants import armed  # noqa: F401  (makes every act known)
from harness.engine_side.mutants.acts_verify import _line
from harness.engine_side.mutants.registry import ACTS, Context, Share

# Two requests: "a" with rows 0..2, "b" with rows 3..4 (half read), both after a retraction of "b".
SHARES = [Share("a", 0, 3, 10), Share("b", 3, 2, 20, False, 1)]
ALONE = [Share("a", 0, 1)]


def context(memory=None, shares=SHARES, step=0, batch=0, **args):
    return Context(args=args, memory={} if memory is None else memory, shares=shares, step=step, batch=batch)


def ran(name, values, at=None):
    """The values an act leaves, with those it was given unharmed."""
    given = {key: torch.as_tensor(value) for key, value in values.items()}
    before = {key: value.clone() for key, value in given.items()}
    made = ACTS[name](at or context(), given)
    assert all(torch.equal(given[key], before[key]) for key in before), f"{name} wrote into what it was given"
    return {key: value.tolist() for key, value in made.items()}


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("add", {"by": 1}, [2, 3, 4, 5, 6]),
        ("add", {"by": -1, "at": "inner"}, [1, 1, 2, 4, 4]),
        ("add", {"by": 9, "at": "last-request"}, [1, 2, 3, 4, 14]),
        ("add", {"by": 9, "at": "last-request", "shares": SHARES[:1]}, [1, 2, 3, 4, 5]),  # nobody, in a batch of one
        ("zero", {"at": "last"}, [1, 2, 0, 4, 0]),
        ("zero", {"at": "border"}, [1, 2, 3, 4, 0]),
        ("zero", {"at": "retracted"}, [1, 2, 3, 4, 0]),
        ("previous_row", {}, [1, 1, 2, 4, 4]),
        ("previous_row", {"at": "last"}, [1, 2, 2, 4, 4]),
        ("next_row", {}, [2, 3, 3, 5, 5]),
        ("first_row", {}, [1, 1, 1, 4, 4]),
        ("neighbour", {}, [4, 5, 5, 1, 2]),
        ("neighbour", {"at": "last"}, [1, 2, 5, 4, 3]),
        ("restart", {}, [-9, -8, -7, -16, -15]),
    ],
)
def test_acts_on_rows(name, args, expected):
    assert ran(name, {"ids": [1, 2, 3, 4, 5]}, context(field="ids", **args)) == {"ids": expected}


#      0
#     / \
#    1   2
#    |   |
#    3   4
TREE = {"next_token": [[1, 3, 4, -1, -1]], "next_sibling": [[-1, 2, -1, -1, -1]]}
#: A chain of four nodes a request; a accepted one draft, b none.
WALK = {
    "predict": [11, 12, 0, 0, 21, 0, 0, 0],
    "accept_index": [[0, 1, -1, -1], [4, -1, -1, -1]],
    "drafts": [1, 0],
    "next_token": [[1, 2, 3, -1], [1, 2, 3, -1]],
    "target": [[11, 12, 13, 14], [21, 22, 23, 24]],
}
SAMPLED = {"nodes": [[0.5], [0.25]], "final": [0.125, 1.0], "distribution": [[[0.75, 0.25], [0.5, 0.5]]]}
FEATURES = {"hidden": [[1, 2, 3, 4, 5, 6]]}
MAP = {"map": [0, 2, 5, 9]}


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("features_rolled", FEATURES, {"hidden": [[5, 6, 1, 2, 3, 4]]}),
        ("feature_repeated", FEATURES, {"hidden": [[1, 2, 3, 4, 3, 4]]}),
        ("feature_missing", FEATURES, {"hidden": [[1, 2, 3, 4]]}),
        ("one_feature", FEATURES, {"hidden": [[5, 6]]}),
        ("narrow", FEATURES, {"hidden": [[1, 2]]}),
        ("map_twice", MAP, {"map": [0, 3, 8, 9]}),  # offsets 0, 1, 3, 6 twice, as far as the largest id
        ("map_left_out", MAP, {"map": [0, 1, 2, 3]}),
        ("ascending", {"rows": [2, 0, 3]}, {"rows": [0, 2, 3]}),
        ("from_the_front", {"rows": [2, 0, 3]}, {"rows": [0, 1, 2]}),
        ("of_target", {"own": [1], "target": [2]}, {"own": [2]}),
        ("layers_exchanged", {"ids": [[1, 2, 3], [4, 5, 6]]}, {"ids": [[2, 1, 3], [5, 4, 6]]}),
        ("lose_sibling", TREE, {"next_sibling": [[-1] * 5]}),
        (  # only where both were kept
            "swap_parents",
            {"parents": [[-1, 0, 1], [-1, 0, 1]], "selected": [[0, 1, 2], [0, 2, 3]]},
            {"parents": [[-1, 1, 0], [-1, 0, 1]]},
        ),
        (
            "one_more",
            WALK,
            {
                "accept_index": [[0, 1, 2, -1], [4, 5, -1, -1]],
                "drafts": [2, 1],
                "predict": [11, 12, 13, 0, 21, 22, 0, 0],
            },
        ),
        (  # and never the root
            "one_less",
            WALK,
            {"accept_index": [[0, -1, -1, -1], [4, -1, -1, -1]], "drafts": [0, 0], "predict": WALK["predict"]},
        ),
        (
            "neighbour_length",
            WALK,
            {
                "accept_index": [[0, -1, -1, -1], [4, 5, -1, -1]],
                "drafts": [0, 1],
                "predict": [11, 12, 0, 0, 21, 22, 0, 0],
            },
        ),
        ("bonus_from_root", WALK, {"predict": [11, 11, 0, 0, 21, 0, 0, 0]}),
        ("bonus_of_neighbour", WALK, {"predict": [11, 21, 0, 0, 12, 0, 0, 0]}),
        ("uniforms_halved", SAMPLED, {"nodes": [[0.25], [0.125]]}),
        ("final_mirrored", SAMPLED, {"final": [0.875, 0.0]}),
        ("distribution_of_root", SAMPLED, {"distribution": [[[0.75, 0.25], [0.75, 0.25]]]}),
        ("guess_of_the_target", {"ids": [5, 6], "guess": [9]}, {"ids": [9, 6]}),
        ("row_of_another", {"row": [0], "full": [1, 0, 1]}, {"row": [2]}),
        ("row_of_another", {"row": [0], "full": [1, 0, 0]}, {}),
        ("page_left_behind", {"0": [[1], [2], [3]]}, {"0": [[1], [0], [3]]}),
    ],
)
def test_acts_on_the_values_of_a_site(name, values, expected):
    assert ran(name, values, context(field="hidden", parts=3)) == expected


@pytest.mark.parametrize(
    ("name", "args", "values", "expected"),
    [
        ("become", {"field": "ids", "value": -1}, {"ids": [3, 4]}, {"ids": [-1, -1]}),
        ("become", {"field": "loads", "value": False}, {"loads": [True]}, {"loads": [False]}),
        ("become", {"field": "loads", "value": False, "of": "draft"}, {"loads": [True], "draft": [False]}, {}),
        ("become", {"field": "top_ps", "value": 1.0}, {}, {}),
        ("moved", {"field": "limit", "by": -1}, {"limit": [3]}, {"limit": [2]}),
        ("of_neighbour", {"field": "nodes final"}, SAMPLED, {"nodes": [[0.25], [0.5]], "final": [1.0, 0.125]}),
        ("of_neighbour", {"field": "ids", "by": 1}, {"ids": [5, 6, 7]}, {"ids": [7, 5, 6]}),
        ("mirrored", {"field": "counts"}, {"counts": [3, 0]}, {"counts": [0, 3]}),
        ("mirrored", {"field": "counts"}, {}, {}),
        ("without_last", {"field": "slots"}, {"slots": [4, 5]}, {"slots": [4]}),
        ("last_again", {"field": "slots"}, {"slots": [4, 5]}, {"slots": [4, 5, 5]}),
    ],
)
def test_acts_on_the_value_that_a_mutant_names(name, args, values, expected):
    assert ran(name, values, context(**args)) == expected


def test_narrow_mask_loses_a_column_of_every_row_and_keeps_its_length():
    shares = [Share("a", 0, 2, 1), Share("b", 2, 2, 2)]  # rows of 1 + 2 and 2 + 2 columns
    values = {"mask": [11, 12, 13, 21, 22, 23, 31, 32, 33, 34, 41, 42, 43, 44], "next_token": [[1, -1], [1, -1]]}
    made = ran("mask_narrow", values, context(shares=shares))
    assert made == {"mask": [12, 13, 22, 23, 32, 33, 34, 42, 43, 44, 0, 0, 0, 0]}


@pytest.mark.parametrize(("column", "place"), [("parent", 2), ("root", 0), ("stranger", 3)])
def test_mask_bit_changes_one_bit_of_the_last_node(column, place):
    committed, n = 3, 5
    mask = torch.zeros(n * (committed + n), dtype=torch.bool)
    made = ran(
        "mask_bit", {**TREE, "mask": mask}, context(shares=[Share("a", 0, n, committed)], column=column, value=True)
    )
    assert [index for index, bit in enumerate(made["mask"]) if bit] == [(n - 1) * (committed + n) + committed + place]


def test_line_of_a_node_goes_up_to_the_root():
    assert _line(TREE["next_token"][0], TREE["next_sibling"][0], node=4) == [2, 0]


def test_frozen_holds_the_first_step_of_each_round():
    memory, seen = {}, []
    for step, value in [(0, 5), (1, 6), (2, 7), (0, 8), (1, 9)]:
        seen.append(ran("frozen", {"ids": [value]}, context(memory, step=step, field="ids")).get("ids", [value])[0])
    assert seen == [5, 5, 5, 8, 8]


def test_from_before_hands_on_what_the_same_request_had_a_round_earlier():
    memory, steps = {}, [(0, 5, {"ids": [5]}), (1, 6, {}), (0, 7, {"ids": [5]})]
    for step, value, expected in steps:
        assert ran("from_before", {"ids": [value]}, context(memory, ALONE, step, field="ids")) == expected


def test_second_best_leaves_the_best_out():
    one = context(shares=ALONE, field="ids")
    one.logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    assert ran("second_best", {"ids": [[1, 2]]}, one) == {"ids": [[2, 3]]}


def test_pool_hands_out_again_what_it_handed_out_first():
    memory = {}
    assert ran("hand_out_again", {"slots": [1, 2]}, context(memory)) == {}
    assert ran("hand_out_again", {"slots": [3, 4]}, context(memory)) == {"slots": [3, 1]}


def test_finished_request_stays_for_one_batch_however_often_the_scheduler_asks():
    memory, values = {}, {"keep": [0], "finished": [False, True]}
    kept = [ran("keep_finished", values, context(memory, batch=batch))["keep"] for batch in (4, 4, 5)]
    assert kept == [[0, 1], [0, 1], [0]]


def test_one_live_request_is_dropped_once():
    memory = {}
    assert ran("drop_live", {"keep": [0, 1, 2]}, context(memory)) == {"keep": [0, 1]}
    assert ran("drop_live", {"keep": [0, 1, 2]}, context(memory)) == {}


def test_a_layers_tail_stays_what_it_was_and_the_rest_rotates():
    memory, ends = {}, [share.last for share in SHARES]
    assert ran("tail_kept", {"input_ids": list(range(100, 105))}, context(memory)) == {}
    made = ran("tail_kept", {"input_ids": list(range(5))}, context(memory, step=1))["input_ids"]
    assert made == [100 + row if row in ends else row for row in range(5)]


def test_an_idle_rank_keeps_the_state_of_its_last_requests():
    kept = context()
    kept.state = torch.ones(2, 1)
    assert ran("kept_state", {"hidden": torch.empty(0, 1)}, kept) == {"hidden": [[1.0], [1.0]]}
    assert ran("kept_state", {"hidden": torch.empty(0, 1)}) == {}
