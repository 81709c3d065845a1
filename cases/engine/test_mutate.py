"""A mutated file is what a scheduler runs while it is swapped in, and the engine is itself again afterwards."""

import pytest

from cases.fixed import default_scenarios
from harness.driving.drive import drive
from harness.search.executed import digest, with_boot

SCENARIO = next(one for one in default_scenarios() if one.name == "finish-together")
FILE, MODULE = "srt/speculative/eagle_worker_v2.py", "sglang.srt.speculative.eagle_worker_v2"
#: In the loop over draft steps.
NEXT = "forward_batch.positions.add_(1)"
#: Of a module that is imported before the scheduler is forked, and one of its functions.
EARLY, EARLY_MODULE = "srt/managers/schedule_batch.py", "sglang.srt.managers.schedule_batch"
FINISHED = "return self.finished_reason is not None"


@pytest.mark.engine(boot=SCENARIO.boot_key())
def test_the_mutated_line_runs_and_the_engine_is_itself_again_afterwards(engines, tmp_path):
    source = (engines.environment(engines.default).package / FILE).read_text()
    assert NEXT in source, "the release changed: choose another line"

    def mutated(after):
        file = tmp_path / "mutated.py"
        file.write_text(source.replace(NEXT, after))
        engine = engines.use(engines.launch(SCENARIO))
        assert engine.swap({MODULE: file}) == 1, "one function changed"
        trace = drive(engine, SCENARIO)
        return engine, trace

    sound = engines(SCENARIO, fresh=True)
    engine, trace = mutated("forward_batch.positions.add_(2)")
    changed = digest(trace)
    assert changed != digest(sound.trace)
    assert engine.swap() == 0
    assert digest(drive(engine, SCENARIO)) == digest(sound.trace), "the same engine is itself again"
    _, trace = mutated("forward_batch.positions.add_(1 // 0)")
    (crash,) = trace.named("crash")
    assert crash.data["site"].endswith("eagle_worker_v2.py:draft_forward")
    assert "ZeroDivisionError" in crash.data["error"]
    file = tmp_path / "mutated.py"
    file.write_text(source.replace(NEXT, "forward_batch.positions.add_(2)"))
    engine = engines.use(with_boot(engines.launch(SCENARIO), mutated={MODULE: str(file)}))
    assert digest(drive(engine, SCENARIO)) == changed, "put in before the boot it is the same mutant"
    assert engine.swap() == 0
    assert digest(drive(engine, SCENARIO)) == digest(sound.trace)
    engines.close()


@pytest.mark.engine(boot=SCENARIO.boot_key())
def test_functions_from_before_a_fork_are_changed_too(engines, tmp_path):
    source = (engines.environment(engines.default).package / EARLY).read_text()
    assert source.count(FINISHED) == 1, "the release changed: choose another line"
    file = tmp_path / "mutated.py"
    file.write_text(source.replace(FINISHED, "return 1 // 0"))
    engine = engines.use(engines.launch(SCENARIO))
    assert engine.swap({EARLY_MODULE: file}) == 1
    (crash,) = drive(engine, SCENARIO).named("crash")
    assert "ZeroDivisionError" in crash.data["error"]
    engines.close()
