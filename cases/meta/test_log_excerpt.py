"""What is said of an engine that does not boot: its log, the last exception in it, and what is set."""

import sys
from pathlib import Path

import pytest

from harness.contract.words import brief
from harness.engines.log_excerpt import excerpt
from harness.engines.process import MODELS_BY, SERVES_NO_EAGLE, TAIL_LINES, HostProcess, Launch

BAR = "Multi-thread loading shards:   0% Completed | 0/1 [00:00<?, ?it/s]"
CAPTURE = "Capturing batches (bs=4 avail_mem=130.02 GB):  33%|███▎      | 1/3 [00:01<00:02,  1.20s/it]"
BEGIN = "[2026-11-30 18:58:10] Scheduler hit an exception: Traceback (most recent call last):"
FAREWELL = [
    "[2026-11-30 18:58:10] Received sigquit from a child process. It usually means the child failed.",
    "[2026-11-30 18:58:10] kill_process_tree called: parent_pid=19347, include_parent=True, pid=19347",
    "[2026-11-30 18:58:10] SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
]
NO_HEAD = "AttributeError: 'TransformersForCausalLM' object has no attribute 'get_embed_and_head'"


@pytest.fixture(autouse=True)
def of_nobody(monkeypatch):
    for name in MODELS_BY:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ended(tmp_path):
    """ended(*lines, **server_args): an engine with that log."""

    def make(*lines, **server_args):
        (tmp_path / "log").write_text("\n".join(lines))
        launch = Launch(python=Path(sys.executable), pythonpath=(), boot={"server_args": server_args})
        return HostProcess(launch=launch, log=tmp_path / "log")

    return make


@pytest.mark.parametrize(
    ("lines", "shown", "error"),
    [
        (["", "a", "", "b", ""], ["a", "b"], ""),
        (["a", f"{BAR}\r{CAPTURE}", "3it [00:00, 9.1it/s]"], ["a"], ""),
        ([f"{BAR}[2026-11-30 18:43:21] Load weight end."], ["[2026-11-30 18:43:21] Load weight end."], ""),
        (["[2026-11-30 18:43:21 TP0] 5% of [1:2]"], ["[2026-11-30 18:43:21 TP0] 5% of [1:2]"], ""),
        ([BAR + BEGIN, "  File x", "KeyError: 1", *FAREWELL], [BEGIN, "  File x", "KeyError: 1"], "KeyError: 1"),
        ([BEGIN, "  File x", "torch.cuda.OutOfMemoryError: of 1", "1 GiB", *"abcdef"],
         ["torch.cuda.OutOfMemoryError: of 1", *"abcdef"], "torch.cuda.OutOfMemoryError: of 1"),
        ([BEGIN, "KeyError: 1", "During handling: y", BEGIN, "  File x", "AssertionError"],
         [BEGIN, "KeyError: 1", "During handling: y", BEGIN, "  File x", "AssertionError"], "AssertionError"),
        ([BEGIN, "ValueError: 1", BEGIN, "  cut off"], [BEGIN, "ValueError: 1", BEGIN, "  cut off"], "ValueError: 1"),
        (["[2026-11-30] ValueError: x", "ValueError: y"], ["[2026-11-30] ValueError: x", "ValueError: y"], ""),
        ([BAR, *FAREWELL], [], ""),
    ],
)  # fmt: skip
def test_what_says_nothing_is_left_out_and_the_last_exception_is_there(tmp_path, lines, shown, error):
    (tmp_path / "log").write_bytes("\n".join(lines).encode())
    found = excerpt(tmp_path / "log", most=TAIL_LINES)
    assert (list(found.lines), found.error) == (shown, error)


def test_of_no_log_nothing_is_shown(tmp_path):
    assert excerpt(tmp_path / "none", most=3).lines == ()


def test_where_a_reason_is_cut_to_one_line_the_exception_is_in_it(ended):
    one = ended(BAR, BEGIN, "  File x", "ValueError: no such module", *FAREWELL, stream_interval=3)
    error = "ValueError: no such module"
    for what, because in (("it ended", f": {error}"), (f"it would not start: {error}", "")):
        said = str(one._no_boot(what))
        assert brief(said) == said.splitlines()[0] == f"{what}{because}; full log: {one.log}"
        assert "\n  it ends with:\n  [2026" in said
        assert "started with --server-arg stream_interval=3" in said


def test_a_log_with_nothing_but_progress_is_named_and_not_called_empty(ended):
    assert ended(BAR, *FAREWELL).log_tail() == f"full log: {ended(BAR).log}"


def test_an_engine_that_is_ended_later_says_its_last_exception_too(ended):
    assert "\n  KeyError: 1\n  a\n" in ended(BEGIN, "KeyError: 1", *"abcdef").log_tail()


@pytest.mark.parametrize("name", MODELS_BY)
def test_a_variable_by_which_sglang_has_other_models_is_named_and_no_other_advice_given(ended, monkeypatch, name):
    one = ended(BEGIN, NO_HEAD, *FAREWELL)
    assert SERVES_NO_EAGLE in str(one._no_boot("it ended"))
    monkeypatch.setenv(name, "llama,llama_eagle")
    said = str(one._no_boot("it ended"))
    assert f"{name} is set to llama, llama_eagle," in said
    assert f"  unset {name}" in said
    assert SERVES_NO_EAGLE not in said
    monkeypatch.setenv(name, ",".join(f"m{number}" for number in range(100)))
    assert "m7 and 92 more" in str(one._no_boot("it ended"))
