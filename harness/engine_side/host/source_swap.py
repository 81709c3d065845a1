"""Functions of a mutated source file in place of those that a scheduler has.

Engine side: standard library only. A function keeps its identity and gets other code, so whoever imported,
decorated or stored it runs the mutated code too: from the next call on, or, where a boot record names the file, from
the import of its module on, and so in CUDA graphs. It must not know what was changed, or why.
"""

from __future__ import annotations

import gc
import importlib
import resource
import sys
import types
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ...both_sides.codes import changed, compiled
from ..hooks import ImportHooks
from ..replacement_kernels import cpu_canary
from .executed import EXECUTED

#: What a mutated scheduler may take beside what it has; a wrong size must not take the machine's memory.
MORE_BYTES = 6 << 30

Codes = dict[types.CodeType, types.CodeType]


def install(boot: dict[str, Any], hooks: ImportHooks) -> None:
    """What the boot record asks of this scheduler, before it makes anything."""
    if boot["device"] == "cpu" and "kv_canary" in boot["optional_arguments"]:
        cpu_canary.install(hooks)
    for name, file in boot.get("mutated", {}).items():
        hooks.after(name, partial(_at_import, file=file))
    if boot.get("mutable") and boot["device"] == "cpu":  # CUDA reserves more than any card has
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    if boot.get("executed"):
        EXECUTED.install(tuple(boot["executed"]), graphs=boot["device"] == "cuda")


def _at_import(module: types.ModuleType, *, file: str) -> None:
    SWAP.put(module.__name__, file)


@dataclass(slots=True)
class Swap:
    """The files whose functions have other code, and the way back."""

    back: dict[str, Codes] = field(default_factory=dict)

    def to(self, files: dict[str, str]) -> int:
        """Modules as in these files, and every other one as it was; of the module with fewest, how many functions got
        other code.

        LookupError for a module that is not imported, ValueError where a function would have to close over other
        variables.
        """
        for file, back in self.back.items():
            replaced(file, back)
        self.back = {}
        return min((self.put(module, file) for module, file in files.items()), default=0)

    def put(self, module: str, file: str) -> int:
        """The module's functions as in the file, beside those that are already changed."""
        try:  # SGLang imports some where they are first needed
            importlib.import_module(module)
        except ImportError as error:
            raise LookupError(f"{module} is not imported here: {error}") from error
        own = str(sys.modules[module].__file__)
        source, mutated = Path(own).read_text(), Path(file).read_text()
        codes = dict(changed(compiled(source, own), compiled(mutated, own)))
        self.back[own] = {new: old for old, new in codes.items()}
        return replaced(own, codes)


def replaced(file: str, codes: Codes) -> int:
    """Give every living function of a file with one of these codes the other one; how many had one."""
    gc.unfreeze()  # objects from before a fork are not listed otherwise
    living = [one for one in gc.get_objects() if type(one) is types.FunctionType and one.__code__.co_filename == file]
    functions = [one for one in living if one.__code__ in codes]  # code of other files may compare as equal
    for one in functions:
        one.__code__ = codes[one.__code__]
    return len(functions)


SWAP = Swap()
