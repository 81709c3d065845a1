"""`eaglecheck findings`: what is known of SGLang's defects, as an index or a page. It must not run anything."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from harness.cli.documents import check_target, write_text
from harness.cli.outcome import Exit, guarded
from harness.contract.known_issues import body, issues
from harness.contract.usage import UsageError, unknown
from reports.known_issues import index_markdown, page_markdown, render_index, render_page


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
    """Print what was found in SGLang: releases, what reaches it, cause, and how to reproduce it."""
    known = issues()
    if name is not None and name not in known:
        raise UsageError(unknown("finding", name, known))
    page = index_markdown(known.values()) if name is None else page_markdown(known[name], body(name))
    if markdown is not None:
        check_target(markdown, what="markdown")
        write_text(page, markdown, what="markdown")
    elif name is None:
        render_index(Console(), known.values())
    else:
        render_page(Console(), page)
    return Exit.PASS
