"""Calls a release's own functions with inputs that no engine gives them (component level).

A decode side asks its release when it boots (see harness.engine_side.host.draft_input_builder). Control side; it must
never count as an engine's run, and is no part of a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def document(handshake: Mapping[str, Any]) -> dict[str, Any]:
    """`component` of a run's JSON; empty where nothing was asked."""
    answers = handshake.get("component")
    if not answers:
        return {}
    return {"component": {"level": "component", "release": handshake["release"], "answers": answers}}


def notes(handshake: Mapping[str, Any]) -> list[str]:
    """What to say of it beside a verdict."""
    answers = handshake.get("component")
    if not answers:
        return []
    width = max(map(len, answers))
    lines = [f"  {case:<{width}}  {_said(answer)}" for case, answer in answers.items()]
    return ["component level (the release's builder called directly; no engine, no part of the verdict):", *lines]


def _said(answer: Mapping[str, str]) -> str:
    match answer["outcome"]:
        case "raises":
            return f"raises: {answer['error']} ({answer['site']})"
        case "built":
            return f"built {answer['what']}"
        case other:
            return other
