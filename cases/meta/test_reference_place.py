"""Where a reference computes: by what fits, said with numbers, refused with numbers; its lease is its own."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.make_real_size import SHAPES, make
from cases.meta.pretended_card import IDLE, IDLE_SECOND, app, used
from cases.meta.published import SMALL_SHAPE
from harness.both_sides import leases
from harness.cli import judges
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.settings import SpecConfig
from harness.contract.usage import UsageError
from harness.driving import runner
from harness.driving.oracle import Oracle
from harness.driving.own_pair import own_pair
from harness.driving.plan import CPU, Place

SCENARIO = Scenario(
    name="x",
    checkpoint="x",
    spec=SpecConfig(),
    requests=(RequestSpec(rid="a", input_ids=(1, 2, 3), max_new_tokens=4),),
    script=({"kind": "submit", "rids": ["a"]}, {"kind": "drain"}),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    shape = replace(SHAPES["llama-1b"], vocab=4000, **SMALL_SHAPE)
    made = make("llama-1b", tmp_path_factory.mktemp("pair"), seed=1, device="cpu", plain=True, shape=shape)
    return own_pair(made / "target", made / "draft")


@pytest.fixture
def talkative(monkeypatch):
    """What even a small reference takes is said."""
    monkeypatch.setattr(judges, "WORTH_SAYING", 0)


def place(asked, own, *, device="cuda", lease=None):
    """(where, what was said)"""
    said = []
    return judges.reference_place(asked, own, [SCENARIO], device=device, lease=lease, say=said.append), " ".join(said)


def test_the_tiny_pairs_are_computed_on_the_cpu_and_nothing_is_said():
    assert place("auto", None) == (CPU, "")
    with pytest.raises(UsageError, match="tiny pairs"):
        place("cuda", None)


def test_a_word_that_names_no_device_is_refused(pair):
    with pytest.raises(UsageError, match="allowed: auto, cpu, cuda"):
        place("gpu", pair)


def test_a_card_that_is_not_there_is_refused(pair, machine):
    with pytest.raises(UsageError, match="allowed: auto, cpu, cuda"):
        place("cuda:one", pair)
    with pytest.raises(UsageError, match="not here\n  allowed: cuda:0 to cuda:0"):
        place("cuda:1", pair)


@pytest.mark.parametrize(("asked", "computes"), [("cuda", "cuda:1"), ("cuda:0", "cuda:0")])
def test_a_reference_computes_on_the_card_that_it_leased(machine, tmp_path, asked, computes):
    machine.say(cards=(IDLE, IDLE_SECOND))
    other = leases.take(leases.request(40.0), say=lambda _text: None)  # of the first card; so the second is emptier
    oracle = Oracle(target=tmp_path, draft=tmp_path, place=Place(device=asked, said=1024))
    oracle._take_lease()
    assert oracle.place.device == computes
    for held in (oracle._lease, other):
        os.close(held.lock)


def test_a_pair_that_stands_for_several_is_loaded_and_leased_once(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(runner, "load_oracle", lambda *folders_and_more: asked.append(folders_and_more[:2]) or object())
    one, other = (tmp_path / "t", tmp_path / "d"), (tmp_path / "t", tmp_path / "e")
    setup = SimpleNamespace(assumed=(), reference="auto")
    plan = SimpleNamespace(pairs={"eagle3-tiny": one, "eagle3-two": one, "eagle3-wide": other}, setup=setup, place=CPU)
    with ThreadPoolExecutor(max_workers=1) as loader:
        found = {name: each.result() for name, each in runner._loading(plan, loader).items()}
    assert found["eagle3-tiny"] is found["eagle3-two"] is not found["eagle3-wide"]
    assert asked == [one, other]


def test_a_pair_of_ones_own_goes_beside_its_engine_where_both_fit(pair, machine, talkative):
    found, said = place("auto", pair, lease=leases.request(40.0))
    assert (found.device, found.held) == ("cuda", "float16")
    assert f"{found.said / 1024:.1f} GiB at most" in said
    beside, _ = place("auto", pair, lease=leases.request(79.0))  # of 79.2 GiB
    assert beside.device == "cpu"
    with pytest.raises(UsageError, match="79 GiB"):
        place("cuda", pair, lease=leases.request(79.0))


def test_without_a_card_auto_is_the_cpu(pair, talkative):
    found, said = place("auto", pair, device="cpu")
    assert (found.device, found.held) == ("cpu", "float32")
    assert "on cpu" in said


def test_what_a_small_reference_takes_is_not_said(pair):
    assert place("auto", pair, device="cpu")[1] == ""


def test_what_does_not_fit_in_memory_is_refused_with_both_numbers(pair, monkeypatch):
    monkeypatch.setattr(judges.psutil, "virtual_memory", lambda: SimpleNamespace(available=10 << 20))
    with pytest.raises(UsageError, match=r"needs .* GiB at most .* 0\.0 GiB of memory left"):
        place("auto", pair, device="cpu")


def test_an_engine_of_ones_own_pair_leases_its_weights_and_pool_besides(pair):
    share = judges.engine_share(pair, [SCENARIO])
    assert leases.SHARE_GIB < share < leases.SHARE_GIB + 0.5


def test_a_process_that_holds_a_lease_is_not_foreign_on_its_card(machine):
    machine.say(cards=(used(900),), apps=(app(os.getpid(), mib=900),))
    asked = leases.request(2.0)
    assert leases.open_count(asked) == 0  # it is on the card, and holds nothing
    machine.say(cards=(IDLE,))
    mine = leases.take(asked, say=lambda _text: None)
    machine.say(cards=(used(900),), apps=(app(os.getpid(), mib=900),))
    assert leases.open_count(asked) > 0
    os.close(mine.lock)
