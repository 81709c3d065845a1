"""The short table of a GPU run, from what its jobs wrote. It computes nothing that the documents do not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_cost import line_of

if TYPE_CHECKING:
    from benchmarks.gpu import Done


def table(done: Sequence[Done], *, wall: float, card: str, at_once: int) -> str:
    """Everything a reader needs first: card, date, verdicts, findings, cost."""
    lines = [f"{card}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC; {len(done)} jobs, {at_once} at once, {wall:.0f} s"]
    for one in done:
        lines.extend(_lines(one))
    lines.extend(_sum([one.document for one in done if one.name.startswith("generated") and one.document], wall))
    return "\n".join(lines) + "\n"


def _lines(one: Done) -> Iterator[str]:
    if one.document is None:
        yield f"{one.name:44} no document, exit {one.code}"
        yield from (f"      {line[:160]}" for line in one.tail.splitlines()[-6:])
    elif one.name.startswith("generated"):
        yield from _generated(one.name, one.document)
    elif one.name.startswith("cost"):
        yield f"{one.name:44} {line_of(one.document)}"
    elif one.name == "workers":
        yield f"{one.name:44} scenarios a minute by workers: {one.document['scenarios_a_minute']}"
    elif one.name.startswith("mutants"):
        yield f"{one.name:44} {one.document.get('verdict')}; unsound: {one.document.get('unsound')}"
        for score in one.document.get("mutants", []):
            yield f"  {score.get('id', '?'):36} {score.get('verdict', '?'):9} {score.get('why', '')[:90]}"
    elif one.name.startswith("pr27338"):
        yield f"{one.name:44} {one.document['verdict']}"
        yield from (f"      {reason[:150]}" for reason in one.document["reasons"][:6])
    else:
        for cell in one.document.get("cells", []):
            kinds = ",".join(cell.get("kinds") or cell.get("root_kinds") or [])
            yield f"{one.name:44} {cell.get('verdict', '?'):8} {kinds:24} expected {cell.get('expected')}"
            yield from (f"      {reason[:150]}" for reason in (cell.get("reasons") or [])[:4])


def _generated(name: str, document: dict[str, Any]) -> Iterator[str]:
    verdicts = " ".join(f"{count} {word}" for word, count in document["verdicts"].items())
    rate = 60 * document["scenarios"] / max(1e-9, document["wall"] - sum(document["boot_seconds"]))
    yield (
        f"{name:44} {verdicts}; {rate:.0f} a minute, boots {document['boot_seconds']}, engine "
        f"{document['spent']['engine']:.0f} s, judged {document['spent']['judged']:.0f} s, "
        f"ties {document['ties']} of {document['choices']}"
    )
    if document["error"]:
        yield f"      {document['error'][:300]}"
    yield from (
        f"      {'' if found['root'] else '(follows) '}{found['signature']}: {found['divergences']} in "
        f"{found['scenarios']} scenarios"
        for found in document["findings"][:8]
    )
    yield from (
        f"      not judged: {reason[:120]} ({count})" for reason, count in list(document["unknown"].items())[:3]
    )


def _sum(documents: Sequence[dict[str, Any]], wall: float) -> Iterator[str]:
    if not documents:
        return
    verdicts: Counter[str] = Counter()
    for document in documents:
        verdicts.update(document["verdicts"])
    boots = [seconds for document in documents for seconds in document["boot_seconds"]]
    engine = sum(document["spent"]["engine"] for document in documents)
    judged = sum(document["spent"]["judged"] for document in documents)
    yield (
        f"generated: {verdicts.total()} scenarios, {dict(verdicts)}; {60 * verdicts.total() / wall:.0f} a minute with "
        f"boots; {len(boots)} boots of {sum(boots) / max(1, len(boots)):.0f} s; outside the engine "
        f"{judged / max(1e-9, judged + engine + sum(boots)):.2f} of a worker's time"
    )
