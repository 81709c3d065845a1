"""A file of docs/findings/repro shows its finding on its release, and not where the page's fix is put in."""

import pytest

from cases.engine.alone import run_alone
from harness.contract.known_issues import FOLDER, issues

#: The quickest: it ends in the first verify.
NAME = "F-028"
RELEASE = max(issues()[NAME].releases.seen)


@pytest.mark.engine(release=RELEASE)
@pytest.mark.parametrize(
    ("patch", "code"), [(None, 1), (FOLDER / "repro" / f"{NAME}.patch", 0)], ids=["as-it-is", "patched"]
)
def test_a_reproduction_exits_1_where_the_fault_is_and_0_where_it_is_not(engines, tmp_path, patch, code):
    done = run_alone(FOLDER / "repro" / f"{NAME}.py", engines.environment(RELEASE), tmp_path, patch=patch)
    assert done.returncode == code, done.stdout + done.stderr
    assert "expected: every request is answered" in done.stdout
