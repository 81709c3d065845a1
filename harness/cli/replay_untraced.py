"""`eaglecheck replay --untraced` and `--bare`: is it still there without our probe, or with SGLang alone?

Without a probe there is no trace to judge: only crashes, hangs and texts can be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from harness.archive.store import StoredScenario
from harness.checks.ends import lost_by, site_of
from harness.contract.trace import ENDS, EOS, Trace
from harness.contract.usage import UsageError
from harness.driving.plan import Plan
from harness.driving.pool import EnginePool
from harness.engines.bare import Bare, run_bare
from harness.engines.errors import EngineError
from harness.engines.process import Launch
from harness.search.shrink import ENDING
from reports.replay import Answer

#: Output tokens by request.
Texts = Mapping[str, tuple[int, ...]]
#: SGLang alone boots, compiles and generates in this time, or is ended.
SECONDS = 500.0
#: Signatures of failures that need no trace to be seen, beside how a run ends: which texts come out of it.
TEXTS = ("TOKEN:losslessness:", "TOKEN:finish:", "NONDETERMINISM:seeds:")
#: SGLang alone is given no stop tokens, no temperature and no seed.
TEXTS_ALONE = ("TOKEN:losslessness:",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended too early. kind: CRASH or HANG; empty for an end that says nothing about the failure.

    sites: file:function where it may have been; None where that cannot be seen.
    """

    kind: str
    text: str
    sites: tuple[str, ...] | None = ()

    def is_that_of(self, signature: str) -> bool:
        """Whether it is the stored one. Without the probe a phase is not known, so its place alone is compared."""
        kind, *_, site = signature.split(":", 3)
        return self.kind == kind and (self.sites is None or site in self.sites)


def check_bare(device: str, *, gpu: bool) -> None:
    """UsageError where SGLang alone cannot run. device: of the reproducer; gpu: whether there is one here."""
    why = "this machine has none" if device != "cpu" else "the reproducer is of an engine on a CPU"
    if device == "cpu" or not gpu:
        raise UsageError(
            f"--bare needs a GPU, and {why}\n  see what this machine can run:  eaglecheck doctor; or leave --bare out"
        )


def check_seen(option: str, folder: Path, signature: str) -> None:
    """UsageError for a failure that no such run can show. option: --untraced or --bare."""
    texts = TEXTS if option == "--untraced" else TEXTS_ALONE
    if not signature.startswith((*ENDING, *texts)):
        raise UsageError(
            f"{option}: {signature} needs a trace to be seen; such a run shows crashes, hangs and wrong texts only\n"
            f"  replay it with our probe:  eaglecheck replay {folder}"
        )


def untraced(plan: Plan, stored: StoredScenario, signature: str) -> Answer:
    """SGLang behind the gate, with no hook on a worker or a model and no copy of a tensor."""
    engines = EnginePool(logs=_folder(plan, "untraced"), lease=plan.lease)
    try:
        trace = engines.drive(_launch(plan), stored.scenario)
    except EngineError as error:
        return Answer(word="ERROR", text=f"ERROR: {error}")
    finally:
        engines.end()
    texts = {end.rid: end.output_ids for end in trace.ends}
    return _answer(stored, signature, f"SGLang {plan.env.version}, untraced", ending(trace), texts)


def bare(plan: Plan, stored: StoredScenario, signature: str) -> Answer:
    """SGLang's own engine with the scenario's prompts, none of our code in its processes."""
    if stored.scenario.engine.disaggregation:
        raise UsageError("--bare: the scenario needs two engines that hand requests over\n  leave --bare out")
    found = run_bare(_launch(plan), stored.scenario, folder=_folder(plan, "bare"), seconds=SECONDS)
    where = f"SGLang {plan.env.version} alone"
    if found.texts is None:
        return _answer(stored, signature, where, ending_alone(found), {})
    texts = {
        request.rid: stopped(text, request.stops(stored.engine.header.get(EOS, ())))
        for request, text in zip(stored.scenario.requests, found.texts, strict=True)
    }
    said = _answer(stored, signature, where, None, texts)
    return replace(said, text=f"{said.text}; verify rounds a request: {found.verifies}")


def _launch(plan: Plan) -> Launch:
    (scenario,) = plan.scenarios
    return plan.launch(scenario, lease=plan.lease, probe=False)


def _folder(plan: Plan, what: str) -> Path:
    folder = plan.root / f"{what}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True)
    return folder


def ending(trace: Trace) -> Ending | None:
    """What a crash, a hang or an end from outside said of itself; None for none."""
    found = next(trace.named(*ENDS), None)
    if found is None:
        return None
    if outside := lost_by(found):
        return Ending(kind="", text=f"was ended from outside: {outside}")
    first = (str(found.data.get("error", found.name)).splitlines() or [found.name])[0]
    site = str(found.data.get("site", ""))
    return Ending(
        kind="HANG" if found.name == "hang" else "CRASH",
        text=f"{first} at {site or 'no known place'}, round {found.data.get('round')}, step {found.scheduler_step}",
        sites=(site_of(site) or "any",),
    )


def ending_alone(found: Bare) -> Ending:
    """The same of SGLang alone, by its log."""
    why = "; ".join(found.why) or "its log is empty"
    if not found.booted:
        return Ending(kind="", text=f"ended in its boot: {why}")
    if found.hung:
        return Ending(kind="HANG", text=f"hung after its boot: {why}", sites=None)
    places = f" at {', '.join(found.sites)}" if found.sites else ""
    return Ending(kind="CRASH", text=f"ended after its boot: {why}{places}", sites=found.sites)


def stopped(text: tuple[int, ...], stops: tuple[int, ...]) -> tuple[int, ...]:
    """A text as far as its first stop token, which SGLang alone is not told of."""
    place = next((index for index, token in enumerate(text) if token in stops), len(text))
    return text[: place + 1]


def _compared(stored: StoredScenario, texts: Texts) -> str:
    ends = {end.rid: end.output_ids for end in stored.engine.ends if end.reason in ("length", "stop")}
    other = sorted(rid for rid, tokens in ends.items() if texts.get(rid) != tokens)
    return f"other texts than stored: {', '.join(other)}" if other else "the texts are those stored"


def _answer(stored: StoredScenario, signature: str, where: str, ended: Ending | None, texts: Texts) -> Answer:
    """FAILED where the stored failure itself shows, FIXED where it would have shown and did not, else ERROR."""
    if ended is not None and ended.is_that_of(signature):
        return Answer(word="FAILED", text=f"FAILED: {signature} is still there on {where}: {ended.text}")
    if ended is not None:
        return Answer(word="ERROR", text=f"ERROR: cannot say whether {signature} is there on {where}: {ended.text}")
    compared = _compared(stored, texts)
    if signature.startswith(ENDING):
        return Answer(word="FIXED", text=f"FIXED: {signature} is not there on {where}; {compared}")
    return _answer_by_texts(stored, signature, where, texts)


def _answer_by_texts(stored: StoredScenario, signature: str, where: str, texts: Texts) -> Answer:
    """By the texts that the failure is about: as wrong as those stored, or those of greedy decoding."""
    ends = {end.rid: end.output_ids for end in stored.engine.ends}
    about = {found.key.rid for found in stored.findings if found.signature == signature} & set(ends)
    if signature.startswith("NONDETERMINISM:") or not about:  # between requests
        about = set(ends)
    named = ", ".join(sorted(about))
    if about and all(texts.get(rid) == ends[rid] for rid in about):
        text = f"FAILED: {signature} is still there on {where}: the wrong text of {named} is the one stored"
        return Answer(word="FAILED", text=text)
    greedy = _greedy(stored)
    if about and all(rid in greedy and texts.get(rid) == greedy[rid] for rid in about):
        text = f"FIXED: {signature} is not there on {where}; the text of {named} is that of greedy decoding"
        return Answer(word="FIXED", text=text)
    text = f"ERROR: cannot say whether {signature} is there on {where}: the text of {named} is another than stored"
    return Answer(word="ERROR", text=text)


def _greedy(stored: StoredScenario) -> Texts:
    """What greedy decoding without speculation writes, by the stored reference."""
    said = [] if stored.reference is None else [event.data for event in stored.reference.named("greedy")]
    return {str(one["rid"]): tuple(map(int, one["output_ids"])) for one in said}
