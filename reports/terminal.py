"""The summary of a run or recheck: counts, coverage points, findings, cost; the verdict comes last.

It must not judge, and must not import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.contract.known_issues import ASSUMED, assumed_by
from harness.contract.one_file import no_file
from harness.contract.providers import JUDGED_BY, NOT_COMPARED, WITNESS, in_words
from harness.contract.settings import EngineConfig
from harness.contract.types import Outcome
from harness.contract.words import counted, percent, some
from harness.coverage import reach_of
from harness.driving.accept_lengths import AcceptLengths
from harness.driving.results import HARDLY, Cost, RunResult, ScenarioResult, accept_lengths_of, mean_accept_length
from reports.findings import render_assume, render_findings, render_known
from reports.live import STYLE, drafted
from reports.prose import heading, say, say_pairs

#: compared counter -> heading
COMPARED = {
    "positions": "positions",
    "tokens": "tokens",
    "proposals": "proposals",
    "accepts": "accepts",
    "extend_inputs": "extend inputs",
    "cache_slots": "cache slots",
    "slots_read": "slots read",
    "parents": "parents",
    "hidden_rows": "hidden rows",
    "masks": "masks",
    "logits": "logit rows",
    "counts": "counts",
    "logprobs": "log-probabilities",
    "returned_states": "returned states",
    "window_slots": "window slots",
    "recurrent_states": "recurrent states",
    "host_rows": "host rows",
    "idle_states": "idle states",
    "token_counts": "token counts",
    "tp_rows": "rows of other TP ranks",
}
NOT_EXERCISED = "not exercised"
#: How reasons begin that say what a verdict does not speak of.
CAVEATS = (NOT_EXERCISED, JUDGED_BY, NOT_COMPARED, ASSUMED, HARDLY)


def render_run(console: Console, result: RunResult, *, notes: Sequence[str] = (), again: str = "") -> None:
    """Counts, coverage points, findings, cost, verdict. notes: what else to know before the verdict.

    again: the line that says what to type next, instead of naming `recheck`, which a recheck must not do.
    """
    printed: set[str] = set()
    render_counts(console, result)
    render_coverage_points(console, result)
    render_findings(console, result.results, look=not again, printed=printed)
    render_cost(console, result)
    render_open(console, result, printed=printed)
    render_assume(console, result.results)
    for note in notes:
        say(console, note)
    say(console, f"run folder: {result.folder}")
    say(console, again or f"judge it again without SGLang:  eaglecheck recheck {result.folder}")
    able = (
        one for one in result.results if one.reproducer and not no_file(one.scenario, own_pair=bool(one.setup.pair))
    )
    if shown := next((one.reproducer for one in able), None):
        say(console, f"one failure as a Python file that needs SGLang alone:  eaglecheck export {shown}")
    say(console)
    say(console, verdict_line(result), style=STYLE[result.verdict.outcome])


WITNESS_IS = "its witness"


def _judge(result: RunResult) -> str:
    """Who judged a run."""
    return WITNESS_IS if any(WITNESS in one.providers.values() for one in result.results) else "the reference"


def render_counts(console: Console, result: RunResult) -> None:
    """What was driven, how much of it differed, and what was compared."""
    mismatches = sum(finding.count for one in result.results for finding in one.findings)
    heading(console, f"SGLang {result.engine} against {_judge(result)}")
    pairs: list[tuple[str, int | str]] = [
        ("scenarios", len(result.results)),
        ("rounds", sum(one.rounds for one in result.results)),
        drafted(result.results),
        ("mismatches", mismatches),
        ("ties", result.verdict.ties),
    ]
    mean, accept = mean_accept_length(result.results), accept_lengths_of(result.results)
    if mean is not None and accept is None:
        pairs.append(("mean accept length", f"{mean:.2f}"))
    say_pairs(console, pairs, red=["mismatches"] if mismatches else [])
    if who := judges(result.results):
        say(console, f"  {who}")
    if accept is not None:
        say(console, f"  accept length: {accept_text(accept)}")
    compared = result.verdict.compared
    if compared:
        heading(console, "compared")
        say_pairs(console, [(title, compared[name]) for name, title in COMPARED.items() if name in compared])


def judges(results: Sequence[ScenarioResult]) -> str:
    """Who judged, and how many rows a witness did not see; empty without a reference."""
    providers = [one.providers for one in results if one.providers]
    missing = [one.witnessed.missing for one in results if one.witnessed.rows]
    if not providers:
        return ""
    without, rows = (sum(column) for column in zip(*missing, strict=True)) if missing else (0, 0)
    return f"{JUDGED_BY} {in_words(providers)}" + (f"; {without} of {rows} rows without a witness" if missing else "")


def accept_text(accept: AcceptLengths) -> str:
    """Expected, observed and lost, and of how many verifies."""
    left = (
        f"; {counted(accept.sampled, 'verify', 'verifies')} of requests that sample left out" if accept.sampled else ""
    )
    return f"{accept.text} (of {counted(accept.verifies, 'verify', 'verifies')}{left})"


def render_coverage_points(console: Console, result: RunResult) -> None:
    """Coverage points that scenarios asked for or the traces prove: scenarios, times, and positions compared inside."""
    lines = sorted(reach_of((one.scenario, one.verdict) for one in result.results), key=lambda line: line.name)
    columns = "{:28} {:>9} {:>8} {:>8} {:>7} {:>10}"
    if lines:
        heading(console, columns.format("coverage points", "asked for", "reached", "seen in", "times", "positions"))
    for line in lines:
        asked = (line.generated, line.reached) if line.generated else ("", "")
        text = columns.format(f"  {line.name}", *asked, line.seen, line.times, line.positions)
        say(console, text, style="bold red" if line.reached < line.generated else "")


def render_cost(console: Console, result: RunResult) -> None:
    """Where the time went; nothing for a recheck, which boots no engine."""
    cost = result.cost
    if cost.total_seconds:
        say(
            console,
            f"\n{counted(cost.boots, 'engine boot')} {cost.boot_seconds:.1f} s, waiting for them "
            f"{cost.waited_seconds:.1f} s ({percent(cost.waited_seconds, cost.total_seconds)}), "
            f"engine {cost.engine_seconds:.1f} s, reference {cost.reference_seconds:.1f} s{_memory(cost)}, "
            f"checks {cost.judge_seconds:.1f} s, store {cost.store_seconds:.1f} s, in all {cost.total_seconds:.1f} s",
        )


def _memory(cost: Cost) -> str:
    """What the reference had at most of what it said before, on a GPU."""
    if not cost.reference_mib:
        return ""
    more = ", more than said" if cost.reference_mib > cost.reference_said_mib else ""
    return f" ({cost.reference_mib / 1024:.1f} of {cost.reference_said_mib / 1024:.1f} GiB said{more})"


def render_open(console: Console, result: RunResult, *, printed: set[str]) -> None:
    """What was not exercised or is taken for granted, and why a verdict is missing."""
    say(console)
    for reason in caveats(result):
        say(console, reason, style="dim")
    for line in dict.fromkeys(line for one in result.results for line in unstopped(one)):
        say(console, line, style="dim")
    for reason, names in unjudged(result).items():
        say(console, f"no verdict on {some(names, 3)}: {reason}")
        render_known(
            console, next(one for one in result.results if reason in one.verdict.reasons), reason, printed=printed
        )


def unstopped(one: ScenarioResult) -> list[str]:
    """Requests whose stop tokens never came, with what they generated: one of those ids would stop them."""
    ends = {end.rid: end.output_ids for end in one.trace.ends if end.reason != "stop"}  # else the checkpoint's EOS did
    return [
        f"{one.scenario.name}: request {each.rid} met none of its stop tokens; it generated {list(ends[each.rid])}"
        for each in one.scenario.requests
        if each.stop_token_ids and each.rid in ends and not {*each.stop_token_ids} & {*ends[each.rid]}
    ]


def unjudged(result: RunResult) -> dict[str, list[str]]:
    """Why scenarios have no verdict: reason -> their names."""
    found: dict[str, list[str]] = {}
    for one in result.results:
        if one.verdict.outcome is Outcome.UNKNOWN:
            for reason in one.verdict.reasons:
                if not reason.startswith(CAVEATS):
                    found.setdefault(reason, []).append(one.scenario.name)
    return found


def caveats(result: RunResult) -> list[str]:
    """What the verdict does not speak of, or took for granted."""
    return [reason for reason in result.verdict.reasons if reason.startswith(CAVEATS)]


def verdict_line(result: RunResult) -> str:
    """One sentence that begins with the verdict."""
    outcomes = [one.verdict.outcome for one in result.results]
    total = counted(len(outcomes), "scenario")
    failed, unknown = outcomes.count(Outcome.FAIL), outcomes.count(Outcome.UNKNOWN)
    judge = _judge(result)
    name = f"SGLang {result.engine}" + (f" with #{result.revert} reverted" if result.revert else "")
    if result.verdict.outcome is Outcome.PASS:
        assumed = assumed_by(result.verdict.reasons)
        given = f", {', '.join(assumed)} assumed" if assumed else ""
        return f"verdict PASS: {name} agrees with {judge} in {total}{given} ({covered(result)})"
    open_ones = f", {unknown} could not be judged" if unknown else ""
    if result.verdict.outcome is Outcome.FAIL:
        kinds = ", ".join(result.verdict.root_kinds)
        by = f", judged by {WITNESS_IS}" if judge == WITNESS_IS else ""
        return f"verdict FAIL: {name} diverges in {failed} of {total} ({kinds}){open_ones}{by}"
    if not unknown:
        return f"verdict UNKNOWN: {name}: only {total} judged"
    return f"verdict UNKNOWN: {name}: {unknown} of {total} could not be judged"


def covered(result: RunResult) -> str:
    """What a PASS speaks of: pairs, algorithms and shapes, how the engine ran, and what ran on kernels of ours."""
    specs, headers = [one.scenario.spec for one in result.results], [one.trace.header for one in result.results]
    own = result.pair and Path(str(result.pair["draft"]["folder"])).name
    pairs = [own] if own else [one.scenario.checkpoint for one in result.results]
    shapes = [f"{one.algorithm}, {one.num_steps} steps × topk {one.eagle_topk}" for one in specs]
    engines = [one.scenario.engine for one in result.results]
    ranks = [_ranks(one) for one in engines if one.tp_size > 1]
    graphs = ["CUDA graphs" if one.cuda_graph else "eager" for one in engines]
    loops = [f"{'overlap' if one.get('overlap') else 'normal'} loop" for one in headers]
    kernels = dict.fromkeys(str(entry["subject"]) for entry in result.replaced)
    facts = (pairs, shapes, [result.device], ranks, graphs, loops)
    said = [" and ".join(dict.fromkeys(words)) for words in facts if words]
    return "; ".join([*said, *([f"{', '.join(kernels)} on replacement kernels"] if kernels else [])])


def _ranks(engine: EngineConfig) -> str:
    return f"{engine.dp_size} DP ranks" if engine.dp_size > 1 else f"{engine.tp_size} TP ranks"
