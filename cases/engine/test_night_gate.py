"""The nightly gate on a real engine: a mutant, a crashed engine and a hung one each make a night red, by their names.

They run on the worker's live engine. What needs no engine is in cases/meta/test_night_gate.py.
"""

import os
import shutil
import signal
import zipfile

import pytest

from cases.meta import nights
from cases.meta.command_line import call
from cases.programs import DEFAULT
from harness.archive.store import read_reproducer
from harness.both_sides.mutants import MUTANTS
from harness.contract.types import Kind, Outcome
from harness.night import store
from harness.night.cells import Cell
from harness.night.judge import Status, judge
from harness.night.run import Driver
from harness.search.mutants import with_mutant

SCENARIO = DEFAULT["staggered-arrivals"]
BOOT = SCENARIO.boot_key()
MUTANT = MUTANTS["draft-position-late"]
STEP = 5  # a is decoding and b has arrived


class Lent:
    """The worker's engines, which a night must not end. signal: sent to the scheduler after STEP, if any."""

    def __init__(self, engines, number=None):
        self.engines, self.number = engines, number

    def __getattr__(self, name):
        return getattr(self.engines, name)

    def __call__(self, scenario, *, engine, revert, fresh):
        if self.number is None:
            return self.engines(scenario, engine=engine, revert=revert, fresh=fresh)
        running = self.engines.use(self.engines.launch(scenario, engine=engine))

        def on_step(scheduler_step, _state):
            if scheduler_step == STEP:
                os.kill(running.handshakes[0]["pid"], self.number)

        return self.engines(scenario, engine=engine, on_step=on_step)

    def end(self):
        pass


def drive_night(engines, root, *cells, repeats=2):
    """(folder, the night) of these cells."""
    todo = nights.night(planned=[cell.key for cell in cells]).plan
    folder = store.begin(root, todo)
    results = {}
    driver = Driver(
        make=lambda: engines, folder=folder, repeats=repeats, done=lambda one: results.update({one.key: one})
    )
    driver.run(cells)
    return folder, nights.night(*(results[cell.key] for cell in cells))


def fixed(release, *scenarios, name="eagle"):
    return Cell(engine=release, kind="fixed", name=name, scenarios=scenarios)


@pytest.mark.engine(boot=BOOT)
def test_an_engine_with_a_mutant_makes_a_night_red_with_its_signature(engines, release, tmp_path):
    sound, broken = fixed(release, SCENARIO), fixed(release, with_mutant(SCENARIO, MUTANT), name="mutant")
    folder, night = drive_night(Lent(engines), tmp_path, sound, broken)
    found = judge(night, past=[], known=[], today=nights.TODAY)
    assert found.outcome is Outcome.FAIL
    assert night.cell(sound.key).verdict is Outcome.PASS, "what was armed in one scenario is gone in the next"
    (group,) = found.of(Status.NEW)
    assert (group.signature, group.cells) == ("POSITION:positions:DRAFT:one-ahead", (broken.key,))
    assert (group.shown, group.tried) == (3, 3), "a mutant shows every time"
    assert "draft position differs" in group.first
    manifest, stored = read_reproducer(folder / group.reproducer)
    assert (manifest.signature, stored.scenario.id) == (group.signature, broken.scenarios[0].id)
    accepted = night.cell(sound.key).accepted
    assert sum(accepted.values()) > 0
    assert night.cell(sound.key).mean_accepted > night.cell(broken.key).mean_accepted, "what a wrong chain costs"


@pytest.mark.engine(boot=BOOT)
def test_an_artifact_of_a_night_replays_where_it_is_unpacked(commands_on_live_engine, release, tmp_path):
    """Zipped without modes or links, unpacked elsewhere, the night itself gone: as an artifact store does it."""
    broken = fixed(release, with_mutant(SCENARIO, MUTANT), name="mutant")
    folder, night = drive_night(Lent(commands_on_live_engine), tmp_path / "night", broken, repeats=0)
    (seen,) = night.cells[0].findings
    with zipfile.ZipFile(tmp_path / "artifact.zip", "w") as packed:
        for path in folder.rglob("*"):
            if path.is_file():
                packed.writestr(str(path.relative_to(folder.parent)), path.read_bytes())
    shutil.rmtree(tmp_path / "night")
    with zipfile.ZipFile(tmp_path / "artifact.zip") as packed:
        packed.extractall(tmp_path / "elsewhere")
    reproducer = tmp_path / "elsewhere" / folder.name / seen.reproducer
    assert "FAILED" in call("replay", reproducer, "--runs", tmp_path / "runs", code=1).output


@pytest.mark.engine(boot=BOOT, ends_it=True)
@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGSEGV, Kind.CRASH), (signal.SIGSTOP, Kind.HANG)], ids=["crashed", "hung"]
)
def test_an_engine_that_crashes_or_hangs_makes_a_night_red(engines, release, tmp_path, monkeypatch, number, kind):
    if number == signal.SIGSTOP:  # stands for a loop without end: what distinguishes the two is disabled
        monkeypatch.setattr("harness.engines.exits.stopped", lambda _pid: False)
        monkeypatch.setattr("harness.engines.side.STEP_SECONDS", 2.0)
    _, night = drive_night(Lent(engines, number), tmp_path, fixed(release, SCENARIO), repeats=0)
    found = judge(night, past=[], known=[], today=nights.TODAY)
    assert found.outcome is Outcome.FAIL
    (group,) = found.of(Status.NEW)
    assert group.signature.startswith(f"{kind}:"), group.signature
