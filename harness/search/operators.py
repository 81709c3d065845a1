"""One-line faults that a machine can make in Python source: every way to write one expression or statement wrong.

Operators of our own over `ast`: those of mutmut and cosmic-ray can be called without their runners, but bring them
along (textual; SQLAlchemy, aiohttp, GitPython); most of theirs crash where they stand (None for a value, XX in a
string), and they have none for slices, dropped statements, swapped arguments or tensors. Pure: it must not read files.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

#: expression -> [dtype, *shape] of the tensor that it was seen to hold
Tensors = Mapping[str, list[Any]]
#: line -> its tensors; lines that ran have an entry
Lines = Mapping[int, Tensors]
#: file -> its lines
Ran = dict[str, dict[int, dict[str, list[Any]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Source between two places written as `after`. line: where it begins; function: the innermost around it."""

    operator: str
    line: int
    function: str
    start: int
    end: int
    before: str
    after: str


COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
#: What only says or measures: a fault there is no fault of speculation.
SAYS = ("logger", "logging", "print", "warnings", "metrics", "trace", "profile", "assert", "time.")

Rewritten = Iterator[tuple[str, ast.AST]]


def changes(source: str, lines: Lines) -> list[Change]:
    """Every change of the lines that ran, in order of place; `lines` say where tensors are."""
    tree = ast.parse(source)
    finder = _Finder(source=source, lines=lines)
    finder.visit(tree)
    return finder.found


class _Finder(ast.NodeVisitor):
    """Walks functions only: what runs once, at import, is not changed; nor is a kernel, which is compiled."""

    def __init__(self, *, source: str, lines: Lines) -> None:
        self.source, self.lines, self.found = source, lines, list[Change]()
        self._begins = [0]
        for line in source.encode().splitlines(keepends=True):
            self._begins.append(self._begins[-1] + len(line))
        self._ascii = source.isascii()
        #: tensors that expressions of the innermost function held; None outside of functions
        self._scope: dict[str, list[Any]] | None = None
        self._names: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self._names.append(node.name)
        for one in node.body:
            self.visit(one)
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if any("jit" in ast.unparse(one) for one in node.decorator_list):
            return
        outer = self._scope
        self._scope = {
            name: held
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
            for name, held in self.lines.get(line, {}).items()
        }
        self.visit_ClassDef(node)
        self._scope = outer

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def generic_visit(self, node: ast.AST) -> None:
        if self._scope is not None and _only_says(node):
            return
        if self._scope is not None and getattr(node, "lineno", None) in self.lines:
            for operator, written in self._written(node, self._scope):
                self._add(operator, node, written)
        if self._scope is not None and isinstance(node, ast.If | ast.While) and node.test.lineno in self.lines:
            self._add("not", node.test, ast.UnaryOp(ast.Not(), node.test))
        super().generic_visit(node)

    def _written(self, node: ast.AST, scope: Tensors) -> Rewritten:
        for rewrite in REWRITES:
            yield from rewrite(node)
        if isinstance(node, ast.expr):
            yield from _tensor(node, self.lines, scope)

    def _add(self, operator: str, node: Any, written: ast.AST) -> None:
        start, end = self._place(node.lineno, node.col_offset), self._place(node.end_lineno, node.end_col_offset)
        before = self.source[start:end]
        more = "\n" * (node.end_lineno - node.lineno)
        text = ast.unparse(ast.fix_missing_locations(written))
        after = f"({text}{more})" if isinstance(node, ast.expr) else text + more
        if isinstance(node, ast.stmt) and "\n" in text:
            return
        self.found.append(
            Change(
                operator=operator,
                line=node.lineno,
                function=".".join(self._names),
                start=start,
                end=end,
                before=before,
                after=after,
            )
        )

    def _place(self, line: int, column: int) -> int:
        """ast counts bytes of a line."""
        at = self._begins[line - 1] + column
        return at if self._ascii else len(self.source.encode()[:at].decode())


def _only_says(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Global | ast.Import | ast.ImportFrom):
        return True
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and any(word in ast.unparse(call.func).lower() for word in SAYS)


def _with(node: Any, **fields: Any) -> Any:
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _constant(node: ast.AST) -> Rewritten:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield "constant", ast.Constant(not node.value)
        elif isinstance(node.value, int):
            yield "off-by-one", ast.Constant(node.value + 1)
            yield "off-by-one", ast.Constant(node.value - 1)
        elif isinstance(node.value, float):
            yield "constant", ast.Constant(node.value + 1.0)


def _operator(node: ast.AST) -> Rewritten:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield "comparison", _with(node, ops=[COMPARISONS[type(node.ops[0])]()])
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield "arithmetic", _with(node, op=ARITHMETIC[type(node.op)]())
    if isinstance(node, ast.BoolOp):
        yield "boolean", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        for one in node.values:
            rest = [other for other in node.values if other is not one]
            yield "boolean", rest[0] if len(rest) == 1 else _with(node, values=rest)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "not" if isinstance(node.op, ast.Not) else "arithmetic", node.operand


def _negated(node: ast.AST) -> Rewritten:
    """Of a whole condition; written over the conditional expression. Statements are negated in their test."""
    if isinstance(node, ast.IfExp):
        yield "not", _with(node, test=ast.UnaryOp(ast.Not(), node.test))
        yield "branch", node.body
        yield "branch", node.orelse


def _index(node: ast.AST) -> Rewritten:
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Del):
        if isinstance(node.slice, ast.Slice):
            for name in ("lower", "upper"):
                bound = getattr(node.slice, name)
                for op in (ast.Add(), ast.Sub()) if bound is not None else ():
                    moved = ast.BinOp(bound, op, ast.Constant(1))
                    yield "slice", _with(node, slice=_with(node.slice, **{name: moved}))
            if isinstance(node.ctx, ast.Load):
                yield "slice", node.value
        elif not isinstance(node.slice, ast.Constant | ast.Tuple) and not _is_text(node.slice):
            yield "index", _with(node, slice=ast.BinOp(node.slice, ast.Sub(), ast.Constant(1)))
            yield "index", _with(node, slice=ast.BinOp(node.slice, ast.Add(), ast.Constant(1)))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _argument(node: ast.AST) -> Rewritten:
    if not isinstance(node, ast.Call):
        return
    for one in node.keywords:
        if one.arg is not None:
            yield "argument dropped", _with(node, keywords=[other for other in node.keywords if other is not one])
    plain = [not isinstance(one, ast.Starred) for one in node.args]
    if node.args and all(plain):
        yield "argument dropped", _with(node, args=node.args[:-1])
    for at, (first, second) in enumerate(pairwise(node.args)):
        if all(plain[at : at + 2]) and not (isinstance(first, ast.Constant) and isinstance(second, ast.Constant)):
            yield "arguments swapped", _with(node, args=[*node.args[:at], second, first, *node.args[at + 2 :]])
    for one, other in pairwise(node.keywords):
        if one.arg and other.arg:
            swapped = {one: ast.keyword(one.arg, other.value), other: ast.keyword(other.arg, one.value)}
            yield "arguments swapped", _with(node, keywords=[swapped.get(each, each) for each in node.keywords])


def _dropped(node: ast.AST) -> Rewritten:
    """A statement without which its function still runs: what it does to something, or to a name that it reads."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "statement dropped", ast.Pass()
    if isinstance(node, ast.AugAssign):
        yield "statement dropped", ast.Pass()
    if isinstance(node, ast.Assign):
        target, read = node.targets[0], {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
        if isinstance(target, ast.Attribute | ast.Subscript) or (isinstance(target, ast.Name) and target.id in read):
            yield "statement dropped", ast.Pass()


def _copies(node: ast.AST) -> Rewritten:
    """A clone left out; an in-place call that works on a copy."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "clone":
            yield "clone left out", node.func.value
        if node.func.attr.endswith("_") and not node.func.attr.startswith("_"):
            copied = ast.Call(ast.Attribute(node.func.value, "clone", ast.Load()), [], [])
            yield "in place on a copy", _with(node, func=_with(node.func, value=copied))


#: What can be seen in the syntax alone.
REWRITES: tuple[Callable[[ast.AST], Rewritten], ...] = (
    _constant,
    _operator,
    _negated,
    _index,
    _argument,
    _dropped,
    _copies,
)


def _tensor(node: ast.expr, lines: Lines, scope: Tensors) -> Rewritten:
    """What can be done to an expression that was seen to hold a tensor, and to what is computed of one in place."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and _held(node.left, lines):
        name = "add_" if isinstance(node.op, ast.Add) else "sub_"
        yield "in place", ast.Call(ast.Attribute(node.left, name, ast.Load()), [node.right], [])
    held = _held(node, lines)
    if not held:
        return
    dtype, rows = held[0], held[1]
    if rows > 1:
        yield "rows reversed", ast.Call(ast.Attribute(node, "flip", ast.Load()), [ast.Constant(0)], [])
        yield "rows rolled", ast.Call(ast.Attribute(node, "roll", ast.Load()), [ast.Constant(1), ast.Constant(0)], [])
    if "int" in dtype:
        yield "values shifted", ast.BinOp(node, ast.Add(), ast.Constant(1))
    own = ast.unparse(node)
    for other in sorted(scope):
        if other != own and scope[other] == held:
            yield "other tensor", ast.parse(other, mode="eval").body


def _held(node: ast.expr, lines: Lines) -> list[Any]:
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
        return lines.get(node.lineno, {}).get(ast.unparse(node), [])
    return []
