"""Which finding of docs/findings.md a signature may be, by release, device and what the scenario drives.

A pointer for whoever reads a verdict, and nothing else: it must not change one, and nothing here is taken for granted
(that is harness.contract.deviations). Two defects can look alike, so a signature may point at several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from packaging.version import InvalidVersion, Version

from harness.contract.deviations import DEVIATIONS, told_in
from harness.contract.types import Scenario

#: Where it is written up.
BOOK = "docs/findings.md"
#: What is assumed by a stand-in in the engine, which only a CPU has; everything else is predicted by the reference.
BY_STAND_IN = ("F-007", "F-008", "F-011")
#: How a scenario's own checkpoint is called where the defect needs a head of that kind.
ONE_FEATURE, NORMED = "eagle3-one", "eagle3-normed"
#: The most requests that an engine of ours captures a graph for (GRAPH_SIZES of harness.engines.launch).
CAPTURED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenUp:
    """One finding. title: its heading; signatures: patterns; releases: first and last that have it, None: none without.

    reasons: parts of a reason for UNKNOWN that it shows as; drives: whether a scenario can show it.
    """

    id: str
    title: str
    releases: tuple[str, str | None]
    signatures: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    drives: Callable[[Scenario], bool] = lambda _scenario: True

    @property
    def window(self) -> str:
        first, last = self.releases
        return f"{first} and later" if last is None else first if first == last else f"{first} to {last}"

    def on(self, release: str) -> bool:
        """Whether a release has it; one that is no version (a commit's own) is not asked."""
        first, last = self.releases
        try:
            return Version(first) <= Version(release) and (last is None or Version(release) <= Version(last))
        except InvalidVersion:
            return False

    def looks_like(self, text: str) -> bool:
        """Whether a signature, or a reason for UNKNOWN, is one of its own."""
        return any(fnmatchcase(text, one) for one in self.signatures) or any(part in text for part in self.reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What to say of it beside a verdict. assume: whether `--assume` takes it for granted on that device."""

    id: str
    title: str
    window: str
    assume: bool

    @property
    def line(self) -> str:
        told = f"known: {self.id} ({self.title}; {self.window}), see {BOOK}"
        return f"{told}; --assume {self.id} expects it, and tells only what is left" if self.assume else told


def _layers(scenario: Scenario) -> bool:
    return scenario.spec.algorithm == "MTP"


def _layers_in_graphs(scenario: Scenario) -> bool:
    return _layers(scenario) and scenario.engine.graphs


def _layers_beside_graphs(scenario: Scenario) -> bool:
    """Layers that run eagerly: without graphs, or with more requests than any was captured for."""
    return _layers(scenario) and (not scenario.engine.graphs or len(scenario.requests) > CAPTURED)


def _ranks(scenario: Scenario) -> bool:
    return scenario.engine.dp > 1


def _eager_eagle3_ranks(scenario: Scenario) -> bool:
    return _ranks(scenario) and scenario.spec.algorithm == "EAGLE3" and not scenario.engine.graphs


def _handed_over(scenario: Scenario) -> bool:
    return scenario.engine.pd


def _twice_attended(scenario: Scenario) -> bool:
    """The v1 worker, which these releases have without overlap scheduling or for trees; or any inside CUDA graphs."""
    return not _layers(scenario) and (scenario.engine.overlap is False or scenario.spec.t > 1 or scenario.engine.graphs)


WRITTEN_UP = (
    WrittenUp(
        id="F-001",
        title="The v1 EAGLE worker attends draft-extend rows twice (eager, triton backend)",
        releases=("0.5.11", "0.5.12.post1"),
        signatures=("NUMERIC:extend:EXTEND:hidden_out-off",),
        drives=_twice_attended,
    ),
    WrittenUp(
        id="F-002",
        title="An aborted request may return more than `max_new_tokens`",
        releases=("0.5.13", None),
        signatures=("TOKEN:finish:ACCEPT:aborted-ran-past-length", "TOKEN:finish:ACCEPT:aborted-ran-past-stop"),
    ),
    WrittenUp(
        id="F-003",
        title="A draft beam attends the cache of its own slot, not that of its ancestors "
        "(topk > 1, three steps or more)",
        releases=("0.5.12.post1", None),
        signatures=("NUMERIC:chain:DRAFT:hidden_out-off",),
        drives=lambda scenario: DEVIATIONS["F-003"].shows_in(scenario.spec),
    ),
    WrittenUp(
        id="F-004",
        title="A stop token is ignored where the same verify reaches `max_new_tokens`",
        releases=("0.5.11", "0.5.17"),
        signatures=("TOKEN:finish:ACCEPT:ran-past-stop",),
    ),
    WrittenUp(
        id="F-006",
        title="An EAGLE-3 head with one feature as wide as the draft runs without its fc",
        releases=("0.5.12.post1", None),
        signatures=("NUMERIC:extend:DRAFT_PREFILL:hidden_out-off",),
        drives=lambda scenario: scenario.checkpoint == ONE_FEATURE,
    ),
    WrittenUp(
        id="F-007",
        title="An idle rank of DP attention dies in eager EAGLE-3 (triton backend)",
        releases=("0.5.11", None),
        signatures=(
            "CRASH:ledger:DRAFT:*:init_forward_metadata",
            "CRASH:ledger:VERIFY:*:init_forward_metadata",
            "CRASH:ledger:DRAFT:*:draft_topk1_postprocess",
        ),
        drives=_eager_eagle3_ranks,
    ),
    WrittenUp(
        id="F-008",
        title="Ranks of DP attention with different numbers of requests die in eager EAGLE-3 drafting (triton backend)",
        releases=("0.5.11", None),
        signatures=(
            "CRASH:ledger:DRAFT:*/decode_attention.py:decode_attention_fwd",
            "CRASH:ledger:DRAFT:*/triton_backend.py:forward_decode",
        ),
        drives=_eager_eagle3_ranks,
    ),
    WrittenUp(
        id="F-010",
        title="Multi-layer MTP: at the end of every non-final chunk all layers read guesses instead of the prompt "
        "(#26329, not fixed here)",
        releases=("0.5.11", None),
        signatures=(
            "EXTEND_INPUT:inputs:DRAFT_PREFILL:chunk-tail-target-guess",
            "EXTEND_INPUT:inputs:DRAFT_PREFILL:chunk-tail-proposal",
        ),
        drives=_layers,
    ),
    WrittenUp(
        id="F-011",
        title="Multi-layer MTP without CUDA graphs verifies with the attention metadata of an earlier forward",
        releases=("0.5.13", "0.5.15.post1"),
        signatures=(
            "CRASH:ledger:VERIFY:*triton_backend.py:forward_extend",
            "NUMERIC:verify:VERIFY:hidden_out-off",
            "NUMERIC:verify:VERIFY:hidden_out-nan",
        ),
        drives=_layers_beside_graphs,
    ),
    WrittenUp(
        id="F-012",
        title="Multi-layer MTP: a cached prefix ends in another request's tokens in every layer but the first",
        releases=("0.5.13", None),
        signatures=("NUMERIC:extend:DRAFT_PREFILL:hidden_out-off",),
        drives=lambda scenario: _layers(scenario) and scenario.spec.k > 1 and scenario.engine.prefix_cache,
    ),
    WrittenUp(
        id="F-013",
        title="A request that the decode side takes back resumes with the draft state it arrived with",
        releases=("0.5.13", None),
        signatures=("NUMERIC:handoff:PREBUILT:hidden_out-previous-row", "NUMERIC:extend:EXTEND:hidden_out-off"),
        drives=_handed_over,
    ),
    WrittenUp(
        id="F-014",
        title="Under overlap scheduling a prefill side hands over no draft state",
        releases=("0.5.11", "0.5.13"),
        signatures=(
            "NUMERIC:handover:PREBUILT:other-scores-arrived",
            "TOKEN:handover:PREBUILT:other-proposals-arrived",
        ),
        drives=_handed_over,
    ),
    WrittenUp(
        id="F-015",
        title="`norm_before_residual` in an EAGLE-3 head's config is not read",
        releases=("0.5.13", None),
        signatures=("NUMERIC:extend:DRAFT_PREFILL:hidden_out-off",),
        drives=lambda scenario: scenario.checkpoint == NORMED,
    ),
    WrittenUp(
        id="F-016",
        title="An EAGLE-1 Llama head under DP attention drafts from all ranks' rows at once, or hangs",
        releases=("0.5.11", None),
        signatures=(
            "NUMERIC:extend:DRAFT_PREFILL:hidden_out-off",
            "HANG:ledger:DRAFT_PREFILL:*/parallel_state.py:all_reduce",
        ),
        drives=lambda scenario: _ranks(scenario) and scenario.spec.algorithm == "EAGLE",
    ),
    WrittenUp(
        id="F-017",
        title="Multi-layer MTP: a hand-over moves the draft KV of the first layer only",
        releases=("0.5.13", None),
        signatures=("NUMERIC:extend:EXTEND:hidden_out-off",),
        drives=lambda scenario: _handed_over(scenario) and _layers(scenario),
    ),
    WrittenUp(
        id="F-018",
        title="An algorithm that a plugin registers does not get past the scheduler's constructor",
        releases=("0.5.13", None),
        reasons=("object has no attribute 'create_future_map'",),
        drives=lambda scenario: scenario.spec.plugin is not None,
    ),
    WrittenUp(
        id="F-020",
        title="Multi-layer MTP in CUDA graphs: rows that run once more read the states of refused tokens",
        releases=("0.5.11", "0.5.14"),
        signatures=("NUMERIC:extend:EXTEND:hidden_out-off",),
        drives=_layers_in_graphs,
    ),
    WrittenUp(
        id="F-021",
        title="Seeds of requests are not honoured in a sampled verify, although SGLang was asked for determinism",
        releases=("0.5.11", "0.5.16"),
        signatures=("NONDETERMINISM:seeds:ACCEPT:same-seed-other-token",),
    ),
    WrittenUp(
        id="F-022",
        title="What a seed draws depends on whether a neighbour in the batch is greedy, or uses top-k or top-p",
        releases=("0.5.13", None),
        signatures=("NONDETERMINISM:seeds:PREFILL:same-seed-other-token",),
    ),
    WrittenUp(
        id="F-023",
        title="Multi-layer MTP: all layers write into one KV cache, so each but the last attends the last one's",
        releases=("0.5.11", "0.5.12.post1"),
        signatures=("NUMERIC:extend:DRAFT_PREFILL:hidden_out-off", "NUMERIC:extend:EXTEND:hidden_out-off"),
        drives=_layers,
    ),
    WrittenUp(
        id="F-024",
        title="Multi-layer MTP in CUDA graphs dies in its first draft extend under overlap scheduling (triton backend)",
        releases=("0.5.13", "0.5.13"),
        signatures=(
            "CRASH:ledger:VERIFY:*/multi_layer_eagle_draft_extend_cuda_graph_runner.py:replay",
            "CRASH:ledger:DRAFT_PREFILL:*/eagle_utils.py:build_tree_kernel_efficient",
        ),
        drives=_layers,
    ),
    WrittenUp(
        id="F-025",
        title="A tree's reserve outgrows the request's row of the KV map and overwrites the next request's "
        "(pages of one)",
        releases=("0.5.13", None),
        signatures=(
            "NUMERIC:chain:DRAFT:hidden_out-off",
            "NUMERIC:verify:VERIFY:hidden_out-off",
            "PARENT:verify:VERIFY:reference-parent",
            "TOKEN:verify:VERIFY:reference-input",
            "TOKEN:chain:DRAFT:reference-input",
            "POSITION:verify:VERIFY:one-ahead",
            "POSITION:verify:VERIFY:one-behind",
            "CRASH:ledger:EXTEND:*/common.py:raise_error_or_warn",
        ),
        drives=lambda scenario: (
            scenario.engine.page == 1
            and scenario.spec.t > 1
            and scenario.spec.k * scenario.spec.t > scenario.spec.n + 4
        ),
    ),
    WrittenUp(
        id="F-026",
        title="A batch larger than the captured ones leaves the draft graphs with addresses of freed memory",
        releases=("0.5.13", "0.5.13"),
        signatures=(
            "CRASH:ledger:DRAFT:*/cache_locs.py:assign_extend_cache_locs_func",
            "CRASH:ledger:EXTEND:*/batch_result_processor.py:process_batch_result_decode",
        ),
        drives=lambda scenario: scenario.engine.graphs and not _layers(scenario),
    ),
    WrittenUp(
        id="F-027",
        title="Multi-layer MTP in CUDA graphs: layers behind the first attend other requests' rows, or nothing "
        "(triton backend)",
        releases=("0.5.13", "0.5.14"),
        signatures=("NUMERIC:extend:EXTEND:hidden_out-off", "NUMERIC:extend:EXTEND:hidden_out-nan"),
        drives=_layers_in_graphs,
    ),
    WrittenUp(
        id="F-028",
        title="A tree of fewer nodes than a draft has steps ends the engine in its first verify (topk > 1)",
        releases=("0.5.13", None),
        signatures=(
            "CRASH:ledger:VERIFY:*/eagle_worker_common.py:_compact_accept_to_front",
            "CRASH:ledger:VERIFY:*/eagle_worker_v2.py:_compact_accept_to_front",
        ),
        drives=lambda scenario: scenario.spec.t > 1 and scenario.spec.n <= scenario.spec.k,
    ),
    WrittenUp(
        id="F-029",
        title="Multi-layer MTP in CUDA graphs: NaN that a gone request left in a graph's padding reaches a live one "
        "(triton backend)",
        releases=("0.5.13", "0.5.14"),
        signatures=("NUMERIC:extend:EXTEND:hidden_out-nan",),
        drives=_layers_in_graphs,
    ),
)


def known_as(
    texts: Iterable[str], *, scenario: Scenario, release: str, device: str, reasons: Sequence[str] = ()
) -> dict[str, tuple[Known, ...]]:
    """Text -> what it may be, for those of the texts (signatures, or reasons for UNKNOWN) that may be any.

    reasons: of the verdict; what was assumed is predicted, so that what is left is something else.
    """
    assumed = told_in(reasons)
    able = [one for one in WRITTEN_UP if one.on(release) and one.id not in assumed and one.drives(scenario)]
    found = {text: tuple(_known(one, device) for one in able if one.looks_like(text)) for text in dict.fromkeys(texts)}
    return {text: known for text, known in found.items() if known}


def _known(one: WrittenUp, device: str) -> Known:
    assume = one.id in DEVIATIONS and (device == "cpu" or one.id not in BY_STAND_IN)
    return Known(id=one.id, title=one.title, window=one.window, assume=assume)
