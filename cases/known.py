"""Findings that are written up in docs/findings.md, by signature and release: what generation need not report anew.

An entry is made only for what was seen on that release, with a specimen; everything else is new. It must not judge.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """finding: its number in docs/findings.md; signatures it shows as; releases it was seen on."""

    finding: str
    what: str
    signatures: frozenset[str]
    releases: tuple[str, ...]


KNOWN: tuple[Known, ...] = (
    Known(
        finding="F-002",
        what="an aborted request that ran past its limit or its stop token",
        signatures=frozenset(
            {"TOKEN:finish:ACCEPT:aborted-ran-past-length", "TOKEN:finish:ACCEPT:aborted-ran-past-stop"}
        ),
        releases=("0.5.13", "0.5.17", "0.5.23"),
    ),
    Known(
        finding="F-004",
        what="a stop token that is ignored where the same verify reaches max_new_tokens",
        signatures=frozenset({"TOKEN:finish:ACCEPT:ran-past-stop"}),
        releases=("0.5.11", "0.5.12.post1", "0.5.13", "0.5.17"),
    ),
)


def known_as(signature: str, release: str) -> Known | None:
    """The written-up finding that `signature` is on `release`; None for a new one."""
    return next((known for known in KNOWN if signature in known.signatures and release in known.releases), None)


def all_known(signatures: Iterable[str], release: str) -> frozenset[str]:
    """The numbers of the findings that explain all signatures; empty if any of them is new."""
    found = [known_as(signature, release) for signature in signatures]
    return frozenset() if None in found else frozenset(known.finding for known in found if known is not None)
