"""Which of SGLang's model files are imported into a process that engines are forked from."""

import os
import sys

import pytest

from harness.engine_side.host.import_patches import DISABLED, leave_out_models


@pytest.fixture
def sglang(tmp_path, monkeypatch):
    """A release of three models, which has not been imported."""
    models = tmp_path / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    for file in (tmp_path / "sglang" / "__init__.py", *(models / f"{name}.py" for name in ("llama", "phi", "qwen"))):
        file.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.setenv(DISABLED, "")


@pytest.mark.parametrize(
    ("needed", "left_out"),
    [(("llama",), "phi,qwen"), (("llama", "renamed"), "phi,qwen"), (("llama", "phi", "qwen"), ""), ((), "")],
)
def test_all_but_the_needed_model_files_are_left_out_and_none_where_nobody_knows(sglang, needed, left_out):
    leave_out_models(needed)
    assert os.environ[DISABLED] == left_out


def test_what_a_user_leaves_out_stays_as_it_is(sglang, monkeypatch):
    monkeypatch.setenv(DISABLED, "qwen")
    leave_out_models(("llama",))
    assert os.environ[DISABLED] == "qwen"
