"""An algorithm as a plugin registers it; no SGLang here."""

import sys
from types import SimpleNamespace

import pytest

from harness.both_sides import plugin_algorithm
from harness.both_sides.plugin_algorithm import PluginError, register

REGISTRY = "sglang.srt.speculative.spec_registry"
WORKER = ("types", "SimpleNamespace")


class Made:
    """What EAGLE would make of a hand-over."""

    def __init__(self):
        self.hidden = 7


class Base:
    """Stands for what plugins derive from."""

    def is_eagle(self):
        return False

    def build_disagg_draft_input(self, batch):
        return None


class Eagle:
    """Stands for the built-in algorithms, which can do more than the base class of plugins."""

    def is_eagle(self):
        return True

    def create_future_map(self, device):
        return ("map", type(self).__name__, device)

    def build_disagg_draft_input(self, batch):
        return Made()


def builtin(registered):
    Eagle.EAGLE = Eagle()

    def take(name, *, supports_overlap, spec_class):
        def decorator(factory):
            registered[name] = (spec_class(), factory)

        return decorator

    Eagle.register = staticmethod(take)
    return SimpleNamespace(SpeculativeAlgorithm=Eagle)


def plugin(monkeypatch, kind):
    registered = {}
    monkeypatch.setitem(sys.modules, REGISTRY, SimpleNamespace(CustomSpecAlgo=Base))
    register(builtin(registered), kind=kind, worker=WORKER)
    (name,) = registered
    assert name == plugin_algorithm.NAMES[kind]
    return registered[name]


def test_it_is_eagle_in_all_but_the_hand_over(monkeypatch):
    algorithm, factory = plugin(monkeypatch, "none")
    assert algorithm.is_eagle()
    assert isinstance(algorithm, Base)
    assert factory(None) is SimpleNamespace
    assert algorithm.create_future_map("cpu") == ("map", "NonePlugin", "cpu")
    assert algorithm.build_disagg_draft_input([]) is None


def test_its_own_draft_input_holds_what_eagles_would_in_a_class_of_its_own(monkeypatch):
    made = plugin(monkeypatch, "own")[0].build_disagg_draft_input([])
    assert type(made) is not Made
    assert isinstance(made, Made)
    assert made.hidden == 7


def test_a_bare_one_has_nothing_but_what_its_base_class_has(monkeypatch):
    assert not hasattr(plugin(monkeypatch, "bare")[0], "create_future_map")


@pytest.mark.parametrize(
    ("registry", "why"), [(None, "no registry"), (SimpleNamespace(CustomSpecAlgo=object), "asks no algorithm")]
)
def test_a_release_that_cannot_have_one_is_refused_by_name(monkeypatch, registry, why):
    monkeypatch.setitem(sys.modules, REGISTRY, registry)
    with pytest.raises(PluginError, match=why):
        register(builtin({}), kind="own", worker=WORKER)
