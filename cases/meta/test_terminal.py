"""Each page that a person reads about a run, once word for word; and what must hold for any of them anywhere."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from cases import catalogue
from cases.meta import results
from harness.checks.describe import WHAT
from harness.cli.documents import cell_document
from harness.contract.known_issues import Known
from harness.contract.settings import SpecConfig
from harness.contract.types import Kind
from harness.driving.progress import Booted, Judged, Preparing, Started, Stepped
from harness.driving.results import Cost
from harness.engines.envs import EngineEnv
from harness.machines.doctor_gpu import Answer
from harness.machines.text import render_doctor, render_engines
from reports.findings import render_findings, render_first
from reports.live import LiveLine, drafted
from reports.matrix import render_matrix
from reports.prose import say_pairs
from reports.replay import answer, render_replay
from reports.terminal import render_run

NO_BOOT = (
    "the engine ended with code 1 while booting: ModuleNotFoundError: No module named 'sglang'; "
    "full log: runs/20261128-0036-dbc5/engine.log\n"
    "  it ends with:\n"
    "  Traceback (most recent call last):\n"
    "  ModuleNotFoundError: No module named 'sglang'"
)


def printed(render, *arguments, width=80, terminal=False, **options):
    """What `render` prints on a console of that width."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system="standard" if terminal else None)
    render(console, *arguments, **options)
    return out.getvalue()


def passing():
    return results.run_of(results.judged("single"), results.judged("four-together", wants=("batch_shrinks",)))


def failing():
    return results.run_of(
        results.judged("single"),
        results.judged("pr25015", results.one_ahead),
        results.judged("pr26329", results.chunk_tail),
    )


def unknown():
    return results.run_of(results.judged("single"), results.without_engine("four-together", NO_BOOT))


RUNS = pytest.mark.parametrize("make", [passing, failing, unknown], ids=lambda make: make.__name__)


@RUNS
def test_run(make, snapshot):
    assert printed(render_run, make()) == snapshot


@pytest.mark.parametrize("width", [40, 400])
@RUNS
def test_at_any_width_nothing_is_lost_commands_stay_whole_and_the_verdict_is_the_last_line(make, width):
    run = make()
    text = printed(render_run, run, width=width)
    assert sorted(text.split()) == sorted(printed(render_run, run).split())
    assert text.splitlines()[-1].startswith(f"verdict {run.verdict.outcome}: ")
    typed = [f"eaglecheck recheck {run.folder}"] if make is failing else []
    for one in run.results[1:] if make is failing else ():
        typed += [f"eaglecheck recheck {one.folder}", f"eaglecheck replay {one.reproducer}"]
    assert {*typed} <= {line.partition(":  ")[2] for line in text.splitlines()}


def test_a_finding_of_every_kind(snapshot):
    pages = []
    for kind in WHAT:
        found = replace(results.EVERY_KIND[kind], first=True)
        identical = None if kind in (Kind.CRASH, Kind.HANG) else kind is not Kind.TOKEN
        pages.append(printed(render_findings, [results.with_divergences("every-kind", found, identical=identical)]))
        assert f"signature {found.signature}" in pages[-1]
    assert "".join(pages) == snapshot


def test_a_finding_that_repeats_and_has_consequences_counts_both():
    first = replace(results.EVERY_KIND[Kind.POSITION], first=True)
    again = replace(first, first=False, round=13, key=replace(first.key, rid="r2", committed=60))
    follows = replace(results.EVERY_KIND[Kind.NUMERIC], cause=first.signature)
    text = printed(render_findings, [results.with_divergences("spread", first, again, follows)])
    assert "1 more in this scenario; " in text
    assert "r1, r2" in text
    assert "1 more in this scenario follows from" in text
    assert text.count("signature ") == 1


def test_more_findings_than_anyone_reads_are_counted():
    many = [results.with_divergences(f"s{number}", found) for number, found in enumerate(results.EVERY_KIND.values())]
    text = printed(render_findings, many)
    assert text.count("signature ") == 8
    assert f"{len(many) - 8} more findings" in text


def test_a_signature_is_printed_once_with_the_scenarios_that_show_it():
    many = [results.with_divergences(f"s{number}", results.EVERY_KIND[Kind.POSITION]) for number in range(3)]
    text = printed(render_findings, many)
    assert text.count("signature ") == 1
    assert "  also in 2 other scenarios: s1, s2\n" in text


def cells():
    sound, bad = results.judged("pr25015"), results.judged("pr25015", results.one_ahead)
    tail, gone = (
        results.judged("pr26329", results.chunk_tail),
        results.without_engine("pr26329", "the engine did not boot"),
    )
    table = [
        ("0.5.11", None, bad, "FAIL"),
        ("0.5.12.post1", None, sound, "PASS"),
        ("0.5.12.post1", None, tail, "FAIL"),
        ("0.5.23", 25015, bad, "FAIL"),
        ("0.5.23", 26329, gone, "FAIL"),
        ("0.5.23", None, bad, "PASS"),
    ]
    return [
        cell_document(
            results.run_of(one, release=release, revert=revert),
            one,
            case=one.scenario.name,
            expected=expected,
            as_expected=catalogue.load(one.scenario.name).as_expected(
                expected, one.verdict.outcome, one.verdict.root_kinds
            ),
        )
        for release, revert, one, expected in table
    ]


def test_first_finding_of_a_cell_names_cell_count_and_signature_and_counts_the_others():
    position, numeric = results.EVERY_KIND[Kind.POSITION], results.EVERY_KIND[Kind.NUMERIC]
    first = replace(position, first=True)
    one = results.with_divergences("pr25015", first, replace(position, round=13), numeric)
    lines = printed(render_first, one, where="pr25015 on SGLang 0.5.13 with #25015 reverted").splitlines()
    assert lines[1] == "pr25015 on SGLang 0.5.13 with #25015 reverted"
    assert any("1 more in this scenario" in line and "r1" in line for line in lines)
    assert f"  signature {first.signature}" in lines
    assert f"  1 other finding: {numeric.signature}" in lines


def test_matrix(snapshot):
    assert printed(render_matrix, cells()) == snapshot


def test_matrix_that_is_as_expected_says_so():
    last = printed(render_matrix, cells()[:4]).splitlines()[-1]
    assert last.startswith("verdict PASS (as expected): 4 cells")
    assert "all as expected" in last


@pytest.mark.parametrize("width", [80, 150])
def test_matrix_lines_fit_the_terminal(width):
    table = printed(render_matrix, cells(), width=width).split("not as expected")[0]
    assert max(len(line) for line in table.splitlines()) <= width


def test_live_lines_where_there_is_no_terminal(snapshot):
    def render(console):
        run = failing()
        with LiveLine(console) as line:
            for second in range(3):
                line(Preparing(text=f"SGLang 0.5.23 booting ({second} s)"))
            line(Booted(header={**results.HEADER, "replaced": results.REPLACED, "revert": 25015}, seconds=23.4))
            for number, one in enumerate(run.results, 1):
                line(Started(scenario=one.scenario, index=number, total=12))
                line(Stepped(scheduler_step=0, state={"running": ["a"], "waiting": []}))
                line(Judged(result=one))
            line(Preparing(text="SGLang 0.5.23 booting (0 s)"))
            line(Booted(header={**results.HEADER, "replaced": results.REPLACED, "revert": 25015}, seconds=17.6))
            line(Judged(result=unknown().results[1]))

    assert printed(render) == snapshot


def test_without_a_terminal_nothing_is_said_twice_within_a_pulse_and_nothing_is_silent_for_longer():
    now = [0.0]

    def render(console):
        one = passing().results[0]
        with LiveLine(console, clock=lambda: now[0]) as line:
            for second in range(40):
                now[0] = float(second)
                line(Preparing(text=f"SGLang 0.5.23 booting ({second} s)", log=results.RUN / "engine.log"))
            line(Booted(header=results.HEADER, seconds=39.0))
            line(Started(scenario=one.scenario, index=1, total=2))
            for scheduler_step in range(40):
                now[0] += 1
                line(Stepped(scheduler_step=scheduler_step, state={"running": ["a"], "waiting": []}))

    booting, *pulses, booted, facts, first, second = printed(render).splitlines()
    assert booting == "SGLang 0.5.23 booting"
    assert [line.partition(";")[0] for line in pulses] == [f"{booting} (15 s)", f"{booting} (30 s)"]
    assert all(line.endswith(f"{results.RUN}/engine.log") for line in pulses)
    assert "39 s" in booted
    assert "EAGLEWorkerV2" in facts
    assert ("step 14, 1 running" in first, "step 29, 1 running" in second) == (True, True)


def test_waiting_for_a_lease_says_at_once_who_has_it():
    text = (
        "SGLang 0.5.23 waiting for a GPU lease (0 s, at most 300 s): GPU 0 (H100): leased to engine process 7 (4 GiB)"
    )

    def render(console):
        with LiveLine(console) as line:
            line(Preparing(text=text))
            line(Preparing(text=text.replace("(0 s", "(1 s")))

    said = "SGLang 0.5.23 waiting for a GPU lease: GPU 0 (H100): leased to engine process 7 (4 GiB)\n"
    assert printed(render) == said


@pytest.mark.parametrize(("used", "over"), [(None, False), (3000, False), (5300, True)])
def test_the_share_of_a_gpu_is_printed_and_whether_it_is_kept(used, over):
    lease = {"card": "NVIDIA H100", "uuid": "GPU-4f1f", "slot": 0, "share_mib": 4096, "used_mib": used}

    def render(console):
        with LiveLine(console) as line:
            line(Booted(header={**results.HEADER, "lease": lease}, seconds=9.0))

    text = printed(render)
    assert "leases 4 GiB of NVIDIA H100 (GPU-4f1f)" in text
    assert ("more than its share; name a larger one:  --gpu-share 6" in text) is over


def test_live_line_on_a_terminal_shows_steps_and_leaves_only_results():
    def render(console):
        one = passing().results[0]
        with LiveLine(console) as line:
            line(Started(scenario=one.scenario, index=1, total=2))
            line(Stepped(scheduler_step=41, state={"running": ["a", "b"], "waiting": ["c"]}))
            console.file.flush()
            line._status._live.refresh()  # a status draws ten times a second; a test does not wait for that
            line(Judged(result=one))

    text = printed(render, terminal=True)
    assert "scenario 1/2 single: scheduler step 41, 2 running, 1 waiting" in text
    (left,) = [line.split() for line in left_on_screen(text)]
    assert left == ["scenario", "1/2", "single", "PASS", "accept", "length", "2.77"]


def left_on_screen(text):
    """The lines that are not blank on a terminal after all of `text`: it may go up and erase lines."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\n)", text):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith("\x1b["):
            lines[row] += part
    return [line for line in lines if line.strip()]


REPLAYS = {
    "failed": lambda: results.run_of(results.judged("pr25015", results.one_ahead)),
    "fixed": lambda: results.run_of(results.judged("pr25015")),
    "fixed-but": lambda: results.run_of(results.judged("pr25015", results.chunk_tail)),
    "error": lambda: results.run_of(results.without_engine("pr25015", NO_BOOT)),
}


@pytest.mark.parametrize(
    ("name", "word"), [("failed", "FAILED"), ("fixed", "FIXED"), ("fixed-but", "FIXED"), ("error", "ERROR")]
)
def test_replay(name, word, snapshot):
    run = REPLAYS[name]()
    said = answer(run, "POSITION:positions:DRAFT:one-ahead")
    assert (said.word, said.others) == (word, name == "fixed-but")
    assert printed(render_replay, run, said) == snapshot


READY = Answer(name="python", status="ok", detail="3.11.7 at /usr/bin/python3")
SMALL = Answer(name="shared memory", status="warn", detail="/dev/shm is 32 MB", fix="mount -o remount,size=1g /dev/shm")
GONE = Answer(name="SGLang 0.5.23", status="missing", detail="not installed", fix="eaglecheck engines install 0.5.23")


def test_doctor(snapshot):
    assert "".join(printed(render_doctor, found) for found in ([READY], [READY, SMALL, GONE])) == snapshot


def environment(version, **options):
    fields = {"python": "python", "pythonpath": (), "torch": "2.13.0+cpu", "ready": True, **options}
    return EngineEnv(version=version, **fields)


def test_engines_list(snapshot):
    engines = [
        (environment("0.5.13", torch="2.11.0+cu128"), "in this environment"),
        (environment("0.5.11", ready=False, why="not installed", torch="unknown"), ""),
        (environment("0.5.12.post1"), ""),
        (environment("0.5.23", ready=False, why="an installation was interrupted"), ""),
        (environment("0.5.18"), "not in our tests; driven with the hooks of 0.5.16"),
    ]
    assert printed(render_engines, engines) == snapshot


def test_a_recheck_names_no_cost_since_it_boots_nothing():
    assert "engine boot" not in printed(render_run, replace(passing(), cost=Cost()))


@pytest.mark.parametrize("width", [20, 80, 300])
def test_pairs_fit_any_width_and_lose_none(width):
    pairs = [(f"point_{number}", number) for number in range(7)]
    text = printed(say_pairs, pairs, width=width)
    assert max(map(len, text.splitlines())) <= max(width, 2 + len("situation_0 0"))
    assert all(f"{name} {count}" in text for name, count in pairs)


def test_a_known_issue_is_named_below_its_finding_once_a_run_and_by_its_id_from_then_on_and_the_verdict_stays():
    first, again = (results.judged(name, results.one_ahead) for name in ("pr25015", "single"))
    known = Known(
        id="F-012",
        title="A `title` of #26329",
        window="0.5.13 and later",
        fixed_in="",
        link="",
        assume=True,
        predicted=True,
    )
    other = replace(known, id="F-017", assume=False)
    signature = first.findings[0].signature
    third = results.without_engine("pd-plugin-bare", "the engine would not start: x")
    run = results.run_of(
        replace(first, known={signature: (known,)}),
        replace(again, known={signature: (known, other)}),
        replace(third, known={"the engine would not start: x": (other,)}),
    )
    lines = printed(render_run, run, width=150).splitlines()
    assert lines[lines.index(f"  signature {signature}") + 3] == f"  {known.line}", "behind where it is in SGLang"
    whole = f"eaglecheck recheck {first.folder.parent} --fresh-reference"
    advice = f"expect what is known, and see what else differs:  {whole} --assume F-012"
    assert [line for line in lines if "--assume" in line] == [advice], "both scenarios show it"
    said = [line for line in lines if line.startswith("  known: ")]
    assert said == [f"  {known.line}", f"  {other.line}"]
    assert lines[lines.index(said[1]) - 1].startswith("no verdict on pd-plugin-bare")
    assert lines[-1].startswith("verdict FAIL: ")


@pytest.mark.parametrize(("reason", "said"), [("length", 1), ("stop", 0)])
def test_a_request_that_none_of_its_stop_tokens_ended_is_named_unless_the_checkpoints_eos_did(reason, said):
    one = results.judged("single", results.sound)
    end = replace(one.trace.ends[0], reason=reason)
    asked = one.scenario.request(end.rid).model_copy(update={"stop_token_ids": (511,)})
    one = replace(
        one, scenario=one.scenario.model_copy(update={"requests": (asked,)}), trace=replace(one.trace, ends=(end,))
    )
    text = printed(render_run, results.run_of(one))
    assert text.count(f"single: request {end.rid} met none of its stop tokens") == said


def test_where_layers_draft_there_are_no_steps_to_count():
    spec = SpecConfig(algorithm="MTP", num_steps=3, eagle_topk=1, num_draft_tokens=4)
    chain = results.judged("single", results.sound)
    layered = replace(chain, scenario=chain.scenario.model_copy(update={"spec": spec}), draft_steps=0)
    assert drafted([layered, layered]) == ("draft layers", 3)
    assert drafted([layered, chain]) == ("draft steps", chain.draft_steps)
    assert drafted([]) == ("draft steps", 0)
    assert "draft layers 3" in " ".join(printed(render_run, results.run_of(layered)).split())


def test_all_that_can_be_assumed_is_named_at_once_with_what_stands_behind_it():
    shared = {"title": "t", "window": "w", "fixed_in": "", "link": "", "assume": True, "predicted": True}
    one = results.judged("pr25015", results.one_ahead)
    signature = one.findings[0].signature
    several = (Known(id="F-013", behind=("F-089",), **shared), Known(id="F-002", **shared | {"assume": False}))
    one = replace(one, known={signature: (*several, Known(id="F-001", **shared))})
    line = next(line for line in printed(render_run, results.run_of(one), width=200).splitlines() if "--assume" in line)
    assert line.endswith(f"{one.folder} --fresh-reference --assume F-001 --assume F-013 --assume F-089")
    kernels = replace(one, known={signature: (several[0], Known(id="F-001", **shared | {"predicted": False}))})
    text = printed(render_run, results.run_of(kernels), width=200)
    assert "see what else differs:  eaglecheck run " in text, "an engine has to run again"
