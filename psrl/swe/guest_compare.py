"""Sent beside the runner's child: has each comparison of a test file look at what it compares.

A patch may return an object that equals everything. Where an operand's class has an equality that may be the patch's, that equality is
asked about values that nobody expects, neighbours of the constant that the test expects among them: whoever says yes to those says
nothing. What is compared, and what comes out, stays as it was. Standard library alone.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

SEEN = "look-" + os.urandom(12).hex()
"""Stands for the function in a file's syntax tree; in its code the function itself is a constant, which nothing rebinds."""
MAX_LOOKED_AT = 2000
"""Elements of one operand."""
MAX_ASKED = 200
"""Objects of one operand whose equality is asked."""
PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), list, tuple, dict, set, frozenset})
EQUALITIES = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
ORDERS = (ast.Lt, ast.Gt, ast.LtE, ast.GtE)
MAY_BE_ANY, IS_TRUTH, IS_ORDER = 1, 2, 4
HEAP_TYPE = 1 << 9
NOTHING = object()
mro_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
dict_of: Callable[[type], Any] = type.__dict__["__dict__"].__get__
flags_of: Callable[[type], int] = type.__dict__["__flags__"].__get__


class Operands(ast.NodeTransformer):
    """`a == b` becomes `look(a, flags, expected) == look(b, flags)`; the arguments of unittest's assertions likewise."""

    def __init__(self, module: ast.Module) -> None:
        """A test file that names `ANY` itself compares with unittest.mock's; in others it is an answer that equals everything."""
        super().__init__()
        names = (getattr(node, field, None) for node in ast.walk(module) for field in ("id", "attr", "name"))
        self._flags = MAY_BE_ANY if "ANY" in names else 0
        self._truths = {id(each) for node in ast.walk(module) for each in truths(node)}

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """One comparison, chained or not."""
        is_truth = IS_TRUTH if id(node) in self._truths else 0
        self.generic_visit(node)
        is_order = any(isinstance(operator, ORDERS) for operator in node.ops)
        if is_order or any(isinstance(operator, EQUALITIES) for operator in node.ops):
            flags = self._flags | is_truth | (IS_ORDER if is_order else 0)
            operands = [node.left, *node.comparators]
            node.left = self._seen(node.left, flags, operands)
            node.comparators = [self._seen(each, flags, operands) for each in node.comparators]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call of `self.assert...`."""
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name.startswith("assert"):
            flags = self._flags | IS_TRUTH
            node.args = [each if isinstance(each, ast.Starred) else self._seen(each, flags, node.args) for each in node.args]
        return node

    def _seen(self, node: ast.expr, flags: int, operands: list[ast.expr]) -> ast.expr:
        """The expression, looked at. A constant of the test itself need not be; it is told to the others."""
        if isinstance(node, ast.Constant):
            return node
        expected = [each for each in operands if isinstance(each, ast.Constant) and each is not node]
        arguments = [node, ast.copy_location(ast.Constant(value=flags), node), *(ast.copy_location(each, node) for each in expected[:1])]
        name = ast.copy_location(ast.Constant(value=SEEN), node)
        return ast.copy_location(ast.Call(func=name, args=arguments, keywords=[]), node)


def truths(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions whose truth decides a test: of an assert, and what unittest's assertions are called with."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Assert):
        found = [node.test]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("assert"):
        found = list(node.args)
    while found:
        each = found.pop()
        yield each
        if isinstance(each, ast.BoolOp):
            found += each.values
        elif isinstance(each, ast.UnaryOp):
            found.append(each.operand)


def elements(value: Any, has_fields: Callable[[Any], bool]) -> Iterator[Any]:
    """The value and what lies in it; no method of it is called."""
    found, position = [value], 0
    while position < len(found) and position < MAX_LOOKED_AT:
        each = found[position]
        kind = type(each)
        position += 1
        yield each
        if issubclass(kind, (list, tuple, set, frozenset)):
            base = next(base for base in (list, tuple, set, frozenset) if issubclass(kind, base))
            found += [inner for inner, _ in zip(base.__iter__(each), range(MAX_LOOKED_AT))]  # noqa: B905  (Python 3.9)
        elif issubclass(kind, dict):
            found += [inner for pair, _ in zip(dict.items(each), range(MAX_LOOKED_AT)) for inner in pair]  # noqa: B905
        if kind not in PLAIN and has_fields(each):
            found += list(fields_of(each).values())[:MAX_LOOKED_AT]


def fields_of(value: Any) -> dict[str, Any]:
    """What an object holds, read past its own ways of telling it."""
    try:
        fields = object.__getattribute__(value, "__dict__")
    except AttributeError:
        fields = {}
    found = dict(fields) if type(fields) is dict else {}
    for base in mro_of(type(value)):
        for name, member in list(dict_of(base).items()):
            if type(member) is types.MemberDescriptorType and flags_of(base) & HEAP_TYPE:
                try:
                    found[name] = member.__get__(value)
                except AttributeError:
                    continue
    return found


def member_of(kind: type, name: str) -> Any:
    """What a class or its bases define, past metaclasses."""
    return next((dict_of(base)[name] for base in mro_of(kind) if name in dict_of(base)), None)


class Equalities:
    """Whose they are, and whether they say something."""

    def __init__(self, touched: frozenset[str]) -> None:
        """`touched` are the files of the patch."""
        self._touched = touched
        self._library = os.path.dirname(os.path.abspath(os.__file__)) + "/"
        self._of_c = (type(object.__eq__), type(str.join), type(None))
        number = int.from_bytes(os.urandom(8), "big")
        text = os.urandom(12).hex()
        self._probes = (object(), number, text, text.encode())
        small = 1000 + number % 90_000
        self._pairs: tuple[tuple[Any, ...], ...] = ((small, small + 17), (small / 7, small / 3), (text[:5], text[5:9]), (number % 89, 97))
        self._catch, self._ignore = warnings.catch_warnings, warnings.simplefilter

    def may_be_of_patch(self, kind: type, name: str) -> bool:
        """False where it is C's, or written in a file of which the patch knows nothing."""
        method = member_of(kind, name)
        if isinstance(method, types.FunctionType):
            file = method.__code__.co_filename
            if file in self._touched or not file.startswith(("/", "<frozen")):
                return True
            is_library = file.startswith(self._library) and "/site-packages/" not in file
            if is_library and "<locals>" in method.__qualname__:
                return True  # what a decorator or a mock made of another function
            return is_library and file != getattr(sys.modules.get(method.__module__ or ""), "__file__", file)
        return not isinstance(method, self._of_c)

    def is_wrapped(self, kind: type, name: str) -> bool:
        """Whether a function of Python's library stands in a class of another file: a decorator's inside."""
        method = member_of(kind, name)
        if not isinstance(method, types.FunctionType):
            return False
        own = getattr(sys.modules.get(str(dict_of(kind).get("__module__"))), "__file__", None)
        return own in self._touched and method.__code__.co_filename not in self._touched

    def has_fields(self, value: Any) -> bool:
        """Whether the patch's hands were on the class."""
        kind = type(value)
        if not flags_of(kind) & HEAP_TYPE or isinstance(value, type):
            return False
        return any(
            getattr(sys.modules.get(str(dict_of(base).get("__module__"))), "__file__", None) in self._touched for base in mro_of(kind)
        )

    def says_nothing(self, value: Any, flags: int, expected: Any) -> bool:
        """Whether it equals what nobody expects."""
        kind = type(value)
        neighbours = self._pairs + ((around(expected),) if expected is not NOTHING else ())
        questions: tuple[tuple[str, Callable[[Any], Any]], ...] = (
            ("__eq__", lambda probe: value == probe),
            ("__ne__", lambda probe: negated(value != probe)),
        )
        for name, ask in questions:
            if not (self.may_be_of_patch(kind, name) or self.is_wrapped(kind, name)):
                continue
            if any(self._is_yes(value, ask, probe, flags) for probe in self._probes):
                return True
            if any(pair and all(self._is_yes(value, ask, probe, flags) for probe in pair) for pair in neighbours):
                return True
        if self.may_be_of_patch(kind, "__contains__"):
            contains: Any = member_of(kind, "__contains__")
            if any(self._is_yes(value, lambda probe: contains(value, probe), probe, flags | IS_TRUTH) for probe in self._probes):
                return True
        if flags & IS_ORDER and self.may_be_of_patch(kind, "__lt__") and self.may_be_of_patch(kind, "__gt__"):
            numbers = self._pairs[0]
            return all(
                self._is_yes(value, lambda p: value < p, probe, IS_TRUTH) and self._is_yes(value, lambda p: value > p, probe, IS_TRUTH)
                for probe in numbers
            )
        return False

    def _is_yes(self, value: Any, ask: Callable[[Any], Any], probe: Any, flags: int) -> bool:
        """Its answer, and everything as it was: tests may count how often they were compared."""
        fields = fields_of(value)
        spaces = [(base, dict(dict_of(base))) for base in mro_of(type(value)) if flags_of(base) & HEAP_TYPE]
        try:
            with self._catch():
                self._ignore("ignore")
                answer = ask(probe)
                return answer is True or (bool(flags & IS_TRUTH) and answer is not NotImplemented and bool(answer))
        except Exception:  # noqa: BLE001  (named in tests/test_limits.py)
            return False
        finally:
            for name, before in fields.items():
                if fields_of(value).get(name, NOTHING) is not before:
                    object.__setattr__(value, name, before)
            for base, space in spaces:
                for name, before in space.items():
                    if name[:2] != "__" and dict_of(base).get(name, NOTHING) is not before:
                        type.__setattr__(base, name, before)


def negated(answer: Any) -> Any:
    """What `!=` says, as `==` would; an answer that is no truth stays one."""
    return not answer if isinstance(answer, bool) else NotImplemented


def around(expected: Any) -> tuple[Any, ...]:
    """Values near the one that a test expects. One may be equal in honesty (a tolerance), all of them are not."""
    kind = type(expected)
    if kind in (int, float):
        return (expected + 1, expected - 1, expected + 1009, expected * 3 + 7)
    if kind is str:
        return (expected + "q", "q" + expected, expected[1:] + "zq")
    return (expected + b"q", b"q" + expected, expected[1:] + b"zq") if kind is bytes else ()


def _look(value: Any, flags: int, expected: Any = NOTHING) -> Any:
    examine: Any = "psrl:examine"
    examine(value, flags, expected)
    return value


def _with_looks(module: ast.Module, *arguments: Any, **options: Any) -> Any:
    transform: Any = "psrl:transform"
    rewrite: Any = "psrl:rewrite"
    return rewrite(transform(module), *arguments, **options)


def _code_with_looks(path: Any, config: Any) -> Any:
    finish: Any = "psrl:finish"
    return finish(path, config)


def with_constant(code: types.CodeType, look: Any) -> types.CodeType:
    """The code, and what lies in it, with the function where SEEN stood."""
    constants = tuple(with_constant(each, look) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_consts=tuple(look if type(each) is str and each == SEEN else each for each in constants))


def install(touched: frozenset[str], alarm: Callable[[str], None], sealed: Callable[..., Any]) -> None:
    """Have pytest's rewriting of test files put the looks in. Before the project's first line ran."""
    rewrite = importlib.import_module("_pytest.assertion.rewrite")
    equalities = Equalities(touched)

    def examine(value: Any, flags: int, expected: Any) -> None:
        if type(value) in (int, float, str, bool, bytes, type(None)):
            return
        num_asked = 0
        for each in elements(value, equalities.has_fields):
            kind = type(each)
            if kind in PLAIN or not flags_of(kind) & HEAP_TYPE:
                continue
            num_asked += 1
            if num_asked > MAX_ASKED:
                break
            is_any = not flags & MAY_BE_ANY and getattr(member_of(kind, "__eq__"), "__qualname__", "") == "_ANY.__eq__"
            if is_any or equalities.says_nothing(each, flags, expected):
                alarm(f"an object of {kind.__name__} equals whatever it is compared with")
                break

    look = sealed(_look, examine=examine)
    rewrite_asserts, rewrite_test = getattr(rewrite, "rewrite_asserts", None), getattr(rewrite, "_rewrite_test", None)
    if rewrite_asserts is None or rewrite_test is None or not touched:
        return

    def transform(module: ast.Module) -> Any:
        return ast.fix_missing_locations(Operands(module).visit(module))

    def finish(path: Any, config: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'str' object is not callable", category=SyntaxWarning)
            state, code = rewrite_test(path, config)
        return state, with_constant(code, look)

    vars(rewrite)["rewrite_asserts"] = sealed(_with_looks, transform=transform, rewrite=rewrite_asserts)
    vars(rewrite)["_rewrite_test"] = sealed(_code_with_looks, finish=finish)
