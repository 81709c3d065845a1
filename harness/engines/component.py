"""What a release's own code does with inputs that no engine gives it: component level, and labelled so.

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
    said = {
        "raises": lambda answer: f"raises: {answer['error']} ({answer['site']})",
        "built": lambda answer: f"built {answer['what']}",
    }
    return [
        "component level (the release's builder called directly; no engine, no part of the verdict):",
        *(
            f"  {case:<{width}}  {said.get(one['outcome'], lambda answer: answer['outcome'])(one)}"
            for case, one in answers.items()
        ),
    ]
