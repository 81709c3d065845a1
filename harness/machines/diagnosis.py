"""One answer of the doctor, as plain data. It must not know what was asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One answer. `missing` stops a run, `warn` does not; `mend` is what to type, where typing helps."""

    name: str
    status: Status
    detail: str
    mend: str = ""
