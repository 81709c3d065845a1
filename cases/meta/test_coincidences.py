"""What is equal in our pairs and fixed scenarios without having to be: every coincidence has a reason here, or is none.

A fault that takes one thing for another does not show where both are the same. A reason that nothing needs any more
fails, and so does one that names something as differing which does not.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
import pytest

from cases import catalogue
from cases.families import FAMILIES
from cases.meta import handmade
from cases.meta.coincidences import of_pair, of_scenario
from cases.pairs import RECIPES, pair_of
from cases.recipes import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Coincidences that stay, but for those of the rows before. where, what: patterns of places and coincidences.

    apart: a place that has none of them; empty only where the algorithm, or what the place is for, demands them.
    """

    where: str
    what: str
    why: str
    apart: str = ""

    def covers(self, place: str, coincidence: str) -> bool:
        return any(fnmatchcase(place, one) for one in self.where.split()) and any(
            fnmatchcase(coincidence, one) for one in self.what.split("; ")
        )


KEPT = "stored runs and findings were made with it"
SMALLER = "requests end one after another, so the batch passes through every smaller number"
WINDOWS = "their windows differ from every size, and no two tensors are alike"
PAIRS = (
    # What an algorithm, or what the pair is for, demands
    Left(
        where="eagle-* qwen3-eagle table-* trained-eagle1 hybrid-mamba",
        what="size: draft fc inputs = hidden_size twice",
        why="an EAGLE-1 head reads a token and a state of the target's width",
    ),
    Left(
        where="mla-*",
        what="alike: target model.embed_tokens.weight = *; alike: target lm_head.weight = *",
        why="a NextN layer shares embedding and head with its target",
    ),
    Left(where="mla-*", what="size: num_attention_heads = num_key_value_heads", why="latent attention has no groups"),
    Left(
        where="mla-* hybrid-mamba-next*",
        what="size: n_routed_experts = num_experts_per_tok",
        why="where all experts are chosen, no near tie decides what a row is",
    ),
    Left(
        where="mla-* mtp-chained*",
        what="size: intermediate_size = moe_intermediate_size",
        why="the shared expert is the MLP of the target's first layer",
    ),
    Left(
        where="mtp-tiny mtp-apart mtp-window mtp-narrow",
        what="size: head_dim = v_head_dim",
        why="what MiMo-V2 has beside Llama is off",
    ),
    # What another pair shows
    Left(
        where="eagle3-apart qwen3-apart",
        what="size: vocab_size = draft draft_vocab_size",
        why="a head over the whole vocabulary, which could be taken for the target's",
        apart="eagle3-tiny",
    ),
    Left(
        where="qwen3-apart",
        what="size: hidden_size = head_dim; size: keys = hidden_size twice; size: queries = draft keys; "
        "size: num_attention_heads = draft num_key_value_heads",
        why="heads as wide as the model keep a row's length, so that their norms divide all rows by one number",
        apart="eagle3-apart",
    ),
    Left(
        where="table-*",
        what="*",
        why="its layers add nothing, so that the distribution of every token is known",
        apart="eagle-apart",
    ),
    Left(
        where="mla-apart512",
        what="size: vocab_size = kv_lora_rank",
        why="the vocabulary is that of the pair it stands for, the latent that of SGLang's kernels",
        apart="mla-apart",
    ),
    Left(where="oss-*", what="size: *", why=WINDOWS, apart="eagle-apart"),
    Left(
        where="eagle3-next mtp-next mla-next mla-next512",
        what="size: *",
        why="new weights have the shapes of those they replace",
        apart="eagle-apart",
    ),
    Left(where="mtp-window mtp-narrow", what="size: *", why=WINDOWS, apart="mtp-apart"),
    # What was made before anybody looked
    Left(where="eagle-tiny eagle-next eagle-next64 eagle-head64 qwen3-eagle", what="*", why=KEPT, apart="eagle-apart"),
    Left(where="eagle3-tiny eagle3-one eagle3-two eagle3-wide eagle3-normed", what="*", why=KEPT, apart="eagle-apart"),
    Left(where="qwen3-tiny qwen3-wide qwen3-four", what="*", why=KEPT, apart="eagle-apart"),
    Left(where="mtp-tiny", what="*", why=KEPT, apart="mtp-apart"),
    Left(where="mtp-chained", what="*", why=KEPT, apart="mtp-chained-apart"),
    Left(where="mla-tiny mla-latent512", what="*", why=KEPT, apart="mla-apart"),
    Left(where="trained-*", what="size: *", why="what defects cost was measured with it", apart="eagle-apart"),
)
SCENARIOS = (
    # What a place is for
    Left(where="*shared-prefix *goes-on *read-twice", what="beginning: *", why="prompts that begin alike"),
    Left(where="*written-twice", what="*", why="two requests of one prompt"),
    Left(where="*finish-together dp/every-rank-idle disagg/all-end-at-once", what="limit: *", why="they end together"),
    Left(
        where="*pool-runs-out trained/tight-pool",
        what="stops: *",
        why="an id that is never proposed lets a pool run out",
    ),
    Left(where="weights/* corpus/weights-*", what="length: a = c; beginning: a = c", why="one prompt twice"),
    Left(
        where="lora/*-one-prompt", what="length: *; limit: *; end: *; beginning: *", why="one prompt with each adapter"
    ),
    # What another place shows
    Left(
        where="*",
        what="number: requests = num_steps; number: requests = num_draft_tokens; number: requests = page_size; "
        "number: requests = eagle_topk; number: requests = dp_size",
        why=SMALLER,
        apart="eagle/idle-between",
    ),
    Left(
        where="paged/page4-* mla/page4-* disagg/page4-* tp/tp-pages-* adaptive/adaptive-eagle3-* mixed/mixed-eagle3-* "
        "weights/weights-eagle3-* lora/lora-eagle3-*",
        what="number: num_draft_tokens = page_size",
        why="pages of four tokens under chains of three steps",
        apart="paged/apart-four-together",
    ),
    Left(
        where="tree/t2-* tree/few-* paged/*-tree-* mla/tree-* disagg/tree-* tp/*-tree-* texts/tree-* mixed/*-tree-* "
        "lora/lora-tree-* token-map/hot-tree-* recurrent/hybrid-tree-* hicache/hicache-tree-*",
        what="number: num_steps = eagle_topk",
        why="the smallest tree",
        apart="tree/t4-four-together",
    ),
    Left(
        where="texts/*",
        what="length: *; limit: *; end: *; beginning: *",
        why="short texts, chosen for the strings and grammars that end them",
        apart="eagle/four-together",
    ),
    Left(
        where="corpus/mtp-shared-prefix corpus/pr24881 corpus/weights-while-running",
        what="limit: *",
        why="kept as they were found",
        apart="eagle/shared-prefix",
    ),
    Left(
        where="hicache/* corpus/mtp-host-cache",
        what="beginning: *",
        why="the prefix that goes to the host and comes back",
        apart="eagle/four-together",
    ),
    Left(where="dp/* disagg-dp/*", what="rank: *", why="one request on each rank", apart="dp/uneven-batches"),
    Left(
        where="trained/*arrivals", what="beginning: a = c", why="both go on with a function", apart="trained/together"
    ),
)


def places() -> Iterator[tuple[str, list[str]]]:
    """Each fixed scenario with its coincidences."""
    for family in FAMILIES.values():
        yield from ((f"{family.name}/{one.name}", of_scenario(one)) for one in family.scenarios)
    yield from ((f"corpus/{name}", of_scenario(catalogue.load(name).scenario)) for name in catalogue.names())


@functools.cache
def in_pairs():
    return {name: of_pair(pair_of(recipe)) for name, recipe in RECIPES.items()}


@functools.cache
def in_scenarios():
    return dict(places())


TABLES = {"pairs": (PAIRS, in_pairs), "scenarios": (SCENARIOS, in_scenarios)}
EVERY = [(table, left) for table, (rows, _) in TABLES.items() for left in rows]


@pytest.mark.parametrize("table", TABLES)
def test_every_coincidence_has_a_reason(table):
    rows, found = TABLES[table]
    without = {
        place: [one for one in coincidences if not any(row.covers(place, one) for row in rows)]
        for place, coincidences in found().items()
    }
    assert {place: coincidences for place, coincidences in without.items() if coincidences} == {}


@pytest.mark.parametrize(("table", "left"), EVERY, ids=lambda one: getattr(one, "where", one))
def test_every_reason_is_needed_and_what_it_says_is_apart_is(table, left):
    rows, found = TABLES[table]
    before = rows[: rows.index(left)]
    for where in left.where.split():
        assert any(
            left.covers(place, one) and not any(row.covers(place, one) for row in before)
            for place, coincidences in found().items()
            if fnmatchcase(place, where)
            for one in coincidences
        ), f"nothing in {where} needs this reason"
    if left.apart:
        demanded = [row for row in rows if not row.apart]
        same = [one for one in found()[left.apart] if replace(left, where="*").covers(left.apart, one)]
        assert [one for one in same if not any(row.covers(left.apart, one) for row in demanded)] == []


def test_a_pair_says_which_tensors_and_sizes_are_alike():
    config = {"vocab_size": 6, "hidden_size": 3, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 3}
    one = np.arange(6, dtype=np.float32).reshape(2, 3) + 1
    target = {"a": one, "norm": np.ones(3, dtype=np.float32)}
    draft = {"b": -2 * one, "c": one + np.eye(2, 3, dtype=np.float32)}
    found = of_pair(Pair(target_config=config, target=target, draft_config={**config, "hidden_size": 4}, draft=draft))
    assert found[:2] == ["constant: target norm", "alike: target a = draft b"]
    assert "size: vocab_size = hidden_size twice" in found
    assert "size: hidden_size = head_dim" in found
    assert not any("hidden_size = draft" in one for one in found)


def test_a_scenario_says_which_numbers_are_equal():
    given = handmade.scenario(prompts=(4, 6), max_new_tokens=5)
    requests = (given.requests[0], given.requests[1].model_copy(update={"input_ids": given.requests[0].input_ids}))
    assert "limit: r0 = r1" in of_scenario(given)
    assert not any(one.startswith("length") for one in of_scenario(given))
    same = of_scenario(given.model_copy(update={"requests": requests}))
    assert {"length: r0 = r1", "beginning: r0 = r1", "end: r0 = r1"} <= set(same)
