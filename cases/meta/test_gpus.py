"""What nvidia-smi says, whatever it says: cards, processes, and refusals that name what to do."""

from __future__ import annotations

import pytest

from cases.meta.pretended_card import H100, IDLE, IDLE_SECOND, SECOND, app, used
from harness.both_sides import gpus
from harness.both_sides.gpus import App, Card, CardError


def test_cards_come_by_index_with_the_memory_that_processes_can_have(machine):
    machine.say(cards=[IDLE_SECOND, used(30000)])
    first, second = gpus.read_cards()
    assert first == Card(index=0, uuid=H100, name="NVIDIA H100 80GB HBM3", used=30000, free=51079)
    assert (first.capacity, second.uuid) == (81079, SECOND)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (None, None),
        (app(41), App(uuid=H100, pid=41, name="python3", used=2048)),
        (app(41, name="/opt/a, b/python3"), App(uuid=H100, pid=41, name="/opt/a, b/python3", used=2048)),
        (app(41, name="[Not Found]", mib="[N/A]"), App(uuid=H100, pid=41, name="[Not Found]", used=None)),
    ],
    ids=["none", "plain", "name-with-comma", "driver-does-not-say"],
)
def test_processes_are_read_also_where_the_driver_says_little(machine, line, found):
    machine.say(apps=[line] if line else [])
    assert gpus.read_apps() == ([found] if found else [])


def test_a_machine_without_the_tool_has_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CardError, match=r"no nvidia-smi here, so no GPU\n.*--device cpu"):
        gpus.read_cards()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"cards": []}, "lists no GPU on this machine"),
        (
            {"cards": ["NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."], "code": 9},
            "exit 9",
        ),
        ({"cards": ["No devices were found"]}, "5 values were asked for"),
        ({"cards": [f"0, {H100}, NVIDIA GB10, [N/A], [N/A]"]}, "how much memory GPU 0 .NVIDIA GB10. has"),
    ],
    ids=["none", "driver-gone", "words", "memory-unknown"],
)
def test_what_the_tool_cannot_say_is_an_error_with_its_words(machine, answer, said):
    machine.say(**answer)
    with pytest.raises(CardError, match=said):
        gpus.read_cards()


def test_a_tool_that_hangs_is_given_up(machine, monkeypatch):
    monkeypatch.setattr(gpus, "SMI_SECONDS", 0.2)
    machine.say(seconds=30)
    with pytest.raises(CardError, match=r"cannot be asked: .*timed out"):
        gpus.read_cards()


@pytest.mark.parametrize(
    ("chosen", "uuids"),
    [
        (None, [H100, SECOND]),
        ("1", [SECOND]),
        ("1,0", [SECOND, H100]),
        (SECOND, [SECOND]),
        (SECOND[:12], [SECOND]),
        ("0, 0", [H100]),
    ],
)
def test_visible_devices_choose_as_cuda_does(machine, monkeypatch, chosen, uuids):
    machine.say(cards=[IDLE, IDLE_SECOND])
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert [card.uuid for card in gpus.visible(gpus.read_cards())] == uuids


@pytest.mark.parametrize(("chosen", "said"), [("2", "names '2', which is no GPU here"), ("", "hides every GPU")])
def test_visible_devices_that_name_no_card_are_refused_with_those_that_are_there(machine, chosen, said):
    with pytest.raises(CardError, match=said) as caught:
        gpus.visible(gpus.read_cards(), chosen)
    assert f"allowed: 0 ({H100})" in str(caught.value)
