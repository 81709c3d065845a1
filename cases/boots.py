"""Boot configurations that generated scenarios run on: the tables of `boots.toml`, which says how to add one.

It must not draw anything and must not import Hypothesis or torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from packaging.version import Version

from cases.fixed import CHECKPOINT, VOCAB, boot_program
from harness.contract.known_issues import assumable
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig, SpecConfig
from harness.contract.usage import unknown

#: Of an op update: source and selector.
Take = tuple[Literal["disk", "tensor"], Literal["target", "draft", "all"]]
#: Token ids of prompts that are text.
BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """One boot configuration, and what it is for. text: generated prompts are text.

    since: the oldest release that nights and generation plan it on, which says nothing of what can be driven; before:
    why not on older ones, where `harness.driving.refusals` does not refuse it.
    successor: the pair whose weights its engine is given while it serves; takes: from where, and whose.
    """

    name: str
    why: str
    checkpoint: str = CHECKPOINT
    spec: SpecConfig = field(default_factory=SpecConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    since: str = "0"
    before: str = "what it shows there was not looked at"
    text: bool = False
    successor: str = ""
    takes: tuple[Take, ...] = ()

    @property
    def vocab(self) -> int:
        """Token ids that prompts are drawn below."""
        return BYTES if self.text else VOCAB

    @property
    def spelled(self) -> bool:
        """Whether its engine has a tokenizer, so that requests can have grammars and stop strings."""
        return not self.engine.skip_tokenizer_init

    @property
    def assumes(self) -> tuple[str, ...]:
        """Known issues that no release is without, and that would fail it if they were not assumed."""
        return tuple(name for name, one in assumable().items() if one.shows_in(self.spec, self.engine))

    @property
    def given(self) -> dict[str, Any]:
        """What a scenario on it takes from it."""
        return {"checkpoint": self.checkpoint, "spec": self.spec, "engine": self.engine}

    def program(self, prefix: str) -> Callable[..., Scenario]:
        """Makes scenarios on it, as `cases.fixed.boot_program`."""
        return partial(boot_program, prefix=prefix, checkpoint=self.checkpoint, spec=self.spec, engine=self.engine)

    def planned_on(self, release: str) -> bool:
        """Whether nights and generation have it there; `eaglecheck run` drives it also where they have not."""
        return Version(release) >= Version(self.since)

    def boot_key(self) -> str:
        return Scenario(
            name="x",
            **self.given,
            requests=(RequestSpec(rid="x", input_ids=(1,)),),
            script=(Op(kind="submit", rids=("x",)), Op(kind="drain")),
        ).boot_key()


def spec_of(text: str, **more: Any) -> SpecConfig:
    """`ALGORITHM STEPS`, a chain, or `ALGORITHM STEPS TOPK NODES`; more: of SpecConfig, token_map as ranges."""
    algorithm, steps, *tree = text.split()
    topk, nodes = tree or (1, int(steps) + 1)
    if "token_map" in more:
        more["token_map"] = [token for ends in more["token_map"] for token in range(*ends)]
    given = {"algorithm": algorithm, "num_steps": steps, "eagle_topk": topk, "num_draft_tokens": nodes, **more}
    return SpecConfig.model_validate(given, strict=False)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both, and of what is in both the one above; tables in them alike."""
    both = {key: _merged(below[key], above[key]) for key in below.keys() & above if isinstance(above[key], dict)}
    return {**below, **above, **both}


def boot_of(name: str, row: Mapping[str, Any], family: Mapping[str, Any] = MappingProxyType({})) -> Boot:
    """The boot configuration of a table like those of boots.toml."""
    given = {"spec": "EAGLE 3", "uses": "", "engine": {}, "why": "", **family, **row}
    if "since" in row and "before" not in row:  # the family's is about another release
        given.pop("before", None)
    if "before" in given:
        given["before"] = REASONS[given["before"]]
    settings = [family.get("engine", {}), *(SETTINGS[one] for one in given["uses"].split()), row.get("engine", {})]
    more = {key: given[key] for key in ("adaptive", "token_map") if key in given}
    return Boot(
        name=name,
        why=family.get("why", "") + row.get("why", ""),
        spec=spec_of(given["spec"], **more),
        engine=EngineConfig.model_validate(reduce(_merged, settings), strict=False),
        takes=tuple((source, selector) for source, selector in given.get("takes", ())),
        **{key: given[key] for key in ("checkpoint", "since", "before", "text", "successor") if key in given},
    )


def reasons_of(tables: Mapping[str, Any]) -> dict[str, str]:
    """Sentences of `before` by name; ValueError for a name that is not there, and for one that nothing has."""
    reasons: dict[str, str] = tables["reasons"]
    rows = [*tables["family"].values(), *(row for rows in tables["boot"].values() for row in rows.values())]
    used = {row["before"] for row in rows if "before" in row}
    for name in sorted(used - reasons.keys()):
        raise ValueError(f"before: {unknown('reason', name, reasons)}")
    for name in sorted(reasons.keys() - used):
        raise ValueError(f"[reasons] {name}: nothing has it as its `before`\n  leave it out")
    return reasons


_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
#: Settings of EngineConfig that several boot configurations share, by a word.
SETTINGS: dict[str, dict[str, Any]] = _TABLES["settings"]
REASONS = reasons_of(_TABLES)
BY_NAME: dict[str, Boot] = {
    name: boot_of(name, row, _TABLES["family"][family])
    for family, rows in _TABLES["boot"].items()
    for name, row in rows.items()
}
#: family -> the boot configurations that generation takes turns on.
OF_FAMILY: dict[str, tuple[Boot, ...]] = {
    family: tuple(BY_NAME[name] for name in (*given.get("also", ()), *_TABLES["boot"][family]))
    for family, given in _TABLES["family"].items()
}
OUTGROWN = SETTINGS["outgrown"]
