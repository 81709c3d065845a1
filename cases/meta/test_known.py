"""Known findings are written up, seen on the releases they name, and never hide a new one."""

from pathlib import Path

import pytest

from cases.known import all_known, known_as, read
from harness.contract.types import Kind, Phase
from harness.engines.envs import SUPPORTED

FINDINGS = Path(__file__).parents[2] / "docs" / "findings.md"
STOP, ROWS = "TOKEN:finish:ACCEPT:ran-past-stop", "NUMERIC:extend:EXTEND:hidden_out-off"


@pytest.mark.parametrize("entry", read(), ids=lambda entry: f"{entry.issue}-{entry.cells[0]}")
def test_known_finding_is_written_up_with_its_signatures_and_releases(entry):
    text = FINDINGS.read_text().split(f"## {entry.issue} ")[1].split("\n## ")[0]
    assert all(signature.split(":")[-1] in text for signature in entry.signatures)
    assert all(release in text for release in entry.engines)
    assert set(entry.engines) <= set(SUPPORTED)


@pytest.mark.parametrize("signature", sorted({signature for entry in read() for signature in entry.signatures}))
def test_signatures_are_such_as_a_divergence_has(signature):
    kind, check, phase, hint = signature.split(":")
    assert kind in set(Kind)
    assert phase in set(Phase)
    assert check
    assert hint


def test_finding_is_known_only_on_its_own_releases_and_in_its_own_cells():
    """What is known of a hand-over must not excuse the same numbers in a chain of its own."""
    assert known_as(STOP, "0.5.13", place="generated/eagle/plain").issue == "F-004"
    assert known_as(STOP, "0.5.23", place="generated/eagle/plain") is None
    assert known_as(ROWS, "0.5.13", place="fixed/disagg").issue == "F-013"
    assert known_as(ROWS, "0.5.13", place="generated/eagle/plain") is None


def test_one_new_signature_makes_the_whole_new():
    place = "generated/eagle/plain"
    assert all_known([STOP], "0.5.13", place=place) == {"F-004"}
    assert all_known([STOP, "POSITION:positions:DRAFT:one-ahead"], "0.5.13", place=place) == frozenset()
    assert all_known([], "0.5.13", place=place) == frozenset()
