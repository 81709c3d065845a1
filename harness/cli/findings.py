"""`eaglecheck findings`: what is known of SGLang's defects, as an index or a page. It must not run anything."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from harness.cli.outcome import Exit, guarded
from harness.contract.finding_pages import body, issues
from harness.contract.outputs import check_target, write_text
from harness.contract.usage import UsageError, meant


@guarded
def command(
    name: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="A finding, for example F-025. None: the index.")
    ] = None,
    markdown: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the index, or the page, as Markdown; '-': standard output."),
    ] = None,
) -> Exit:
    """Print what was found in SGLang, as an index or a page.

    A page says which releases, what reaches it, the cause, and how to reproduce it.
    """
    # rich's Markdown comes with it, which no other verb should wait for
    from reports.known_issues import index_markdown, page_markdown, render_index, render_page

    known = issues()
    typed, name = name, None if name is None else name.upper()
    if name is not None and name not in known:
        there = f"{len(known)} from {min(known)} to {max(known)}, some numbers are left out"
        raise UsageError(
            f"unknown finding {typed!r}{meant(name, known)}\n  there are {there}; all of them:  eaglecheck findings"
        )
    page = index_markdown(known.values()) if name is None else page_markdown(known[name], body(name))
    if markdown is not None:
        check_target(markdown, option="markdown")
        write_text(page, markdown, option="markdown")
    elif name is None:
        render_index(Console(), known.values())
    else:
        render_page(Console(), page)
    return Exit.PASS
