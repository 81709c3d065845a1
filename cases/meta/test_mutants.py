"""The registry of mutants holds together, every check has something to notice, and mutants act where they say."""

import sys
import tomllib
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cases.programs import EXERCISES
from harness.both_sides import mutants
from harness.both_sides.mutants import MUTANTS, NEEDS, SITES, TEXTS
from harness.checks import CHECKS
from harness.contract.types import Kind, Phase
from harness.engine_side.hooks import HookRegistry, around
from harness.engine_side.mutants.armed import ArmedMutants, MutantBroken, Place, Sites
from harness.engine_side.mutants.registry import ACTS, FORWARD_ACTS, Share
from harness.engine_side.mutants.sites_requests import ANSWERS, SENDER, AnswerSites, RequestSites
from harness.search.mutants import by_engine, with_mutant
from harness.search.mutants_report import EXCUSED

#: Which rows a mutant may be about.
PLACES = ("all", "first", "inner", "last", "border", "retracted", "decoding", "last-request")


def test_there_are_forty_and_no_id_is_used_in_two_families():
    text = Path(mutants.__file__).with_suffix(".toml").read_text()
    families = {name: entries for name, entries in tomllib.loads(text).items() if name != "words"}
    assert len(MUTANTS) == sum(map(len, families.values()))
    assert len(MUTANTS.values()) >= 40


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.id)
def test_every_word_of_an_entry_means_something(mutant):
    assert mutant.kinds, "a mutant must say what shows it"
    assert set(mutant.kinds) <= set(Kind)
    assert set(mutant.phases) <= set(Phase)
    assert mutant.needs in NEEDS
    assert mutant.site in SITES
    assert mutant.text in TEXTS
    assert mutant.args.get("at", "all") in PLACES
    assert len(mutant.what.split()) >= 4


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.id)
def test_every_mutant_that_can_run_has_an_act_and_an_exercise(mutant):
    assert mutant.act in (*ACTS, *FORWARD_ACTS)
    assert EXERCISES[mutant.needs]


def test_no_act_is_without_a_mutant():
    assert {*ACTS, *FORWARD_ACTS} == {mutant.act for mutant in MUTANTS.values()}


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.id)
def test_every_check_has_a_mutant_that_could_show_it(check):
    asked = {kind for mutant in MUTANTS.values() for kind in mutant.kinds}
    assert check.id in EXCUSED or check.kinds & asked


def test_exercises_of_one_need_share_an_engine_and_excuses_name_checks():
    assert {len({one.boot_key() for one in listed}) for listed in EXERCISES.values()} == {1}
    assert set(EXCUSED) <= set(CHECKS)


def test_mutants_are_grouped_so_that_few_boots_serve_all():
    drivable = by_engine(MUTANTS.values())
    assert len(drivable) == 26
    assert sorted(mutant.id for group in drivable for mutant in group) == sorted(
        mutant.id for mutant in MUTANTS.values()
    )


def test_mutated_scenario_differs_from_the_sound_one_in_one_op_and_its_name():
    sound, mutant = EXERCISES["chunk"][0], MUTANTS["tail-chunk-border"]
    mutated = with_mutant(sound, mutant, first=3)
    assert mutated.script[1:] == sound.script
    assert (mutated.script[0].kind, mutated.script[0].name, mutated.script[0].count) == ("mutant", mutant.id, 3)
    assert mutated.boot_key() == sound.boot_key()
    assert mutated.id != sound.id
    assert mutated.model_copy(update={"script": sound.script, "name": sound.name}) == sound


def module():
    made = types.ModuleType("pretended")
    made.run = lambda: ["bare"]
    return made


def tagged(name):
    return lambda original: lambda: [*original(), name]


def test_later_wrappers_lie_outside_unless_asked_to_lie_inside():
    place, hooks = module(), HookRegistry()
    hooks.wrap(place, "run", tagged("probe"))
    hooks.wrap(place, "run", tagged("outside"))
    hooks.wrap(place, "run", tagged("inside"), innermost=True)
    assert place.run() == ["bare", "inside", "probe", "outside"]


def test_what_is_not_there_is_noted_and_nothing_is_wrapped():
    place, hooks = module(), HookRegistry()
    hooks.wrap(place, "Worker.draft", tagged("x"), innermost=True)
    assert hooks.missing == ["pretended:Worker.draft"]
    assert place.run() == ["bare"]


def armed(name, *, first=1, batches=1, active=True):
    """Mutants of a process in which nothing was wrapped, in the middle of a round."""
    recorder = SimpleNamespace(active=active, round=object())
    made = ArmedMutants(SimpleNamespace(recorder=recorder, release=None, graphs=None), page=1)
    made.arm(name, first=first)
    made.batches = batches
    return made


POSITIONS = {"positions": torch.tensor([4, 5])}


def late(made, *, phase="DRAFT", site="inputs"):
    shares = [Share("a", 0, 2, 4)]
    return made.apply(site, POSITIONS, phase=phase, shares=shares)


def test_armed_mutant_acts_and_is_counted_until_it_is_disarmed():
    made = armed("draft-position-late")
    assert late(made)["positions"].tolist() == [5, 6]
    assert made.fired() == {"draft-position-late": 1}
    made.disarm()
    assert (late(made), made.fired()) == ({}, {})


@pytest.mark.parametrize(
    ("name", "options", "place"),
    [
        ("draft-position-late", {}, {"phase": "EXTEND"}),
        ("draft-position-late", {}, {"site": "choices"}),
        ("draft-position-late", {"first": 3, "batches": 2}, {}),
        ("draft-position-late", {"active": False}, {}),
        ("draft-position-neighbour", {}, {}),  # a batch of one has no neighbour
    ],
)
def test_what_does_not_act_here_or_changes_nothing_is_not_counted(name, options, place):
    made = armed(name, **options)
    assert late(made, **place) == {}
    assert made.fired() == {name: 0}


def test_failure_of_a_mutant_is_our_own():
    with pytest.raises(MutantBroken, match="mutant hidden-zeroed: KeyError"):
        late(armed("hidden-zeroed"))


def test_refused_where_the_release_lacks_a_place():
    made = armed("draft-position-late")
    made.missing = ["pretended:Worker.draft"]
    with pytest.raises(LookupError, match=r"nothing to wrap at pretended:Worker\.draft"):
        made.arm("draft-position-late", first=1)


class Pretended(Sites):
    def places(self):
        for name in ("run", "gone"):
            yield Place("pretended", name, lambda original: [*original(), "outside"], outside=True)
            yield Place("pretended", name, lambda original: [*original(), "inside"])


def test_sites_lie_on_either_side_of_the_probe_and_say_what_is_not_there(monkeypatch):
    made, place = armed("draft-position-late"), module()
    monkeypatch.setitem(sys.modules, "pretended", place)
    made.probe.hooks = HookRegistry()
    made.probe.hooks.wrap(place, "run", tagged("probe"))
    Pretended(made, None).install()
    assert place.run() == ["bare", "inside", "probe", "outside"]
    assert made.missing == ["pretended:gone"] * 2


def test_a_site_hands_on_what_the_mutants_leave():
    made = armed("slot-not-freed")
    pool = type("Pool", (), {"free": around(RequestSites(made, None)._free)(lambda _pool, slots: slots.tolist())})()
    assert pool.free(torch.tensor([3, 4, 5])) == [3, 4]
    made.disarm()
    assert pool.free(torch.tensor([3, 4, 5])) == [3, 4, 5]


SENT_BACK = {
    "logprob-of-previous-token": (
        "output_token_logprobs_val",
        [[-1.0, -2.0, -4.0], [-8.0]],
        [[-1.0, -1.0, -2.0], [-8.0]],
    ),
    "logprob-left-out": ("output_token_logprobs_val", [[-1.0, -2.0], [-8.0]], [[-1.0], []]),
    "logprob-sent-again": ("output_token_logprobs_val", [[-1.0, -2.0], []], [[-1.0, -2.0, -2.0], []]),
    "verify-counted-twice": ("spec_verify_ct", [3, 0], [4, 1]),
    "cached-token-counted": ("cached_tokens", [0, 7], [1, 8]),
    "state-left-out": ("output_hidden_states", [[[[1.0], [2.0]], [3.0]], None], [[[1.0], [2.0]], None]),
}


@pytest.mark.parametrize("name", SENT_BACK)
def test_what_is_sent_back_is_changed_as_it_leaves_and_nothing_else(name, monkeypatch):
    sent = []
    place = types.ModuleType(SENDER)
    place.SenderWrapper = type("SenderWrapper", (), {"send_output": lambda self, output: sent.append(output)})
    monkeypatch.setitem(sys.modules, SENDER, place)
    made = armed(name)
    made.probe.hooks = HookRegistry()
    AnswerSites(made, None).install()
    field, before, after = SENT_BACK[name]
    fields = dict.fromkeys(ANSWERS.values()) | {field: list(before)}
    place.SenderWrapper().send_output(SimpleNamespace(rids=["a@1", "b@1"], **fields))
    place.SenderWrapper().send_output("something else")
    assert getattr(sent[0], field) == after
    assert sent[1:] == ["something else"]
    assert made.fired()[name] > 0
