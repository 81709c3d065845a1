"""`eaglecheck findings`: what is known of SGLang's defects, as an index or a page. It must not run anything."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

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
        bool, typer.Option("--markdown", help="Print Markdown; the index is then docs/findings/README.md.")
    ] = False,
) -> Exit:
    """Print what was found in SGLang: releases, what reaches it, cause, and how to reproduce it."""
    known = issues()
    if name is not None and name not in known:
        raise UsageError(unknown("finding", name, known))
    if markdown:
        sys.stdout.write(index_markdown(known.values()) if name is None else page_markdown(known[name], body(name)))
    elif name is None:
        render_index(Console(), known.values())
    else:
        render_page(Console(), page_markdown(known[name], body(name)))
    return Exit.PASS
