"""Conditions over what an engine runs with, by SGLang's names: `num_steps * eagle_topk > num_draft_tokens + 4`.

They are written in the pages of docs/findings, and are nothing but comparisons and sums. It must not know any finding.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from types import CodeType

from harness.contract.settings import EngineConfig, SpecConfig
from harness.contract.usage import unknown

#: The most requests that an engine captures a graph for by default (GRAPH_SIZES of harness.engines.launch).
LARGEST_GRAPH = 4
#: The most and the fewest prompt tokens of a batch that a prefill graph is captured for (PREFILL_GRAPH_SIZES there).
PREFILL_GRAPHS = (2, 512)
#: All that a condition may be made of.
GRAMMAR = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.Name, ast.Load, ast.Constant),
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.BinOp, ast.Add, ast.Sub, ast.Mult),
)


#: Settings that a condition calls as we do.
OF_SPEC = ("num_steps", "eagle_topk", "num_draft_tokens")
OF_ENGINE = (
    *("page_size", "attention_backend", "dp_size", "cuda_graph", "prefill_cuda_graph", "radix_cache"),
    *("enable_overlap_plan_stream", "disaggregation", "enable_return_hidden_states", "rejection_sampling"),
    *("enable_custom_logit_processor", "max_running_requests"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFacts:
    """What a condition can say of a draft that the user named: its config's keys, and what its file shows.

    fc_square: fc makes as much as it reads, as of one feature in EAGLE-3. later_input_norm: an EAGLE-3 layer behind the
    first has an input_layernorm and no hidden_norm. brings_embedding: an EAGLE-3 head as wide as its target has one.
    lacks_head: an EAGLE-3 head has a draft_vocab_size and no output head. layers_beside: it names layers outside of
    eagle_config alone. target_architecture: what it drafts for. target_rope_type: how its rotation is scaled, empty
    where it is not. target_window: it has a sliding window in use. target_fp8_blocks: its weights are fp8 in blocks.
    target_recurrent: some of its layers keep recurrent states. index_share: its steps attend one choice of a sparse
    indexer.

    Of a pair of ours nothing: there `checkpoint` says which it is.
    """

    draft_architecture: str = ""
    draft_tie_word_embeddings: bool = False
    norm_before_residual: bool = False
    fc_bias: bool = False
    fc_square: bool = False
    later_input_norm: bool = False
    brings_embedding: bool = False
    lacks_head: bool = False
    layers_beside: bool = False
    target_architecture: str = ""
    target_rope_type: str = ""
    target_window: bool = False
    target_fp8_blocks: bool = False
    target_recurrent: bool = False
    index_share: bool = False


#: Of a draft that is not known.
NO_DRAFT = DraftFacts()


def settings_of(
    spec: SpecConfig,
    engine: EngineConfig,
    *,
    requests: int = 1,
    updates: int = 0,
    checkpoint: str = "",
    draft: DraftFacts = NO_DRAFT,
) -> dict[str, int | bool | str]:
    """What an engine runs with. The only place that knows what our own fields are called.

    updates: how often it is given other weights.
    """
    return {
        **{name: getattr(spec, name) for name in OF_SPEC},
        **{name: getattr(engine, name) for name in OF_ENGINE},
        "disable_overlap_schedule": engine.overlap_schedule is False,
        "enable_hierarchical_cache": bool(engine.server_args.get("enable_hierarchical_cache")),
        "enable_deterministic_inference": engine.deterministic_inference,
        "plugin": spec.plugin is not None,
        "checkpoint": checkpoint,
        **asdict(draft),
        "requests": requests,
        "updates": updates,
        "token_map": spec.token_map is not None,
        "largest_graph": engine.cuda_graph_max_bs or LARGEST_GRAPH,
    }


@cache
def compiled(condition: str) -> CodeType:
    """The code of a condition; ValueError for what is none, or names no setting."""
    try:
        tree = ast.parse(condition, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{condition!r} is not a condition: {error.msg}") from error
    names = settings_of(SpecConfig(), EngineConfig())
    for node in ast.walk(tree):
        if not isinstance(node, GRAMMAR):
            raise ValueError(f"{condition!r}: a condition has no {type(node).__name__}")
        if isinstance(node, ast.Name) and node.id not in names:
            raise ValueError(f"{condition!r}: " + unknown("setting", node.id, names))
    return compile(tree, "<condition>", "eval")


def holds(condition: str, settings: Mapping[str, int | bool | str]) -> bool:
    return bool(eval(compiled(condition), {"__builtins__": {}}, dict(settings)))  # nothing but GRAMMAR is in it
