"""The draft families that users run: what `--family` drives and what is generated for it, tables of families.toml.

A family is data over the same records, checks and runner as every other; it must not have code of its own. Nothing
here may import torch, Hypothesis or sglang.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from cases.boots import BY_NAME, OF_FAMILY, Boot, boot_of
from cases.fixed import of_table
from cases.fixed_held import held_texts
from cases.fixed_hicache import host_shapes
from cases.fixed_parts import joining, on_boot, parts
from cases.fixed_recurrent import FEW, recurrent_shapes
from cases.fixed_weights import adapter_shapes, weight_shapes
from cases.fixed_windows import window_shapes
from harness.contract.scenario import Scenario

_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
#: Boot configurations of boots.toml, and some that nothing is generated on.
BOOTS: dict[str, Boot] = {**BY_NAME, **{name: boot_of(name, row) for name, row in _TABLES["boots"].items()}}
#: What a boot configuration is driven through, beside the tables of fixed.toml: by boot, prefix and `only`.
BUILDERS: dict[str, Callable[[Boot, str, tuple[str, ...]], Iterable[Scenario]]] = {
    "apart": lambda boot, prefix, _: _apart(boot, prefix or "apart-"),
    "parts": lambda boot, prefix, only: parts(boot, prefix=prefix, only=only),
    "named": lambda boot, _, only: on_boot(boot, only=only),
    "joining": lambda boot, *_: [joining(boot)],
    "windows": lambda boot, *_: window_shapes(boot),
    "recurrent": lambda boot, _, only: recurrent_shapes(boot, only=only or FEW),
    "hosted": lambda boot, *_: host_shapes(boot),
    "updates": lambda boot, *_: weight_shapes(boot),
    "adapted": lambda boot, *_: adapter_shapes(boot),
    "held": lambda *_: held_texts(),
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of draft. boots: the boot configurations generation takes turns on; sets: what makes `scenarios`.

    some: names of those that a test session drives of a family it was not asked for.
    """

    name: str
    why: str
    boots: tuple[Boot, ...]
    sets: tuple[str, ...]
    some: tuple[str, ...] = ()

    @cached_property
    def scenarios(self) -> tuple[Scenario, ...]:
        """The fixed set that `eaglecheck run --family` drives, which asks for what it must show; made when needed."""
        return tuple(one for each in self.sets for one in _set_of(each))


def _apart(boot: Boot, prefix: str) -> Iterator[Scenario]:
    """A configuration of five steps and a pool that is outgrown: some common shapes, and what happens to a part."""
    few = tuple(_TABLES["names"]["FEW"].split())
    yield from (*of_table("shapes", **boot.given, prefix=prefix, only=few), *parts(boot, prefix=prefix))


def _set_of(text: str) -> Iterator[Scenario]:
    """`WHAT on BOOT… [as PREFIX] [chunk N] [only NAME…]`, see families.toml."""
    said: dict[str, list[str]] = {"what": []}
    words = said["what"]
    for word in text.split():
        if word in ("on", "as", "chunk", "only"):
            words = said[word] = []
        else:
            words.append(word)
    only = tuple(name for word in said.get("only", ()) for name in _TABLES["names"].get(word, word).split())
    chunk, prefix = int(*said.get("chunk", ["0"])), "".join(said.get("as", ()))
    build = BUILDERS.get(said["what"][0]) or partial(_from_tables, said["what"], chunk)
    for name in said["on"]:
        yield from build(BOOTS[name], prefix, only)


def _from_tables(tables: list[str], chunk: int, boot: Boot, prefix: str, only: tuple[str, ...]) -> list[Scenario]:
    return of_table(*tables, **boot.given, prefix=prefix, only=only, chunk=chunk)


FAMILIES: dict[str, Family] = {
    name: Family(
        name=name,
        why=row["why"],
        boots=OF_FAMILY[name],
        sets=tuple(row["sets"]),
        some=tuple(row.get("some", "").split()),
    )
    for name, row in _TABLES["family"].items()
}


def of_family(name: str | None) -> list[tuple[str, Scenario]]:
    """(family, scenario): all of the named family, or some of several where none is named."""
    chosen = FAMILIES.values() if name is None else [FAMILIES[name]]
    return [
        (family.name, scenario)
        for family in chosen
        for scenario in (family.scenarios if name is not None or family.some else ())
        if name is not None or scenario.name in family.some
    ]
