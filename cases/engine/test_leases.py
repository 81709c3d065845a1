"""A lease on a card that is not there, held by the host of a real SGLang: it lives as long as that process."""

import os
import signal

import pytest

from cases.meta.pretended_card import H100, PretendedCards, app, used
from cases.meta.processes import survivors, tree
from cases.programs import DEFAULT
from harness.both_sides import lease_files, leases
from harness.both_sides.gpus import CardError
from harness.contract.trace import ENDS

SCENARIO = DEFAULT["staggered-arrivals"]
STEP = 5
WHOLE = 79.0  # GiB: one such lease fits on the card


@pytest.fixture
def cards(tmp_path, monkeypatch):
    found = PretendedCards(tmp_path / "cards")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in {**found.environment, "EAGLECHECK_GPU_WAIT": "0"}.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.mark.engine(boot="leased", ends_it=True)
def test_a_real_engine_keeps_its_lease_until_it_is_killed_and_then_it_is_free(engines, cards, monkeypatch):
    engines.close()  # the live one holds no lease
    monkeypatch.setattr(engines, "lease", leases.request(WHOLE))
    monkeypatch.setattr(engines, "copies", False)  # what a CPU's engines are forked from hides every card
    engine = engines.use(engines.launch(SCENARIO))
    host, processes = engine.process.pid, tree(engine.process.pid)
    assert len(processes) > 1, "and SGLang's own"
    cards.say(cards=[used(3000)], apps=[app(process.pid, mib=500) for process in processes])
    assert [holder.pid for holder in lease_files.holders(str(cards.leases), H100)] == [host]
    with pytest.raises(CardError, match=rf"leased to engine process {host} \(79 GiB\)"):
        leases.take(leases.request(WHOLE), say=lambda _text: None)

    def kill(scheduler_step, _state):
        if scheduler_step == STEP:
            os.kill(host, signal.SIGKILL)

    trace = engines.drive(engines.launch(SCENARIO), SCENARIO, on_step=kill)
    assert [event.name for event in trace.named(*ENDS)] == ["lost"]
    assert trace.header["lease"]["uuid"] == H100
    assert trace.header["lease"]["share_mib"] == WHOLE * 1024
    assert survivors(processes) == []
    cards.say()
    os.close(leases.take(leases.request(WHOLE), say=lambda _text: None).lock)
