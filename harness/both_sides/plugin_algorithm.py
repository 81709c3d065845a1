"""Speculative algorithms registered as a plugin of SGLang would: EAGLE in all but what becomes of a hand-over.

Engine side, the names on both: standard library only. It goes through `SpeculativeAlgorithm.register`, which is what
SGLang offers plugins, and leaves SGLang's own algorithms alone. It must not look at requests.
"""

from __future__ import annotations

import copy
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

#: What `SpecConfig.plugin` may say, and the name under which SGLang knows the algorithm.
NAMES = {"bare": "BAREPLUGIN", "none": "NONEPLUGIN", "own": "OWNPLUGIN"}


class PluginError(Exception):
    """The release cannot have the plugin that was asked for."""


def register(info: types.ModuleType, *, kind: str, worker: tuple[str, str]) -> None:
    """Register one algorithm, right after `speculative.spec_info` was imported.

    bare: what the base class asks of a plugin and nothing more. none: with whatever else SGLang calls, and no draft
    input for a hand-over. own: the same, with a draft input of a class of its own. worker: module and class that
    drafts. Raises PluginError where the release cannot have such a plugin.
    """
    registry = sys.modules.get("sglang.srt.speculative.spec_registry")
    if registry is None:
        raise PluginError("this release has no registry for speculative algorithms; 0.5.12 and later have")
    if not hasattr(registry.CustomSpecAlgo, "build_disagg_draft_input"):
        raise PluginError("this release asks no algorithm for a draft input; 0.5.13 and later do")
    builtin = info.SpeculativeAlgorithm
    body: dict[str, Any] = dict.fromkeys(("is_eagle", "supports_spec_v2"), _yes)
    if kind != "bare":
        body |= _not_in_base(builtin, registry.CustomSpecAlgo)
    if kind == "own":
        body["build_disagg_draft_input"] = _own(builtin.EAGLE)
    algorithm = type(f"{kind.title()}Plugin", (registry.CustomSpecAlgo,), body)

    def factory(_server_args: Any) -> Any:
        return getattr(importlib.import_module(worker[0]), worker[1])

    builtin.register(NAMES[kind], supports_overlap=True, spec_class=algorithm)(factory)


def _yes(_algorithm: Any) -> bool:
    return True


def _not_in_base(builtin: Any, base: type) -> dict[str, Any]:
    """What the built-in algorithms can do and a plugin's base class cannot: SGLang calls it on either."""
    return {
        name: found
        for name, found in vars(builtin).items()
        if isinstance(found, types.FunctionType) and not name.startswith("_") and not hasattr(base, name)
    }


def _own(eagle: Any) -> Callable[..., Any]:
    """A builder whose result holds what EAGLE's would, in a class that SGLang has never seen."""

    def build_disagg_draft_input(_algorithm: Any, *args: Any, **kwargs: Any) -> Any:
        made = copy.copy(eagle.build_disagg_draft_input(*args, **kwargs))
        made.__class__ = type("PluginDraftInput", (type(made),), {})
        return made

    return build_disagg_draft_input
