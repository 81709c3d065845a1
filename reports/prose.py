"""Text as it is laid out: on a terminal, without breaking lines, and in Markdown.

A broken line cannot be copied, and what we print is meant to be typed. This module must not know what it prints.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 3  # blanks between two pairs
INDENT = "  "


def say(console: Console, text: str | Text = "", *, style: str = "") -> None:
    """One or several lines as they are: no markup, no highlighting, no line breaks of ours."""
    line = text if isinstance(text, Text) else Text(text)
    if style:
        line.stylize(style)
    console.print(line, soft_wrap=True, highlight=False)


def say_list(console: Console, lead: str, names: Sequence[str]) -> None:
    """`lead` and comma-separated names, broken between names to fit, later lines indented."""
    room = max(console.width, 40)
    text = f"{INDENT}{lead} {', '.join(names)}"
    for line in textwrap.wrap(text, room, subsequent_indent=INDENT * 2, break_long_words=False, break_on_hyphens=False):
        say(console, f"{INDENT}{line}" if line == text.strip() else line)


def heading(console: Console, text: str) -> None:
    say(console)
    say(console, text, style="bold")


def say_pairs(console: Console, pairs: Sequence[tuple[str, int | str]], *, red: Sequence[str] = ()) -> None:
    """(name, count or text) pairs, down then across, in as many columns of pairs as fit (three at most)."""
    if not pairs:
        return
    name_width = max(len(name) for name, _ in pairs)
    count_width = max(len(str(count)) for _, count in pairs)
    pair_width = name_width + 1 + count_width
    across = max(1, min(3, (console.width - len(INDENT) + GAP) // (pair_width + GAP)))
    down = -(-len(pairs) // across)
    for row in range(down):
        line = Text(INDENT)
        for name, count in pairs[row::down]:
            gap = " " * GAP if len(line) > len(INDENT) else ""
            line.append(f"{gap}{name:<{name_width}} {count:>{count_width}}", style="bold red" if name in red else "")
        say(console, line)


def table_of(columns: Sequence[str], *, right: Sequence[str] = (), folded: str = "", gap: int = 3) -> Table:
    """A table without rows. right: columns of numbers; folded: whose cells may take several lines; gap: of blanks."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, gap - 2))
    for name in columns:
        made.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name != folded,
            overflow="fold" if name == folded else "ellipsis",
        )
    return made


def code(text: str) -> str:
    """A code span of Markdown, whatever is inside; safe in a table cell too."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence, pad = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{pad}{' '.join(text.split())}{pad}{fence}".replace("|", "\\|")


def block(text: str, language: str = "text") -> str:
    """A fenced block of Markdown, whatever is inside."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`+", text)), 3)
    return f"{fence}{language}\n{text}\n{fence}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells that need no more escaping."""
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
