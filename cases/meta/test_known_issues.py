"""docs/findings: every page parses, agrees with itself and with all that is derived from it or names it."""

import ast
import functools
import json
import re
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cases import catalogue, known
from cases.boots import Boot
from cases.families import FAMILIES
from cases.meta import handmade
from cases.meta.command_line import call
from harness.checks import CHECKS
from harness.cli.documents import known_document
from harness.contract import known_issues
from harness.contract.conditions import LARGEST_GRAPH, NO_DRAFT, PREFILL_GRAPHS
from harness.contract.finding_pages import FOLDER, body, issues, read
from harness.contract.json_files import BadDocument
from harness.contract.known_issues import UnknownIssue, assumable, checked, known_as, notes, without_effect
from harness.contract.requests import ADJUSTING, CUTTING
from harness.contract.settings import EngineConfig, SpecConfig
from harness.contract.types import Kind, Phase
from harness.coverage import POINTS
from harness.driving.own_pair import draft_facts
from harness.engines.launch import GRAPH_SIZES, PREFILL_GRAPH_SIZES
from reports.known_issues import index_markdown, page_markdown

ROOT = Path(__file__).parents[2]
ISSUES = pytest.mark.parametrize("one", issues().values(), ids=lambda one: one.id)
ONE, RANKS, IN_GRAPHS = EngineConfig(), EngineConfig(dp_size=2, tp_size=2), EngineConfig(cuda_graph=True)
CHAIN, LAYERS = (
    SpecConfig(algorithm="EAGLE3"),
    SpecConfig(algorithm="MTP", num_steps=3, eagle_topk=1, num_draft_tokens=4),
)


# The pages


@ISSUES
def test_what_it_costs_was_measured_where_it_can_show(one):
    for measured in one.cost.measured:
        made = catalogue.read_scenario(ROOT / measured.command.partition("--scenario-file ")[2])
        assert made.checkpoint == measured.pair
        assert one.releases.has(measured.release)
        assert f"--engine {measured.release} " in measured.command
        assert one.reached_by(made.spec, made.engine, requests=len(made.requests), updates=made.updates)
    shown = page_markdown(one, body(one.id))
    assert all(f"| accept length, {each.text} | `{each.command}` |" in shown for each in one.cost.measured)
    assert one.cost.not_shown in shown


@ISSUES
def test_a_page_has_the_parts_that_a_maintainer_looks_for(one):
    text = body(one.id)
    assert text.startswith(f"# {one.id}: ")
    parts = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert parts == ["Summary", "Reproduction", "Expected and observed", "Cause", "Suggested fix", "Evidence"]
    assert one.title.startswith(text.splitlines()[0].partition(": ")[2])


@ISSUES
def test_a_page_names_only_signatures_of_its_front_matter_and_the_ends_of_its_window(one):
    text = f"{', '.join(one.releases.seen)}; {one.releases.not_run}; {body(one.id)}"
    shown = [name.replace("…", "*") for name in re.findall(r"`((?:[A-Z_]+|…):[^`\s]+:[^`\s]+)`", text)]
    for name in shown:
        assert any(fnmatchcase(name.replace("*", "x"), each) or fnmatchcase(each, name) for each in one.signatures)
    for release in {one.releases.first, one.releases.last} - {"open"}:
        assert re.search(rf"(?<![\d.]){re.escape(release)}(?!\w)", text), release


@functools.cache
def words_of_checks():
    """Every piece of text in the code of the checks: what hints are put together from."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "harness" / "checks").glob("*.py")]
    nodes = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    hints = {part.strip("-") for part in nodes if isinstance(part, str) and 2 < len(part.strip("-")) < 40}
    hints |= {part.replace("_", "-") for part in hints}  # keys of answers
    return hints | {*ADJUSTING, *CUTTING}  # a hint names the keys that were not followed


def made_of(hint, words):
    return hint in words or any(hint.startswith(f"{one}-") and made_of(hint[len(one) + 1 :], words) for one in words)


@ISSUES
def test_its_signatures_are_such_as_our_checks_make(one):
    words = words_of_checks()
    for signature in one.signatures:
        kind, check, phase, hint = signature.split(":", 3)
        assert kind in set(Kind)
        assert phase in set(Phase)
        assert check in CHECKS or check in words
        of_a_place = kind in ("CRASH", "HANG")
        place = r"\*[a-z0-9_/.*]*:[\w<>]+|SIG[A-Z]+"
        assert re.fullmatch(place, hint) if of_a_place else made_of(hint.replace("*", ""), words)


@ISSUES
def test_what_a_page_points_at_exists(one):
    text = page_markdown(one, body(one.id))
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (FOLDER / link).exists(), link
    for path in re.findall(r"cases/[\w./-]+\.(?:json|py)", text):
        assert (ROOT / path).is_file(), path
    for name in re.findall(r"--(?:case|cases|scenario) ([\w-]+)", text):
        fixed = {scenario.name for family in FAMILIES.values() for scenario in family.scenarios}
        assert name in {*catalogue.names(), *fixed}, name
    usual = {*catalogue.names(), *(scenario.name for scenario in next(iter(FAMILIES.values())).scenarios)}
    for line in re.findall(r"eaglecheck run[^`\n]*", text):
        if "--family" not in line:
            assert set(re.findall(r"--scenario ([\w-]+)", line)) <= usual, line


@ISSUES
def test_its_window_is_the_same_wherever_it_is_printed(one):
    row = next(line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith(f"| [{one.id}]"))
    assert f"| {one.window} | {one.fixed_in or '–'} |" in row
    page = call("findings", one.id, code=0)
    assert f"| releases | {one.window}; seen on {', '.join(one.releases.seen)}" in page.stdout
    pointer = known_issues._known(one, "cpu")
    assert f"; {one.window}" in pointer.line
    sorts = {"py": "shown", "patch": "taken away"}
    files = {f"docs/findings/repro/{one.id}.{sort}": word for sort, word in sorts.items()}
    there = {file: word for file, word in files.items() if (FOLDER.parents[1] / file).exists()}
    shown = "".join(f"; {word} by {file}" for file, word in there.items())
    assert pointer.line.endswith(f"{one.upstream.link}{shown}), see  eaglecheck findings {one.id}")
    assert known_document([pointer])[0]["releases"] == one.window
    (said,) = without_effect([one.id], [], release="0.5.23")
    assert said.endswith(f"SGLang {one.window})")
    for name in catalogue.names():
        case = catalogue.load(name)
        if case.finding == one.id:
            assert (case.bad_up_to, case.good_from) == (one.newest_bad, one.fixed_in)
            assert one.releases.has(case.bad_from)
            assert {signature.partition(":")[0] for signature in one.signatures} >= {*case.kinds}


def test_the_index_is_what_the_verb_prints():
    printed = call("findings", "--markdown", "-").stdout
    assert (FOLDER / "README.md").read_text() == index_markdown(issues().values()) == printed
    shown = call("findings", code=0)
    assert all(f" {name} " in shown.stdout for name in issues())


def test_a_finding_is_named_in_any_case():
    assert call("findings", "f-025", "--markdown", "-").stdout == call("findings", "F-025", "--markdown", "-").stdout


#: What a test of a broken file names.
MADE_UP = "F-999"


def test_an_unknown_finding_names_what_it_may_be_and_what_lists_all():
    refused = call("findings", "F-25", code=2)
    assert "unknown finding 'F-25'; did you mean 'F-025'?" in refused.stderr
    assert refused.stderr.endswith("; all of them:  eaglecheck findings\n")
    assert "'25'; did you mean 'F-025'?" in call("findings", "25", code=2).stderr


@pytest.mark.parametrize("name", ["F-9", MADE_UP, "nope"])
def test_a_number_has_no_neighbours(name):
    said = call("findings", name, code=2).stderr
    assert "did you mean" not in said
    assert f"there are {len(issues())} from F-001 to {max(issues())}, " in said
    with pytest.raises(UnknownIssue, match="F-019'\n  allowed: F-003, "):
        checked(["F-019"])


def test_every_finding_that_is_named_anywhere_has_a_page():
    rooms = ("benchmarks", "cases", "docs", "harness", "reference", "reports")
    for path in (*ROOT.glob("*.md"), *(path for room in rooms for path in (ROOT / room).rglob("*.*"))):
        if path.suffix in (".py", ".md", ".json", ".toml", ".html"):
            text = path.read_text()
            lost = {*re.findall(r"\bF-\d{3}\b", text)} - {*issues()} - {"F-005", "F-009", "F-019", MADE_UP}
            assert not lost, path
            assert "docs/" + "findings.md" not in text, path


def test_a_wheel_keeps_the_pages_where_the_code_looks_for_them():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    installed = Path(wheel["sources"]["harness"]).parent
    assert FOLDER == ROOT / "docs" / "findings"
    assert Path(wheel["force-include"]["docs/findings"]) == installed / "docs" / "findings"


PAGE = (FOLDER / "F-028.md").read_text()
COSTS = """
  measured:
    - {pair: trained-eagle1, release: 0.5.23, verifies: 9, expected: 3.0, observed: 2.0, percent: 5.0, command: x}"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("severity: [crash]", "severity: [crsh]", "did you mean 'crash'?"),
        ("devices: [cpu]", "device: [cpu]", "unknown key 'device'; did you mean 'devices'?"),
        ("eagle_topk > 1", "eagle_topkk > 1", "unknown setting 'eagle_topkk'; did you mean 'eagle_topk'?"),
        ("eagle_topk > 1", "open('x')", "a condition has no Call"),
        ("eagle_topk > 1", "eagle_topk >", "is not a condition"),
        ("  last: open", "  last: 0.5.17", "releases.seen names one that is outside 0.5.13 to 0.5.17"),
        ("devices: [cpu]", "devices: [cpu]\nfixed_in: 0.5.24", "fixed_in is there exactly where"),
        ("devices: [cpu]", "devices: [cpu]\nassume: predicted", "expects says what --assume takes"),
        ('{not_shown: "it crashes"}', "{}", "cost says either what was measured or why nothing was"),
        ('{not_shown: "it crashes"}', COSTS, "percent is 5.0; expected 33.3, by its accept lengths"),
        ("id: F-028", "id: F-027", "holds id 'F-027'"),
        ("---\nid", "id", "no front matter"),
        ("severity: [", "severity: ]", "F-028.md: "),
    ],
)
def test_a_page_with_an_error_is_refused_with_its_place(tmp_path, old, new, said):
    assert old in PAGE
    (tmp_path / "F-028.md").write_text(PAGE.replace(old, new, 1))
    with pytest.raises(BadDocument) as refused:
        read(tmp_path)
    assert said in str(refused.value)
    assert str(tmp_path) in str(refused.value)


# --assume


def test_ids_are_checked_and_the_nearest_is_named():
    assert checked(["F-003", "f-003"]) == ("F-003",)
    with pytest.raises(UnknownIssue, match="unknown finding 'F-003X'; did you mean 'F-003'"):
        checked(["F-003x"])
    with pytest.raises(UnknownIssue, match="F-025"):
        checked(["F-025"])


REACHED = {
    "F-003": (SpecConfig(num_steps=3, eagle_topk=2, num_draft_tokens=6), ONE, "cpu"),
    "F-007": (CHAIN, RANKS, "cpu"),
    "F-008": (CHAIN, RANKS, "cpu"),
    "F-010": (LAYERS, ONE, "cuda"),
    "F-011": (LAYERS, ONE, "cpu"),
    "F-012": (LAYERS, ONE, "cuda"),
    "F-020": (LAYERS, IN_GRAPHS, "cuda"),
    "F-027": (LAYERS, IN_GRAPHS, "cuda"),
    "F-035": (CHAIN, ONE, "cpu"),
    "F-036": (CHAIN, EngineConfig(enable_custom_logit_processor=True), "cpu"),
    "F-037": (CHAIN, ONE, "cpu"),
    "F-091": (LAYERS, RANKS, "cpu"),
    "F-114": (SpecConfig(algorithm="EAGLE"), EngineConfig(attention_backend="dsa"), "cuda"),
}


@pytest.mark.parametrize("name", assumable())
def test_what_is_assumed_is_said_where_it_can_show_and_else_that_it_has_no_effect(name):
    spec, engine, device = REACHED[name]
    header, about = {"assumed": [name]}, {"release": issues()[name].releases.seen[0], "device": device}
    assert [line.partition(",")[0] for line in notes(header, spec, engine, **about)] == [f"assumed: {name}"]
    assert without_effect([name], [(SpecConfig(), ONE), (spec, engine)], **about) == []
    assert notes({}, spec, engine, **about) == []
    if issues()[name].keys and not issues()[name].settings:  # any engine reaches it
        assert notes(header, spec, engine, asked=("temperature",), **about) == []
        return
    assert notes(header, SpecConfig(), ONE, **about) == []
    (without,) = without_effect(
        [name], [(SpecConfig(), ONE), (SpecConfig(num_steps=2, eagle_topk=2, num_draft_tokens=6), ONE)], **about
    )
    assert without.startswith(f"--assume {name} has no effect")


@pytest.mark.parametrize("name", [name for name, one in assumable().items() if one.assume == "replacement kernel"])
def test_a_replacement_kernel_that_only_a_cpu_has_has_no_effect_on_a_gpu(name):
    """There SGLang runs as it is: a verdict that says `assumed` would promise what nobody does."""
    (spec, engine, _), about = REACHED[name], {"release": issues()[name].releases.seen[0], "device": "cuda"}
    assert notes({"assumed": [name]}, spec, engine, **about) == []
    (without,) = without_effect([name], [(spec, engine)], **about)
    assert ", a CPU, " in without


@pytest.mark.parametrize(
    ("name", "spec", "engine"),
    [
        ("F-003", SpecConfig(num_steps=3, eagle_topk=1, num_draft_tokens=4), ONE),
        ("F-003", SpecConfig(num_steps=2, eagle_topk=2, num_draft_tokens=4), ONE),
        ("F-007", CHAIN, ONE),
        ("F-012", LAYERS, EngineConfig(radix_cache=False)),
        ("F-020", LAYERS, ONE),
        ("F-011", LAYERS, IN_GRAPHS),
        ("F-010", CHAIN, ONE),
    ],
)
def test_each_setting_that_reaches_it_is_asked(name, spec, engine):
    assert not issues()[name].shows_in(spec, engine, release="0.5.13")


def test_what_a_key_reaches_is_assumed_in_vain_where_no_request_asks_for_it():
    found = [issues()["F-035"].shows_in(CHAIN, ONE, asked=asked) for asked in ((), ("top_p",), ("min_p",), None)]
    assert found == [False, False, True, True]


BOOTS = [boot for family in FAMILIES.values() for boot in family.boots]


def test_boots_assume_what_no_release_is_without_and_nothing_else():
    assumed = {boot.name: boot.assumes for boot in BOOTS if boot.assumes}
    asked_for = ("F-035", "F-037")  # of keys that any generated request may have
    assert assumed["tree"] == ("F-003", *asked_for)
    assert assumed["layers-cache"] == ("F-010", "F-012", *asked_for)
    assert assumed["layers"] == ("F-010", *asked_for)
    assert assumed["dp"] == assumed["pd-ranks"] == ("F-007", "F-008", *asked_for)
    assert assumed["dp-layers"] == ("F-007", "F-010", *asked_for, "F-091")
    assert {assumed[name] for name in ("plain", "small-tree", "eagle3", "pd")} == {asked_for}
    in_graphs = Boot(name="x", why="", spec=LAYERS, engine=IN_GRAPHS).assumes
    assert in_graphs == ("F-010", "F-012", *asked_for), "F-020 is fixed"


# What a signature may be


def scenario(*, algorithm="EAGLE", k=3, t=1, n=4, plugin=None, **engine):
    spec = SpecConfig(algorithm=algorithm, num_steps=k, eagle_topk=t, num_draft_tokens=n, plugin=plugin)
    return handmade.scenario().model_copy(update={"spec": spec, "engine": EngineConfig(**engine)})


#: Of a trace in which everything happened.
ALL = dict.fromkeys(POINTS, 1)


def ids(text, made, *, release, device="cuda", reasons=(), coverage=ALL):
    found = known_as([text], scenario=made, release=release, device=device, reasons=reasons, coverage=coverage)
    return [one.id for one in found.get(text, ())]


PREFILL_OFF, EXTEND_OFF = (f"NUMERIC:extend:{phase}:hidden_out-off" for phase in ("DRAFT_PREFILL", "EXTEND"))
TARGET_OFF, TARGET_NAN = (f"NUMERIC:verify:PREFILL:hidden_out-{how}" for how in ("off", "nan"))
#: Of a config.json that says nothing else.
LLAMA = {"architectures": ["LlamaForCausalLM"]}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WINDOW = {"sliding_window": 4096, "use_sliding_window": True}
STOP, NAN = "TOKEN:finish:ACCEPT:ran-past-stop", "NUMERIC:extend:EXTEND:hidden_out-nan"
FEW = "CRASH:ledger:VERIFY:srt/speculative/eagle_worker_common.py:_compact_accept_to_front"
FREED = "CRASH:ledger:DRAFT:srt/speculative/triton_ops/cache_locs.py:assign_extend_cache_locs_func"
BARE = "the engine would not start: AttributeError: 'BarePlugin' object has no attribute 'create_future_map'"
ROW, AHEAD = "POSITION:verify:VERIFY:one-behind", "POSITION:positions:DRAFT:one-ahead"


@pytest.mark.parametrize(
    ("text", "made", "release", "expected"),
    [
        (PREFILL_OFF, scenario(algorithm="MTP"), "0.5.23", ["F-012"]),
        (PREFILL_OFF, scenario(algorithm="MTP"), "0.5.11", ["F-012", "F-023"]),
        (PREFILL_OFF, scenario(algorithm="MTP", radix_cache=False), "0.5.23", []),
        (PREFILL_OFF, scenario(), "0.5.23", []),
        (PREFILL_OFF, scenario().model_copy(update={"checkpoint": "eagle3-one"}), "0.5.23", ["F-006"]),
        (PREFILL_OFF, scenario().model_copy(update={"checkpoint": "eagle3-normed"}), "0.5.23", ["F-015"]),
        (PREFILL_OFF, scenario(dp_size=2, tp_size=2), "0.5.23", ["F-016"]),
        (STOP, scenario(), "0.5.17", ["F-004"]),
        (STOP, scenario(), "0.5.18", []),
        (STOP, scenario(), "of-a-commit", []),
        (EXTEND_OFF, scenario(algorithm="MTP", disaggregation=True), "0.5.23", ["F-017", "F-089"]),
        (EXTEND_OFF, scenario(algorithm="MTP", disaggregation=True, k=1, n=2), "0.5.23", ["F-089"]),
        (EXTEND_OFF, scenario(), "0.5.11", []),
        (EXTEND_OFF, scenario(overlap_schedule=False), "0.5.11", ["F-001"]),
        (EXTEND_OFF, scenario(cuda_graph=True), "0.5.11", ["F-001"]),
        (AHEAD, scenario(), "0.5.11", ["F-066"]),
        (AHEAD, scenario(), "0.5.12", []),
        (BARE, scenario(disaggregation=True, plugin="bare"), "0.5.13", ["F-018"]),
        (BARE, scenario(), "0.5.13", []),
        (FEW, scenario(k=2, t=2, n=2), "0.5.23", ["F-028"]),
        (FEW, scenario(k=2, t=2, n=3), "0.5.23", []),
        (FEW, scenario(k=2, t=2, n=2), "0.5.12.post1", []),
        (ROW, scenario(k=2, t=8, n=6), "0.5.23", ["F-025"]),
        (ROW, scenario(k=2, t=8, n=6, page_size=4), "0.5.23", []),
        (ROW, scenario(k=2, t=5, n=6), "0.5.23", ["F-025"]),
        (ROW, scenario(k=2, t=2, n=5), "0.5.23", []),
        (ROW, scenario(k=8, n=9), "0.5.23", ["F-025"]),
        (ROW, scenario(k=7, n=8), "0.5.23", []),
        (FREED, scenario(cuda_graph=True, cuda_graph_max_bs=1), "0.5.13", ["F-026"]),
        (FREED, scenario(cuda_graph=True), "0.5.13", []),
        (FREED, scenario(), "0.5.13", []),
        (FREED, scenario(cuda_graph=True, cuda_graph_max_bs=1), "0.5.17", []),
        (NAN, scenario(algorithm="MTP", cuda_graph=True), "0.5.13", ["F-027", "F-029"]),
    ],
)
def test_a_text_points_only_where_release_and_scenario_fit(text, made, release, expected):
    assert ids(text, made, release=release) == expected


TAIL = "EXTEND_INPUT:inputs:DRAFT_PREFILL:chunk-tail-target-guess"
APART = {"algorithm": "MTP", "disaggregation": True}


@pytest.mark.parametrize(
    ("text", "made", "happened", "expected"),
    [
        (EXTEND_OFF, scenario(**APART), {"retracted_on_decode_side": 1}, ["F-017", "F-089"]),
        (EXTEND_OFF, scenario(**APART), {"retracted_on_decode_side": 0}, ["F-017"]),
        (PREFILL_OFF, scenario(algorithm="MTP"), {"prefix_hit": 2}, ["F-012"]),
        (PREFILL_OFF, scenario(algorithm="MTP"), {}, []),
        (TAIL, scenario(), {"non_final_chunk": 1, "retract_resume": 1}, ["F-060"]),
        (TAIL, scenario(), {"non_final_chunk": 1}, []),
    ],
)
def test_an_issue_is_none_where_what_it_needs_did_not_happen(text, made, happened, expected):
    assert ids(text, made, release="0.5.23", coverage=happened) == expected


@ISSUES
def test_what_a_page_needs_to_happen_are_coverage_points(one):
    assert {*one.happened} <= {*POINTS}


def test_a_fix_that_was_taken_out_is_known_on_every_release():
    (known,) = known_as([AHEAD], scenario=scenario(), release="0.5.23", device="cpu", revert=25015)[AHEAD]
    assert "0.5.11, fixed in 0.5.12, https://github.com/sgl-project/sglang/pull/25015" in known.line
    assert known_as([AHEAD], scenario=scenario(), release="0.5.23", device="cpu", revert=26329) == {}


def test_an_issue_of_some_request_is_none_where_no_request_asks_for_it():
    crash = "CRASH:ledger:PREFILL:srt/layers/quantization/unquant.py:apply"
    plain = scenario()
    embedding = plain.requests[0].model_copy(update={"input_embeds": True})
    assert known_as([crash], scenario=plain, release="0.5.23", device="cpu") == {}
    (one,) = known_as(
        [crash], scenario=plain.model_copy(update={"requests": (embedding,)}), release="0.5.23", device="cpu"
    )[crash]
    assert one.id == "F-106"


@pytest.mark.parametrize(
    ("algorithm", "config", "tensors", "expected"),
    [
        ("EAGLE3", {"architectures": ["LlamaForCausalLMEagle3"], "norm_before_residual": True}, ["fc.weight"], "F-015"),
        ("EAGLE3", {"architectures": ["LlamaForCausalLMEagle3"], "norm_before_residual": False}, ["fc.weight"], ""),
        ("EAGLE", {"architectures": ["LlamaForCausalLMEagle"]}, ["fc.weight"], "F-031"),
        ("EAGLE3", {"architectures": ["LlamaForCausalLMEagle3"], "square": True}, ["model.fc.weight"], "F-006"),
        ("EAGLE3", {}, ["layers.0.hidden_norm.weight", "layers.1.input_layernorm.weight"], "F-102"),
        ("EAGLE3", {}, [f"layers.{i}.hidden_norm.weight" for i in range(2)], ""),
        ("EAGLE3", {"hidden_size": 64}, ["fc.weight", "model.embed_tokens.weight"], "F-103"),
        ("EAGLE3", {"hidden_size": 64, "target_hidden_size": 128}, ["fc.weight", "embed_tokens.weight"], ""),
        ("EAGLE", {"architectures": ["LlamaForCausalLMEagle"]}, ["fc.weight", "fc.bias"], ""),
        ("EAGLE", {"architectures": ["LlamaForCausalLM"]}, ["fc.weight", "fc.bias"], "F-032"),
        ("EAGLE", {"architectures": ["Ernie4_5_MoeForCausalLM"]}, ["lm_head.weight"], "F-033"),
    ],
)
def test_a_draft_of_the_users_points_at_what_its_own_files_reach(tmp_path, algorithm, config, tensors, expected):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | config))
    shape = (2, 2) if "square" in config else (2, 4)
    save_file({name: np.zeros(shape, dtype=np.float32) for name in tensors}, tmp_path / "model.safetensors")
    draft = draft_facts(tmp_path, tmp_path)
    found = known_as([PREFILL_OFF], scenario=scenario(algorithm=algorithm), release="0.5.23", device="cpu", draft=draft)
    assert [one.id for one in found.get(PREFILL_OFF, ())] == [expected] * bool(expected)


@pytest.mark.parametrize(
    ("config", "tensors", "facts"),
    [
        ({"draft_vocab_size": 8}, ["fc.weight"], (True, False)),
        ({"draft_vocab_size": 8}, ["fc.weight", "lm_head.weight"], (False, False)),
        ({"draft_vocab_size": None, "eagle_aux_hidden_state_layer_ids": [2]}, ["fc.weight"], (False, True)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}, ["fc.weight"], (False, False)),
    ],
)
def test_what_an_eagle3_head_lacks_or_says_elsewhere_is_seen(tmp_path, config, tensors, facts):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | config))
    save_file({name: np.zeros((2, 4), dtype=np.float32) for name in tensors}, tmp_path / "model.safetensors")
    draft = draft_facts(tmp_path, tmp_path)
    assert (draft.lacks_head, draft.layers_beside) == facts


@pytest.mark.parametrize(
    ("config", "signature", "expected"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, TARGET_OFF, "F-113"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, TARGET_OFF, ""),
        ({"architectures": ["Qwen3ForCausalLM"], **WINDOW}, TARGET_OFF, "F-113"),
        ({"architectures": ["Qwen3ForCausalLM"], **WINDOW, "use_sliding_window": False}, TARGET_OFF, ""),
        ({"architectures": ["GptOssForCausalLM"], **WINDOW}, TARGET_OFF, ""),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, TARGET_OFF, "F-128"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, TARGET_OFF, "F-128"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, TARGET_OFF, ""),
        ({"architectures": ["LlamaForCausalLM"], "quantization_config": BLOCKS}, TARGET_NAN, "F-100"),
        ({"architectures": ["Qwen3ForCausalLM"], "quantization_config": BLOCKS}, TARGET_NAN, ""),
        ({"architectures": ["Qwen3NextForCausalLM"], "linear_num_value_heads": 4}, EXTEND_OFF, "F-095"),
        ({"architectures": ["Qwen3ForCausalLM"]}, EXTEND_OFF, ""),
    ],
)
def test_a_target_of_the_users_points_at_what_its_config_reaches(tmp_path, config, signature, expected):
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    save_file({"fc.weight": np.zeros((2, 4), dtype=np.float32)}, tmp_path / "model.safetensors")
    save_file({"norm": np.zeros(2, dtype=np.float32)}, folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    pair = draft_facts(folder, tmp_path)
    about = {"release": "0.5.23", "device": "cuda", "draft": pair, "coverage": ALL}
    found = known_as([signature], scenario=scenario(algorithm="EAGLE3"), **about)
    assert [one.id for one in found.get(signature, ())] == [expected] * bool(expected)


def test_a_draft_that_is_gone_points_nowhere(tmp_path):
    assert draft_facts(tmp_path, tmp_path / "gone") == NO_DRAFT


def test_what_was_assumed_is_something_else_where_it_still_shows():
    made = scenario(algorithm="MTP")
    assert ids(PREFILL_OFF, made, release="0.5.23", reasons=("assumed: F-012, rows out of the prefix cache",)) == []
    made = scenario(algorithm="MTP", cuda_graph=True)
    assert ids(NAN, made, release="0.5.13", reasons=("assumed: F-027, in CUDA graphs",)) == ["F-029"]


@pytest.mark.parametrize(
    ("graphs", "requests", "expected"), [(True, 4, []), (True, 5, ["F-011"]), (False, 1, ["F-011"])]
)
def test_layers_run_eagerly_without_graphs_or_with_more_requests_than_any_is_captured_for(graphs, requests, expected):
    made = scenario(algorithm="MTP", cuda_graph=graphs)
    made = made.model_copy(update={"requests": made.requests[:1] * requests})
    for what in ("off", "nan"):
        assert ids(f"NUMERIC:verify:VERIFY:hidden_out-{what}", made, release="0.5.13") == expected
    assert max(GRAPH_SIZES) == LARGEST_GRAPH
    assert (min(PREFILL_GRAPH_SIZES) // 2, max(PREFILL_GRAPH_SIZES)) == PREFILL_GRAPHS  # padding at most doubles


@pytest.mark.parametrize(("room", "expected"), [(3, ["F-098"]), (4, ["F-098"]), (5, [])])
def test_states_of_the_last_request_slot_need_as_many_requests_as_may_run(room, expected):
    made = scenario(algorithm="MTP", max_running_requests=room)
    made = made.model_copy(update={"requests": made.requests[:1] * 4})
    assert ids("CRASH:ledger:DRAFT_PREFILL:SIGSEGV", made, release="0.5.11") == expected
    assert ids("CRASH:ledger:DRAFT_PREFILL:SIGSEGV", made, release="0.5.12") == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, ["F-094"]), ({"overlap_schedule": False}, []), ({"t": 2, "n": 6}, []), ({"coverage": {}}, [])],
)
def test_a_verify_is_counted_in_vain_only_where_it_was_in_flight_at_a_retraction(settings, expected):
    coverage = settings.pop("coverage", ALL)
    made = scenario(**settings)
    assert ids("ACCEPT:counts:ACCEPT:spec-verify-ct", made, release="0.5.11", coverage=coverage) == expected


@pytest.mark.parametrize(("device", "offered"), [("cpu", True), ("cuda", False)])
def test_a_replacement_kernel_is_offered_only_where_there_is_one(device, offered):
    signature = "CRASH:ledger:VERIFY:srt/layers/attention/triton_backend.py:init_forward_metadata"
    made = scenario(algorithm="EAGLE3", dp_size=2, tp_size=2)
    (one,) = known_as([signature], scenario=made, release="0.5.23", device=device)[signature]
    assert one.assume is offered


# What a night knows


def test_a_finding_is_known_to_a_night_only_on_its_own_releases_and_in_its_own_cells():
    """What is known of a hand-over must not excuse the same numbers in a chain of its own."""
    assert known.known_as(STOP, "0.5.13", place="generated/eagle/plain").issue == "F-004"
    assert known.known_as(STOP, "0.5.23", place="generated/eagle/plain") is None
    assert known.known_as(EXTEND_OFF, "0.5.13", place="fixed/disagg/pd").issue == "F-089"
    assert known.known_as(EXTEND_OFF, "0.5.13", place="generated/eagle/plain") is None


def test_one_new_signature_makes_the_whole_new():
    place = "generated/eagle/plain"
    assert known.all_known([STOP], "0.5.13", place=place) == {"F-004"}
    assert known.all_known([STOP, "POSITION:positions:DRAFT:one-ahead"], "0.5.13", place=place) == frozenset()
    assert known.all_known([], "0.5.13", place=place) == frozenset()


@pytest.mark.parametrize(
    ("release", "landed", "known"), [("0.5.13", 1, True), ("0.5.13", 0, False), ("0.5.23", 1, False)]
)
def test_what_a_late_write_may_be_is_said_where_one_landed(release, landed, known):
    given = catalogue.read_scenario(ROOT / "cases/scenarios/pd-late-write.json")
    found = ids("NUMERIC:verify:VERIFY:hidden_out-off", given, release=release, coverage={"late_write": landed})
    assert ("F-088" in found) is known
