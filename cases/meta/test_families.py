"""Every family is whole: its fixed set asks for what it promises, and everything it names exists. No engine here."""

import json
import re

import pytest
from pydantic import ValidationError

from cases import fixed
from cases.families import FAMILIES
from cases.meta.handmade import set_on
from cases.pairs import RECIPES
from harness.cli.programs import choose_scenarios
from harness.cli.run import _known_failures
from harness.cli.scenario_checks import check_scenarios
from harness.contract.usage import UsageError
from harness.coverage import POINTS, Where, names
from harness.driving.pairs import checkpoint_pairs

COMMON = "non_final_chunk batch_shrinks batch_grows"
OF_ALL = f"{COMMON} prefix_hit abort_in_decode all_finished_in_one_verify"


def _only(where, *but):
    """The points that can happen there alone."""
    return " ".join(name for name in names(where) if not name.startswith(but))


#: What the fixed set of each family asks for, beside what happens to a part of a batch, which all of them do.
OF_PARTS = {"partial_retraction", "abort_of_some", "pool_exhausted"}
PROMISED = {
    "eagle": OF_ALL,
    "eagle3": OF_ALL,
    "tree": COMMON,
    "paged": f"{COMMON} prefix_hit",
    "mla": OF_ALL,
    "mtp": OF_ALL,
    "window": f"{COMMON} {_only(Where.WINDOWS)} prefix_hit",
    "recurrent": f"{COMMON} {_only(Where.RECURRENT)} abort_in_decode",
    "hicache": f"{_only(Where.HOST)} non_final_chunk batch_shrinks prefix_hit",
    "trained": f"{COMMON} prefix_hit abort_in_decode every_accept_len_seen",
    "texts": "first_token_by_grammar draft_off_grammar constrained_beside_free grammar_ends_text "
    "stop_string_inside_run ended_by_stop_regex grammar_after_thoughts",
    # how ranks pad is the release's choice, and older ones have no coordination
    "dp": _only(Where.RANKS, "padded_", "verify_beside_prefill"),
    "tp": f"{COMMON} prefix_hit abort_in_decode retract_resume",
    "adaptive": "batch_shrinks batch_grows prefix_hit retract_resume",
    "mixed": "mixed_batch non_final_chunk batch_grows prefix_hit retract_resume",
    "weights": _only(Where.UPDATED),
    "lora": "adapters_in_one_batch non_final_chunk batch_grows prefix_hit retract_resume",
    "token-map": f"{COMMON} retract_resume",
    # before 0.5.23 no decode side that speculates may keep a prefix cache, or survives a late write: in files
    "disagg": _only(Where.HANDOFF, "prefix_on_decode_side", "late_write"),
    "disagg-dp": f"{_only(Where.HANDOFF_RANKS)} prebuilt_all_finished failed_transfer abort_in_transfer",
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_a_family_asks_for_what_it_promises_and_all_it_names_exists(family):
    asked = {name for scenario in family.scenarios for name in scenario.wants}
    assert {*OF_PARTS, *PROMISED[family.name].split()} <= asked <= set(POINTS)
    check_scenarios(family.scenarios, device="cpu")
    assert {one.checkpoint for one in (*family.scenarios, *family.boots)} <= set(RECIPES)
    assert family.boots
    for named in (family.scenarios, family.boots):
        assert len({one.name for one in named}) == len(named)


def test_a_family_or_one_scenario_of_it_is_chosen_by_name():
    assert choose_scenarios([], [], "tree") == list(FAMILIES["tree"].scenarios)
    (one,) = choose_scenarios(["page4-shared-prefix"], [], "paged")
    assert one.engine.page_size == 4


def test_on_a_card_a_pair_names_the_dtype_it_runs_in_where_sglang_asks_its_config(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path))
    scenarios = FAMILIES["window"].scenarios
    usual = checkpoint_pairs(scenarios)
    brain = [set_on(one, dtype="bfloat16") for one in scenarios]
    for wanted, dtype in ((scenarios, "float16"), (brain, "bfloat16")):
        target, _ = checkpoint_pairs(wanted, device="cuda")["oss-narrow"]
        assert json.loads((target / "config.json").read_text())["torch_dtype"] == dtype
        weights = [(folder / "model.safetensors").read_bytes() for folder in (target, usual["oss-narrow"][0])]
        assert weights[0] == weights[1]
    with pytest.raises(UsageError, match=r"checkpoint 'oss-[a-z]*' is needed in several dtypes"):
        checkpoint_pairs([*scenarios, *brain], device="cuda")


@pytest.mark.parametrize(("family", "known"), [("tree", {"F-003"}), ("mtp", {"F-010", "F-012"}), ("eagle", set())])
def test_a_set_names_the_known_findings_that_its_own_requests_meet(family, known):
    said = _known_failures(list(FAMILIES[family].scenarios), "cpu", [])
    assert [{*re.findall(r"(F-\d{3}) fails \d+", line)} for line in said] == ([known] if known else [])
    assert [{*re.findall(r"--assume (F-\d{3})", line)} for line in said] == ([known] if known else []), "all at once"
    assert _known_failures(list(FAMILIES[family].scenarios), "cpu", sorted(known)) == []


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_family_drafts_three_and_five_steps_and_something_happens_to_a_part_of_its_batches(name):
    family = FAMILIES[name]
    specs = [one.spec for one in family.scenarios]
    groups = [group for spec in specs for group in (spec.adaptive or {}).values() if isinstance(group, dict)]
    steps = {spec.num_steps for spec in specs} | {steps for group in groups for steps in group["candidate_steps"]}
    assert {3, 5} <= steps
    assert any(boot.engine.max_total_tokens < 512 for boot in family.boots), "generated ones can exhaust a pool too"


def test_a_fixed_scenario_says_no_word_that_nobody_reads():
    with pytest.raises(TypeError, match="nwe"):
        fixed.requests_of("a 7@11 nwe=3")
    with pytest.raises(ValidationError, match="sumbit"):
        fixed.ops_of("submit a; sumbit b")


def test_prompts_of_one_seed_begin_alike_and_snippets_are_text():
    a, b, text = fixed.requests_of("a 40@91 new=12, b 30@91+9@92, c read:8+loop new=2")
    assert a.input_ids[:30] == b.input_ids[:30]
    assert len(b.input_ids) == 39
    assert bytes(text.input_ids).startswith(b"def readdef total(items):")
