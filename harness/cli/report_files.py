"""Reports into files: each whole or not at all. It must not know what is in them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from harness.contract import plain_files
from harness.contract.outputs import WriteFailed, cannot_write, writable, write_text
from reports.columns import FRAMES, arrow_schema, frame, join
from reports.frames import trend_row
from reports.markdown import render_markdown
from reports.page import Beside, render_page
from reports.reading import Report


def write_html(report: Report, target: str, *, beside: Beside | None = None) -> list[str]:
    """One page; returns what to say about it."""
    write_text(render_page(report, beside=beside), target, option="html")
    return [] if target == "-" else [f"page: {target}"]


def write_markdown(report: Report, target: str) -> list[str]:
    """The text for an issue or a pull request; returns what to say about it."""
    write_text(render_markdown(report), target, option="markdown")
    return [] if target == "-" else [f"Markdown: {target}"]


def write_csv(report: Report, folder: Path) -> list[str]:
    """<frame>.csv each, UTF-8, with a header line; lists are numbers with blanks between them."""
    for name, table in _frames(report):
        lists = [column.name for column in FRAMES[name] if column.dtype == "list"]
        plain = table.assign(**{one: table[one].map(lambda many: " ".join(map(str, many))) for one in lists})
        _write_whole(folder, f"{name}.csv", plain.to_csv(index=False).encode(), option="csv")
    return [f"CSV: {folder}"]


def write_parquet(report: Report, folder: Path) -> list[str]:
    """<frame>.parquet each, with unit and meaning of each column in its field metadata."""
    for name, table in _frames(report):
        buffer = pa.BufferOutputStream()
        arrow = pa.Table.from_pandas(table, schema=arrow_schema(name), preserve_index=False).replace_schema_metadata()
        pq.write_table(arrow, buffer, compression="zstd")
        _write_whole(folder, f"{name}.parquet", buffer.getvalue().to_pybytes(), option="parquet")
    return [f"Parquet: {folder}"]


def _frames(report: Report) -> Iterable[tuple[str, pd.DataFrame]]:
    """Every frame of the run; of the trends its own row."""
    for name, columns in FRAMES.items():
        if name == "trends":
            row = trend_row(report.source)
            yield name, frame(name, {column.name: [row[column.name]] for column in columns})
        else:
            yield name, join(name, [getattr(one, name) for one in report.frames])


def _write_whole(folder: Path, name: str, content: bytes, *, option: str) -> None:
    try:
        writable(folder, option=option).mkdir(exist_ok=True)
        plain_files.replace(folder / name, content)
    except OSError as error:
        raise WriteFailed(cannot_write(folder / name, str(error.strerror), option)) from error
