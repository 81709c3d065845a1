"""A process that is to be forked answers questions about cards without CUDA, and knows where CUDA was touched."""

import os
from types import SimpleNamespace

import pytest
import torch

from harness.engine_side.host import cuda_untouched
from harness.engine_side.host.cuda_untouched import NOT_INITIALISED, Untouched


@pytest.fixture
def driver(monkeypatch):
    """A driver that nobody has initialised; `state` is what it says."""
    made = SimpleNamespace(state=NOT_INITIALISED, cuCtxGetCurrent=lambda _context: made.state)
    monkeypatch.setattr(cuda_untouched.ctypes, "CDLL", lambda _name: made)
    return made


def properties(name="Card", major=9):
    """As torch gives them; who answers is in it."""
    return SimpleNamespace(name=name, major=major, minor=0, total_memory=1 << 37, uuid=object(), pid=os.getpid())


@pytest.fixture
def cards(monkeypatch):
    found = [properties()]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: vary(found[number]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (number, os.getpid()))
    return found


def vary(one):
    return SimpleNamespace(**{**vars(one), "pid": os.getpid()})


@pytest.fixture
def untouched(driver, cards):
    made = Untouched()
    torch.get_device_module.cache_clear()  # it keeps its first answer, here another one with and without
    made.install()
    yield made
    made.restore()
    torch.get_device_module.cache_clear()


@pytest.mark.parametrize("device", [None, 0, "cuda", "cuda:0", torch.device("cuda", 0)])
def test_what_is_asked_about_cards_a_child_answers(untouched, device):
    assert torch.cuda.get_device_capability(device) == (9, 0)
    assert torch.cuda.get_device_name(device) == "Card"
    card = torch.cuda.get_device_properties(device)
    assert (card.total_memory, card.pid == os.getpid()) == (1 << 37, False)
    assert torch.cuda.current_device() == 0
    free, asked_by = torch.cuda.mem_get_info(device)
    assert free == 0
    assert asked_by != os.getpid()
    assert torch.get_device_module() is torch.cuda
    assert untouched.why() == ""


def test_a_card_that_was_asked_for_is_known_by_its_uuid(request, cards, monkeypatch):
    cards[0].uuid = "131e7f13"
    cards.append(properties())
    cards[1].uuid = "798b2088"
    request.getfixturevalue("untouched")
    asked = [torch.cuda.get_device_properties(number).pid for number in range(2)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-798b2088")
    assert (torch.cuda.get_device_properties(0).uuid, torch.cuda.get_device_properties(0).pid) == ("798b2088", asked[1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-798b2088,GPU-of-another")
    assert torch.cuda.get_device_properties(0).pid not in asked


def test_behind_it_torch_answers_as_ever(untouched):
    untouched.restore()
    assert torch.cuda.get_device_properties(0).pid == os.getpid()
    assert torch.cuda.mem_get_info(0) == (0, os.getpid())


def test_it_says_between_which_imports_cuda_was_initialised(untouched, driver):
    assert untouched.find_spec("one", None) is None
    driver.state = 0
    assert untouched.find_spec("two", None) is None
    untouched.find_spec("three", None)
    assert untouched.why() == "CUDA was initialised between the imports of one and two"
    assert torch.cuda.get_device_properties(0).pid == os.getpid()  # nothing to keep out any more


def test_it_says_that_cuda_was_initialised_after_the_imports(untouched, driver):
    untouched.find_spec("one", None)
    driver.state = 0
    assert untouched.why() == "CUDA was initialised behind the import of one"


def test_cards_of_several_kinds_and_a_child_that_cannot_ask_are_reasons_too(request, cards, monkeypatch):
    cards.append(properties(name="Another", major=8))
    assert request.getfixturevalue("untouched").why() == "the cards here are not of one kind: Another, Card"
    broken = Untouched()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 / 0)
    assert "could not ask for the cards: ZeroDivisionError" in broken.why()
