"""Sent beside the runner's child: has each comparison of a test file look at what it compares.

A patch may return an object that equals everything. Where an operand's class has an equality that the patch brought, that equality is
asked about values that nobody expects: whoever says yes to those says nothing. What is compared, and what comes out, stays as it was.
Standard library alone.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

SEEN = "__psrl_seen__"
MAX_LOOKED_AT = 2000
"""Elements of one operand."""
CONTAINERS = (list, tuple, set, frozenset)
PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), list, tuple, dict, set, frozenset})
WATCHED_OPERATORS = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)


class Operands(ast.NodeTransformer):
    """`a == b` becomes `SEEN(a) == SEEN(b)`; the arguments of unittest's assertions likewise."""

    def __init__(self, module: ast.Module) -> None:
        """A test file that names `ANY` itself compares with unittest.mock's; in others it is an answer that equals everything."""
        super().__init__()
        names = (getattr(node, field, None) for node in ast.walk(module) for field in ("id", "attr", "name"))
        self._may_be_any = "ANY" in names

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """One comparison, chained or not."""
        self.generic_visit(node)
        if any(isinstance(operator, WATCHED_OPERATORS) for operator in node.ops):
            node.left = self._seen(node.left)
            node.comparators = [self._seen(each) for each in node.comparators]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call of `self.assert...`."""
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name.startswith("assert"):
            node.args = [each if isinstance(each, ast.Starred) else self._seen(each) for each in node.args]
        return node

    def _seen(self, node: ast.expr) -> ast.expr:
        """The expression, looked at. A constant of the test itself need not be."""
        if isinstance(node, ast.Constant):
            return node
        name = ast.copy_location(ast.Name(id=SEEN, ctx=ast.Load()), node)
        flag = ast.copy_location(ast.Constant(value=self._may_be_any), node)
        return ast.copy_location(ast.Call(func=name, args=[node, flag], keywords=[]), node)


def elements(value: Any) -> Iterator[Any]:
    """The value and what lies in it."""
    found, position = [value], 0
    while position < len(found) and position < MAX_LOOKED_AT:
        each = found[position]
        position += 1
        yield each
        if isinstance(each, CONTAINERS):
            found += list(each)[:MAX_LOOKED_AT]
        elif isinstance(each, dict):
            found += [*list(each)[:MAX_LOOKED_AT], *list(each.values())[:MAX_LOOKED_AT]]


def install(touched: frozenset[str], alarm: Callable[[str], None], random_text: str) -> None:
    """Have pytest's rewriting of test files put the looks in. Before the project's first line ran."""
    rewrite = importlib.import_module("_pytest.assertion.rewrite")
    probes = (object(), int(random_text, 16), random_text, random_text.encode())
    catch, function_type = warnings.catch_warnings, types.FunctionType
    of_c = (type(object.__eq__), type(len), type(str.join))

    def is_of_patch(method: Any) -> bool:
        if isinstance(method, function_type):
            file = method.__code__.co_filename
            return file in touched or not file.startswith(("/", "<frozen"))
        return not isinstance(method, of_c)

    def says_yes_to_anything(value: Any) -> bool:
        kind: Any = type(value)
        ask: list[Callable[[Any], Any]] = []
        if is_of_patch(getattr(kind, "__eq__", None)):
            ask.append(lambda probe: kind.__eq__(value, probe) is not NotImplemented and bool(kind.__eq__(value, probe)))
        if is_of_patch(getattr(kind, "__ne__", None)):
            ask.append(lambda probe: not kind.__ne__(value, probe))
        if hasattr(kind, "__contains__") and is_of_patch(kind.__contains__):
            ask.append(lambda probe: kind.__contains__(value, probe))
        for question in ask:
            for probe in probes:
                try:
                    with catch():
                        warnings.simplefilter("ignore")
                        if question(probe):
                            return True
                except Exception:  # noqa: BLE001  (named in tests/test_limits.py)
                    continue
        return False

    def look(value: Any, may_be_any: bool) -> Any:
        for each in elements(value):
            if type(each) in PLAIN:
                continue
            is_any = not may_be_any and getattr(type(each).__eq__, "__qualname__", "") == "_ANY.__eq__"
            if is_any or says_yes_to_anything(each):
                alarm(f"an object of {type(each).__name__} equals whatever it is compared with")
                break
        return value

    setattr(builtins, SEEN, look)
    rewrite_asserts = getattr(rewrite, "rewrite_asserts", None)
    if rewrite_asserts is None or not touched:
        return

    def with_looks(module: ast.Module, *arguments: Any, **options: Any) -> Any:
        return rewrite_asserts(ast.fix_missing_locations(Operands(module).visit(module)), *arguments, **options)

    vars(rewrite)["rewrite_asserts"] = with_looks
