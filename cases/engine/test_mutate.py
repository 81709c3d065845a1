"""A mutated file is what a forked scheduler runs, and nothing else of it changes."""

import pytest

from cases.fixed import default_scenarios
from harness.contract.types import Outcome
from harness.search.executed import digest, with_boot

SCENARIO = next(one for one in default_scenarios() if one.name == "finish-together")
FILE = "srt/speculative/eagle_worker_v2.py"
#: In the loop over draft steps of 0.5.23.
LINE = "            if i == self.speculative_num_steps - 1:\n"


def mutated(engines, tmp_path, line):
    source = (engines.environment(engines.default).package / FILE).read_text()
    assert source.count(LINE) == 1, "the release changed: choose another line"
    file = tmp_path / "mutated.py"
    file.write_text(source.replace(LINE, line))
    asked = {"module": "sglang.srt.speculative.eagle_worker_v2", "file": str(file)}
    launch = with_boot(engines.launch(SCENARIO), mutated=asked)
    trace = engines.drive(launch, SCENARIO)
    return trace, engines.judge(SCENARIO, trace, release=engines.default, revert=None)


@pytest.mark.engine(boot=SCENARIO.boot_key())
def test_the_mutated_line_runs_and_the_engine_is_itself_again_afterwards(engines, tmp_path):
    sound = engines(SCENARIO)
    trace, outcome = mutated(engines, tmp_path, LINE.replace("- 1", "- 0"))
    assert [event.data["functions"] for event in trace.events if event.name == "source"] == [1, 1]
    assert digest(trace) != digest(sound.trace)
    trace, outcome = mutated(engines, tmp_path, LINE.replace("if i", "if 1 / 0 and i"))
    (crash,) = (event for event in trace.events if event.name == "crash")
    assert crash.data["site"].endswith("eagle_worker_v2.py:draft_forward")
    assert "ZeroDivisionError" in crash.data["error"]
    assert outcome.verdict.outcome is Outcome.FAIL
    again = engines(SCENARIO, fresh=True)
    assert again.passed
    assert digest(again.trace) == digest(sound.trace)
