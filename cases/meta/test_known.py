"""Known findings are written up, seen on the releases they name, and never hide a new one."""

from pathlib import Path

import pytest

from cases.known import KNOWN, all_known, known_as
from harness.envs import SUPPORTED
from harness.types import Kind, Phase

FINDINGS = Path(__file__).parents[2] / "docs" / "findings.md"


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.finding)
def test_known_finding_is_written_up_with_its_signatures_and_releases(known):
    text = FINDINGS.read_text()
    entry = text.split(f"## {known.finding} ")[1].split("\n## ")[0]
    assert all(signature.split(":")[-1] in entry for signature in known.signatures)
    assert all(release in entry for release in known.releases)
    assert set(known.releases) <= set(SUPPORTED)


@pytest.mark.parametrize("signature", [signature for known in KNOWN for signature in sorted(known.signatures)])
def test_signatures_are_such_as_a_divergence_has(signature):
    kind, check, phase, hint = signature.split(":")
    assert kind in set(Kind)
    assert phase in set(Phase)
    assert check
    assert hint


def test_finding_is_known_only_on_its_own_releases():
    (signature,) = KNOWN[1].signatures
    assert known_as(signature, "0.5.13") is KNOWN[1]
    assert known_as(signature, "0.5.23") is None


def test_one_new_signature_makes_the_whole_new():
    (signature,) = KNOWN[1].signatures
    assert all_known([signature], "0.5.13") == {"F-004"}
    assert all_known([signature, "POSITION:positions:DRAFT:one-ahead"], "0.5.13") == frozenset()
    assert all_known([], "0.5.13") == frozenset()
