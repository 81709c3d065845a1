"""How an engine ended before its time: a crash, a hang, a leak that SGLang told of itself, or somebody from outside."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.checks.evidence import Evidence
from harness.contract.requests import PLAIN
from harness.contract.scenario import Scenario
from harness.contract.trace import ENDS, Event
from harness.contract.types import Divergence, Key, Kind, Phase
from harness.contract.words import some

#: Folders of what runs in the place of SGLang's own code (`stand_ins`: in older traces).
REPLACEMENTS = ("replacement_kernels", "transfer_backend", "stand_ins")
#: The hint of a stop that is nobody's finding; `judge` takes it out, and with it all that follows from it.
LOST = "ended-from-outside"
#: How SGLang's own checks of a pool say that slots are missing, before the levels that the probe reads can; each pool
#: has a line, and what it holds adds up to its total where nothing is wrong.
LEAKED = re.compile(r"mem(?:ory)? leak detected!.*", re.IGNORECASE | re.DOTALL)
LEVELS = re.compile(r"\b(total|available|evictable|protected|session_held|uncached)(?:_size)?=(\d+)")
#: Requests of a batch that are named.
MOST_NAMED = 8


def stops(evidence: Evidence) -> Iterator[Divergence]:
    """CRASH and HANG events, and with hint LOST what cut the run off from outside."""
    for event in evidence.engine.events:
        if event.name not in ENDS:
            continue
        data = event.data
        lost = lost_by(event)
        yield from _told(event)
        yield Divergence(
            kind=Kind.HANG if event.name == "hang" else Kind.CRASH,
            key=Key.of_rank(int(data.get("dp_rank_reported", event.dp_rank)), str(data.get("phase") or Phase.IDLE)),
            round=int(data.get("round", -1)),
            expected="the batch completes",
            observed=str(data.get("error") or data.get("what") or event.name)
            + _replacement(str(data.get("trace", "")))
            + (f" (on TP rank {data['tp_rank']})" if data.get("tp_rank") else "")
            + _in_batch(evidence.scenario, data.get("rids", ())),
            hint=LOST if lost else site_of(str(data.get("site", ""))),
        )


def _in_batch(scenario: Scenario, rids: Sequence[str]) -> str:
    """Whose batch it was, each with what else than tokens it asks for: the likeliest to be to blame."""
    if not rids:
        return ""
    known = {one.rid: [key for key in one.asked if key not in PLAIN] for one in scenario.sampled.requests}
    named = [f"{rid} ({', '.join(known[rid])})" if known.get(rid) else rid for rid in rids]
    return f"; the last batch was of {some(named, MOST_NAMED)}"


def _told(event: Event) -> Iterator[Divergence]:
    """LEAK where SGLang itself saw it, in its words, and ended for it."""
    leaked = LEAKED.search(str(event.data.get("error", "")))
    for line in leaked[0].splitlines() if leaked else ():
        levels = {name: int(number) for name, number in LEVELS.findall(line)}
        total, held = levels.pop("total", 0), sum(levels.values())
        if total != held:
            yield Divergence(
                kind=Kind.LEAK,
                key=Key.of_rank(int(event.data.get("dp_rank_reported", event.dp_rank)), str(event.data.get("phase"))),
                round=int(event.data.get("round", -1)),
                expected=total,
                observed=f"{held} by SGLang's own check: {line.strip()}",
                hint="lost" if held < total else "freed-twice",
            )
            return


def _replacement(trace: str) -> str:
    """What to add to an error that something of ours raised in the place of SGLang's own code, by its traceback."""
    frames = re.findall(r'^  File "([^"]+)", line \d+, in (\S+)', trace, flags=re.MULTILINE)
    file, function = frames[-1] if frames else ("", "")
    if Path(file).parent.name not in REPLACEMENTS:
        return ""
    module = Path(file).stem
    return f" (refused by our replacement kernel {module}.{function}, called in place of SGLang's)"


def lost_by(event: Event) -> str:
    """Why the engine ended, where somebody ended it, or the machine or ours lacks a kernel; else empty.

    A trace of before this was asked says "killed" of every end without a word, whatever it came from.
    """
    if event.name == "lost":
        return str(event.data.get("what", "ended from outside"))
    if lacks := event.data.get("lacks"):
        return f"SGLang imports {lacks} for other devices only, and uses it on a CPU: {event.data.get('error', '')}"
    if unbuilt := event.data.get("unbuilt"):
        return f"a kernel could not be built on this machine: {unbuilt}"
    error = str(event.data.get("error", ""))
    if error.startswith(NotImplementedError.__name__) and _replacement(str(event.data.get("trace", ""))):
        return f"a replacement kernel of ours does not do all that SGLang's does, which runs on a GPU: {error}"
    unknown = event.name == "crash" and event.data.get("site") == "killed"
    return f"{event.data.get('error', '')}; how is not known" if unknown else ""


def site_of(site: str) -> str:
    """module:function of a crash site; the line would change with every release."""
    return ":".join(site.split(":")[:2])
