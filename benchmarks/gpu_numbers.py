"""How far an engine's floats are from the truth, against how far a run in its own dtype is: what limits stand on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from harness.contract.align import Aligned, align
from harness.contract.trace import Trace

Ratios = npt.NDArray[np.float64]


@dataclass(slots=True)
class Numbers:
    """Ratios of errors, row by row, over every scenario that was added; by what was compared and where."""

    ratios: dict[str, list[Ratios]] = field(default_factory=lambda: defaultdict(list))

    def add(self, engine: Trace, reference: Trace) -> None:
        aligned = align(engine.rows, reference.rows)
        for name, ratios in [*_hidden(engine, reference, aligned), *_logits(engine, reference, aligned)]:
            self.ratios[name].append(ratios)

    def summary(self) -> dict[str, dict[str, float]]:
        """Rows, median, 99th and 99.9th percentile and greatest of engine error over own error."""
        found = {}
        for name, parts in sorted(self.ratios.items()):
            whole = np.concatenate(parts)
            if len(whole):
                middle, high, higher = np.quantile(whole, (0.5, 0.99, 0.999))
                values = {"p50": middle, "p99": high, "p99.9": higher, "greatest": whole.max()}
                found[name] = {"rows": len(whole), **{key: round(float(value), 3) for key, value in values.items()}}
        return found


def _hidden(engine: Trace, reference: Trace, aligned: Aligned) -> Iterator[tuple[str, Ratios]]:
    phases = engine.rows.strings["phase"][aligned.engine]
    for phase in sorted(set(phases)):
        for side in ("hidden_in", "hidden_out"):
            name = f"{side}.{phase}"
            own = reference.tensors.get(f"own.{name}")
            if own is None or name not in engine.tensors:
                continue
            here = phases == phase
            mine = engine.rows.ints[side][aligned.engine[here]]
            theirs = reference.rows.ints[side][aligned.reference[here]]
            both = (mine >= 0) & (theirs >= 0)
            truth = reference.tensors[name][theirs[both]]
            error = np.abs(engine.tensors[name][mine[both]] - truth).max(axis=1, initial=0.0)
            floor = np.abs(own[theirs[both]] - truth).max(axis=1, initial=0.0)
            yield name, error / np.maximum(floor, 1e-9)


def _logits(engine: Trace, reference: Trace, aligned: Aligned) -> Iterator[tuple[str, Ratios]]:
    own = reference.tensors.get("own.logits")
    if own is None:
        return
    found: dict[str, list[float]] = defaultdict(list)
    for mine, theirs in zip(aligned.engine.tolist(), aligned.reference.tolist(), strict=True):
        ids, values = reference.rows.lists["top_ids"][theirs], reference.rows.lists["top_logits"][theirs]
        logits = dict(zip(engine.rows.lists["top_ids"][mine], engine.rows.lists["top_logits"][mine], strict=True))
        errors = [abs(logits[token] - value) for token, value in zip(ids, values, strict=True) if token in logits]
        if errors and np.isfinite(own[theirs, 0]):
            ratio = float(max(errors)) / max(float(own[theirs, 0]), 1e-9)
            found[f"logits.{engine.rows.strings['phase'][mine]}"].append(ratio)
    for name, ratios in found.items():
        yield name, np.asarray(ratios, dtype=np.float64)
