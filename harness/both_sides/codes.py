"""Which functions of a source file have other code in another version of it.

Both sides: standard library only.
"""

from __future__ import annotations

import types
from collections.abc import Iterator

#: Code that runs when it is called, not once at import as a module's or a class's does (inspect.CO_OPTIMIZED).
CALLED = 0x1


def compiled(source: str, file: str) -> types.CodeType:
    """As an import compiles it."""
    return compile(source, file, "exec", dont_inherit=True)


def changed(old: types.CodeType, new: types.CodeType) -> Iterator[tuple[types.CodeType, types.CodeType]]:
    """(old, new) of every function's code that differs, outer ones for what they hold of inner ones."""
    if old == new:
        return
    if old.co_flags & CALLED:
        yield old, new
    inner: dict[tuple[str, int], list[types.CodeType]] = {}
    for one in _inner(new):
        inner.setdefault((one.co_qualname, one.co_firstlineno), []).append(one)
    for one in _inner(old):
        if same := inner.get((one.co_qualname, one.co_firstlineno)):
            yield from changed(one, same.pop(0))


def placed(source: str, other: str) -> bool:
    """Whether giving functions other code makes one of two versions the other: some differ, and no closure does."""
    try:
        pairs = list(changed(compiled(source, ""), compiled(other, "")))
    except (SyntaxError, ValueError):
        return False
    return bool(pairs) and all(old.co_freevars == new.co_freevars for old, new in pairs)


def _inner(code: types.CodeType) -> list[types.CodeType]:
    return [one for one in code.co_consts if isinstance(one, types.CodeType)]
