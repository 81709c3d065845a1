"""`eaglecheck replay --untraced` and `--bare`: is it still there without our probe, or with SGLang alone?

Without a probe there is no trace to judge: only crashes, hangs and texts can be seen.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from harness.archive.store import StoredScenario
from harness.contract.trace import Trace
from harness.contract.usage import UsageError
from harness.driving.live import LiveEngines
from harness.driving.runner import Plan
from harness.engines.bare import run_bare
from harness.engines.errors import EngineError
from harness.engines.launch import build_launch
from harness.engines.process import Launch
from reports.replay import Answer

#: SGLang alone boots, compiles and generates in this time, or is ended.
SECONDS = 500.0
#: Signatures of failures that need no trace to be seen.
ENDING = ("CRASH:", "HANG:")


def untraced(plan: Plan, stored: StoredScenario, signature: str) -> Answer:
    """SGLang behind the gate, with no hook on a worker or a model and no copy of a tensor."""
    engines = LiveEngines(
        environment=lambda _version: plan.env,
        default=plan.env.version,
        device=plan.device,
        logs=_folder(plan, "untraced"),
        lease=plan.lease,
    )
    try:
        trace = engines.drive(_launch(plan), stored.scenario)
    except EngineError as error:
        return Answer(word="ERROR", text=f"ERROR: {error}")
    finally:
        engines.close()
    texts = {end.rid: end.output_ids for end in trace.ends}
    return _answer(signature, f"SGLang {plan.env.version}, untraced", trouble(trace), _compared(stored, texts))


def bare(plan: Plan, stored: StoredScenario, signature: str) -> Answer:
    """SGLang's own engine with the scenario's prompts, none of our code in its processes."""
    if stored.scenario.engine.disaggregation:
        raise UsageError("--bare: the scenario needs two engines that hand requests over\n  leave --bare out")
    found = run_bare(_launch(plan), stored.scenario, folder=_folder(plan, "bare"), seconds=SECONDS)
    where = f"SGLang {plan.env.version} alone"
    if found.texts is None:
        return _answer(signature, where, f"ended {'after' if found.booted else 'in'} its boot: {found.why}", "")
    texts = dict(zip((request.rid for request in stored.scenario.requests), found.texts, strict=True))
    return _answer(signature, where, "", f"{_compared(stored, texts)}; verify rounds a request: {found.verifies}")


def _launch(plan: Plan) -> Launch:
    (scenario,) = plan.scenarios
    target, draft = plan.pairs[scenario.checkpoint]
    return build_launch(
        env=plan.env,
        spec=scenario.spec,
        engine=scenario.engine,
        target=target,
        draft=draft,
        device=plan.device,
        probe=False,
        revert=plan.revert,
        cpu_attention=plan.cpu_attention,
        assumed=plan.assumed,
        lease=plan.lease,
    )


def _folder(plan: Plan, what: str) -> Path:
    folder = plan.root / f"{what}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    folder.mkdir()
    return folder


def trouble(trace: Trace) -> str:
    """What a crash or a hang said of itself; empty for none."""
    found = next((event for event in trace.events if event.name in ("crash", "hang")), None)
    if found is None:
        return ""
    first = str(found.data.get("error", found.name)).splitlines()[0]
    return f"{first} at {found.data.get('site')}, round {found.data.get('round')}, step {found.scheduler_step}"


def _compared(stored: StoredScenario, texts: dict[str, tuple[int, ...]]) -> str:
    ends = {end.rid: end.output_ids for end in stored.engine.ends if end.reason in ("length", "stop")}
    other = sorted(rid for rid, tokens in ends.items() if texts.get(rid) != tokens)
    return f"other texts than stored: {', '.join(other)}" if other else "the texts are those stored"


def _answer(signature: str, where: str, ended: str, texts: str) -> Answer:
    if ended:
        return Answer(word="FAILED", text=f"FAILED on {where}: {ended}")
    if signature.startswith(ENDING):
        return Answer(word="FIXED", text=f"FIXED: {signature} is not there on {where}; {texts}")
    return Answer(word="ERROR", text=f"ERROR: {signature} needs a trace to be seen; on {where} {texts}")
