"""The pages of docs/findings for people: the index as a table, a page with its facts. It must not judge."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from harness.contract.finding_pages import KnownIssue
from reports.prose import code, markdown_table, say

INTRODUCTION = """# What was found in SGLang

Each finding has a page. Its front matter is the only place that says which releases have the finding, what reaches it
and what it shows as; `eaglecheck` reads it from there. `eaglecheck findings F-025` prints a page.

To add a finding, write a page like the others. `KnownIssue` in `harness/contract/finding_pages.py` says what each key
of the front matter means; settings are conditions by SGLang's names (`harness/contract/conditions.py`), and what has to
happen is a [coverage point](../../ARCHITECTURE.md#words). Then type `make docs`, which generates this index, and run
`pytest cases/meta/test_known_issues.py`. F-005, F-009 and F-019 do not exist.

What was run to find them: [generated scenarios](../evidence/generated.md), [draft families](../evidence/families.md),
[DP attention](../evidence/dp.md), [disaggregation](../evidence/disagg.md), [GPUs](../evidence/gpu.md). What shows
thirteen open ones with SGLang alone: [reproductions](repro/README.md).
"""
#: What `--assume` does, in the words of an index.
ASSUME = {"predicted": "predicted", "replacement kernel": "replacement kernel (CPU)", "not": "–"}


def index_markdown(issues: Iterable[KnownIssue]) -> str:
    """docs/findings/README.md."""
    head = ("finding", "severity", "releases", "fixed in", "seen on", "reached by", "`--assume`", "upstream")
    rows = [
        (
            f"[{one.id}]({one.id}.md) {one.title}",
            ", ".join(one.severity),
            one.window,
            one.fixed_in or "–",
            ", ".join(one.devices),
            _needs(one),
            ASSUME[one.assume],
            one.upstream.state,
        )
        for one in issues
    ]
    return f"{INTRODUCTION}\n{markdown_table(head, rows)}\n"


def page_markdown(one: KnownIssue, body: str) -> str:
    """A page with its front matter as a table below its heading."""
    heading, _, text = body.partition("\n")
    releases = f"{one.window}; seen on {', '.join(one.releases.seen)}"
    facts = [
        ("severity", ", ".join(one.severity)),
        ("releases", f"{releases}; {one.releases.not_run}" if one.releases.not_run else releases),
        ("fixed in", one.fixed_in or "–"),
        ("seen on", ", ".join(one.devices)),
        ("reached by", _needs(one)),
        ("shows as", ", ".join(code(shown) for shown in (*one.signatures, *one.reasons))),
        ("`--assume`", f"{ASSUME[one.assume]}: {one.expects}" if one.expects else ASSUME[one.assume]),
        ("upstream", _upstream(one)),
        ("command", code(one.command)),
        *((f"accept length, {each.text}", code(each.command)) for each in one.cost.measured),
        *([("accept length", f"not measured on the trained pair: {one.cost.not_shown}")] if one.cost.not_shown else []),
    ]
    return f"{heading}\n\n{markdown_table(('', ''), facts)}\n{text}"


def _upstream(one: KnownIssue) -> str:
    pulls = ", ".join(f"#{number}" for number in one.upstream.pulls)
    said = ", ".join(part for part in (one.upstream.reference, pulls, one.upstream.link) if part)
    return f"{one.upstream.state}: {said}".removesuffix(": ")


def _needs(one: KnownIssue) -> str:
    return code(one.needs) if one.needs else "–"


def render_index(console: Console, issues: Iterable[KnownIssue]) -> None:
    shown = Table("finding", "what", "severity", "releases", "--assume", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in shown.columns[2:]:
        column.max_width = 12  # what is left is for the titles
    for one in issues:
        assume = "" if one.assume == "not" else one.assume
        shown.add_row(one.id, one.title, ", ".join(one.severity), one.window, assume)
    console.print(shown)
    say(console, "a page:  eaglecheck findings F-025")


def render_page(console: Console, text: str) -> None:
    """Laid out on a terminal; as it is written for whoever reads it from a pipe."""
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        say(console, text)
