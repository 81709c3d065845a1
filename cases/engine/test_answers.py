"""What comes back beside tokens, on a real engine: sound answers pass, and a wrong one is named."""

import pytest

from cases.programs import EXERCISES
from harness.both_sides.mutants import MUTANTS
from harness.contract.answers import answers
from harness.contract.types import Outcome
from harness.search.mutants import with_mutant

ASKING = EXERCISES["answers"][0]


@pytest.mark.engine(boot=ASKING.boot_key())
@pytest.mark.parametrize("release", ["0.5.13", "0.5.23"])
def test_log_probabilities_and_streams_are_judged_and_pass(drive_scenario, release):
    outcome = drive_scenario(ASKING, engine=release)
    assert outcome.passed, outcome.verdict.reasons
    assert outcome.verdict.compared["logprobs"] >= 27
    assert outcome.verdict.compared["counts"] >= 30
    assert len(answers(outcome.trace)["c"].pieces) > 2


@pytest.mark.engine(boot=ASKING.boot_key())
def test_a_log_probability_of_another_token_is_named(engines):
    outcome = engines(with_mutant(ASKING, MUTANTS["logprob-of-previous-token"]))
    assert outcome.verdict.outcome is Outcome.FAIL
    assert {finding.signature.split(":")[1] for finding in outcome.findings} == {"logprobs"}
