"""The same scenario gives the same trace, byte for byte: what shrinking, bisecting and re-judging stand on."""

import pytest

from cases.programs import CHUNKED_BATCH, DEFAULT
from harness.archive.trace_io import write_trace

REPEATS = 20

BOOT = CHUNKED_BATCH.boot_key()


def _bytes(trace, folder):
    """The trace as it is stored. No times are in it to be dropped: they stay in the run's cost."""
    return {path.relative_to(folder): path.read_bytes() for path in write_trace(folder, trace)}


@pytest.mark.engine(boot=BOOT)
def test_twenty_runs_of_a_chunked_batch_give_identical_bytes(engines, tmp_path):
    launch = engines.launch(CHUNKED_BATCH)
    first = _bytes(engines.drive(launch, CHUNKED_BATCH), tmp_path / "0")
    for number in range(1, REPEATS):
        again = _bytes(engines.drive(launch, CHUNKED_BATCH), tmp_path / str(number))
        assert again == first, f"run {number} differs in {[str(name) for name in first if again[name] != first[name]]}"


@pytest.mark.engine(boot=BOOT)
@pytest.mark.parametrize("before", ["shared-prefix", "abort-midway"])
def test_trace_does_not_depend_on_what_ran_before(engines, tmp_path, before):
    launch = engines.launch(CHUNKED_BATCH)
    engines.drive(launch, CHUNKED_BATCH)
    first = _bytes(engines.drive(launch, CHUNKED_BATCH), tmp_path / "first")
    engines.drive(launch, DEFAULT[before])
    assert _bytes(engines.drive(launch, CHUNKED_BATCH), tmp_path / "again") == first


@pytest.mark.engine(boot=BOOT)
def test_reference_repeats_byte_for_byte(drive_scenario, tmp_path):
    outcomes = [drive_scenario(CHUNKED_BATCH, fresh=True) for _ in range(2)]
    assert outcomes[0].passed, outcomes[0].verdict.reasons
    first, again = (_bytes(one.reference, tmp_path / str(n)) for n, one in enumerate(outcomes))
    assert first == again
