"""A file of docs/findings/repro shows its finding on its release, and not where the page's fix is put in."""

import os

import pytest

from cases.engine.alone import run_alone
from harness.contract.finding_pages import FOLDER, issues

PLACE = FOLDER / "repro"
#: The quickest ends in the first verify; nightly-cpu.yml asks for all, which take a minute to five each.
NAMES = sorted(file.stem for file in PLACE.glob("F-*.py")) if "EAGLECHECK_REPRODUCTIONS" in os.environ else ["F-028"]
SAID = {"F-028": "every request is answered"}
RELEASE = max(issues()[NAMES[0]].releases.seen)


@pytest.mark.engine(release=RELEASE)
@pytest.mark.parametrize("code", [1, 0], ids=["as-it-is", "patched"])
@pytest.mark.parametrize("name", NAMES)
def test_a_reproduction_exits_1_where_the_fault_is_and_0_where_it_is_not(engines, tmp_path, name, code):
    patch = None if code else PLACE / f"{name}.patch"
    done = run_alone(PLACE / f"{name}.py", engines.environment(RELEASE), tmp_path, patch=patch)
    assert done.returncode == code, done.stdout + done.stderr
    assert f"expected: {SAID.get(name, '')}" in done.stdout
