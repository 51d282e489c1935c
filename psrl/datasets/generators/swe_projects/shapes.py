"""Functions that can have a bug: ten kinds of bugs, each in several shapes.

A shape's `right` and `wrong` are the same piece of its body with and without the bug. The docstring says which is meant, so whoever
reads the function knows the mend; the piece holds names that are drawn, so whoever does not can only guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BugKind(StrEnum):
    """What is wrong with a function."""

    OPERATOR = "wrong_operator"
    RANGE = "off_by_one"
    COMPARISON = "wrong_comparison"
    ARGUMENTS = "swapped_arguments"
    CONSTANT = "wrong_constant"
    CONDITION = "negated_condition"
    VARIABLE = "wrong_variable"
    INDEX = "wrong_end"
    START = "wrong_start"
    METHOD = "wrong_method"


SYMPTOMS: dict[BugKind, tuple[str, str]] = {
    BugKind.OPERATOR: ("gives a wrong amount", "does not add up"),
    BugKind.RANGE: ("is off by one", "goes one step too far or too short"),
    BugKind.COMPARISON: ("is wrong at the limit", "treats equal values wrongly"),
    BugKind.ARGUMENTS: ("mixes up its inputs", "takes its inputs the wrong way round"),
    BugKind.CONSTANT: ("uses a wrong number", "has a number that is not the documented one"),
    BugKind.CONDITION: ("does the opposite", "tests for the opposite"),
    BugKind.VARIABLE: ("returns the wrong thing", "hands back something else"),
    BugKind.INDEX: ("takes the wrong end", "looks at the wrong side"),
    BugKind.START: ("starts wrongly", "begins with a wrong value"),
    BugKind.METHOD: ("calls the wrong function", "does what its opposite should do"),
}
"""What somebody notices who does not know the code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One function with names left open.

    `{a}`, `{b}` are scalars, `{xs}` holds several, `{x}` is one of them, `{ys}` holds others, `{r}` is a result, `{n}` and `{m}` are
    numbers that differ, `{fix}` is the piece that `right` and `wrong` say.
    """

    kind: BugKind
    verbs: tuple[str, ...]
    """First part of the function's name."""
    parameters: str
    doc: str
    body: tuple[str, ...]
    right: str
    wrong: str
    arguments: tuple[str, ...]
    """What the parameters take, as `draw_value` of project.py knows it."""


def _loop(first: str, *inner: str, last: str = "return {r}") -> tuple[str, ...]:
    """`first`, a loop over `{xs}`, `last`."""
    return (first, "for {x} in {xs}:", *("    " + line for line in inner), last)


RETURN = ("return {fix}",)
LISTED = ("return list({fix})",)
CHOSEN = ("return [{x} for {x} in {xs} if {fix}]",)
STORED = ("{r} = {fix}", "return {r}")

# kind, verbs, parameters, doc, body, right, wrong, arguments
# fmt: off
_ROWS: tuple[tuple[BugKind, str, str, str, tuple[str, ...], str, str, str], ...] = (
    (BugKind.OPERATOR, "add join", "{a}, {b}", "Sum of {a} and {b}.", RETURN, "{a} + {b}", "{a} - {b}", "int int"),
    (BugKind.OPERATOR, "cut reduce", "{a}, {b}", "The {a} less {b}.", STORED, "{a} - {b}", "{a} + {b}", "int int"),
    (BugKind.OPERATOR, "scale repeat", "{a}, {b}", "Product of {a} and {b}.", RETURN, "{a} * {b}", "{a} + {b}", "int int"),
    (BugKind.OPERATOR, "sum gather", "{xs}", "Sum of all {xs}.", _loop("{r} = 0", "{fix}"), "{r} += {x}", "{r} -= {x}", "ints"),
    (BugKind.RANGE, "list spell", "{a}", "Numbers from 1 to {a}.", LISTED, "range(1, {a} + 1)", "range(1, {a})", "pos"),
    (BugKind.RANGE, "walk span", "{a}", "Numbers below {a}.", LISTED, "range({a})", "range({a} - 1)", "pos"),
    (BugKind.RANGE, "head top", "{xs}, {a}", "The first {a} of {xs}.", RETURN, "{xs}[:{a}]", "{xs}[:{a} + 1]", "ints pos"),
    (BugKind.RANGE, "step gap", "{xs}", "Each of {xs} less the one before.",
     ("return [{xs}[i + 1] - {xs}[i] for i in {fix}]",), "range(len({xs}) - 1)", "range(len({xs}))", "ints"),
    (BugKind.COMPARISON, "reach meet", "{a}, {b}", "Whether {a} is at least {b}.", RETURN, "{a} >= {b}", "{a} > {b}", "int int"),
    (BugKind.COMPARISON, "exceed beat", "{a}, {b}", "Whether {a} is above {b}.", RETURN, "{a} > {b}", "{a} >= {b}", "int int"),
    (BugKind.COMPARISON, "allow admit", "{xs}, {b}", "The {xs} of at most {b}.", CHOSEN, "{x} <= {b}", "{x} < {b}", "ints int"),
    (BugKind.COMPARISON, "below under", "{xs}, {b}", "The {xs} below {b}.", CHOSEN, "{x} < {b}", "{x} <= {b}", "ints int"),
    (BugKind.ARGUMENTS, "grow raise", "{a}, {b}", "The {a} to the power of {b}.", RETURN, "pow({a}, {b})", "pow({b}, {a})", "small small"),
    (BugKind.ARGUMENTS, "split divide", "{a}, {b}", "The {a} by {b}, and the rest.", RETURN,
     "divmod({a}, {b})", "divmod({b}, {a})", "pos pos"),
    (BugKind.ARGUMENTS, "between from", "{a}, {b}", "Numbers from {a} to below {b}.", LISTED,
     "range({a}, {b})", "range({b}, {a})", "pos pos"),
    (BugKind.ARGUMENTS, "pair index", "{xs}, {ys}", "The {ys} by {xs}.", ("return dict({fix})",),
     "zip({xs}, {ys})", "zip({ys}, {xs})", "texts ints"),
    (BugKind.CONSTANT, "bill book", "{a}", "The {a} and {n}.", RETURN, "{a} + {n}", "{a} + {m}", "big"),
    (BugKind.CONSTANT, "rebate trim", "{a}", "The {a} less {n}.", STORED, "{a} - {n}", "{a} - {m}", "big"),
    (BugKind.CONSTANT, "cap bound", "{a}", "The {a}, at most {n}.", RETURN, "min({a}, {n})", "min({a}, {m})", "big"),
    (BugKind.CONSTANT, "warn alarm", "{a}", "Whether {a} is above {n}.", RETURN, "{a} > {n}", "{a} > {m}", "big"),
    (BugKind.CONDITION, "has know", "{a}, {xs}", "Whether {a} is in {xs}.", RETURN, "{a} in {xs}", "{a} not in {xs}", "int ints"),
    (BugKind.CONDITION, "lack miss", "{a}, {xs}", "Whether {a} is not in {xs}.", RETURN, "{a} not in {xs}", "{a} in {xs}", "int ints"),
    (BugKind.CONDITION, "clean filter", "{xs}", "The {xs} that are not empty.",
     ("return [{x} for {x} in {xs} {fix}]",), "if {x}", "if not {x}", "gaps"),
    (BugKind.CONDITION, "even halve", "{xs}", "The even {xs}.", CHOSEN, "{x} % 2 == 0", "{x} % 2 != 0", "ints"),
    (BugKind.VARIABLE, "best most", "{xs}", "The largest of {xs}.",
     _loop("{r} = {xs}[0]", "if {x} > {r}:", "    {r} = {x}", last="{fix}"), "return {r}", "return {x}", "ints"),
    (BugKind.VARIABLE, "tally collect", "{xs}", "Sum of all {xs}.",
     _loop("{r} = 0", "{r} += {x}", last="{fix}"), "return {r}", "return {x}", "ints"),
    (BugKind.VARIABLE, "double twice", "{a}", "Twice the {a}.", ("{r} = {a} + {a}", "{fix}"), "return {r}", "return {a}", "int"),
    (BugKind.VARIABLE, "count number", "{xs}, {b}", "How many {xs} are above {b}.",
     _loop("{r} = 0", "if {x} > {b}:", "    {r} += 1", last="{fix}"), "return {r}", "return {b}", "ints int"),
    (BugKind.INDEX, "last final", "{xs}", "The last of {xs}.", RETURN, "{xs}[-1]", "{xs}[0]", "ints"),
    (BugKind.INDEX, "first lead", "{xs}", "The first of {xs}.", RETURN, "{xs}[0]", "{xs}[-1]", "ints"),
    (BugKind.INDEX, "highest peak", "{xs}", "The largest of {xs}.", RETURN, "sorted({xs})[-1]", "sorted({xs})[0]", "ints"),
    (BugKind.INDEX, "rest tail", "{xs}", "All {xs} but the first.", RETURN, "{xs}[1:]", "{xs}[:-1]", "ints"),
    (BugKind.START, "combine merge", "{xs}", "Sum of all {xs}.", _loop("{fix}", "{r} += {x}"), "{r} = 0", "{r} = 1", "ints"),
    (BugKind.START, "multiply chain", "{xs}", "Product of all {xs}.", _loop("{fix}", "{r} *= {x}"), "{r} = 1", "{r} = 0", "ints"),
    (BugKind.START, "rank order", "{xs}", "The {xs} with numbers from 1.", LISTED, "enumerate({xs}, 1)", "enumerate({xs}, 0)", "ints"),
    (BugKind.START, "measure mass", "{xs}, {a}", "The {a} and all {xs}.", _loop("{fix}", "{r} += {x}"), "{r} = {a}", "{r} = 0", "ints pos"),
    (BugKind.METHOD, "least low", "{xs}", "The smallest of {xs}.", RETURN, "min({xs})", "max({xs})", "ints"),
    (BugKind.METHOD, "shout title", "{a}", "The {a} in capitals.", STORED, "{a}.upper()", "{a}.lower()", "text"),
    (BugKind.METHOD, "whisper plain", "{a}", "The {a} in small letters.", RETURN, "{a}.lower()", "{a}.upper()", "caps"),
    (BugKind.METHOD, "flatten unpack", "{xs}", "All {xs} in one flat list.", _loop("{r} = []", "{fix}"),
     "{r}.extend({x})", "{r}.append({x})", "lists"),
    (BugKind.METHOD, "match find", "{xs}, {a}", "The {xs} that start with {a}.", CHOSEN,
     "{x}.startswith({a})", "{x}.endswith({a})", "texts letter"),
)
# fmt: on

SHAPES: tuple[Shape, ...] = tuple(
    Shape(
        kind=kind,
        verbs=tuple(verbs.split()),
        parameters=parameters,
        doc=doc,
        body=body,
        right=right,
        wrong=wrong,
        arguments=tuple(arguments.split()),
    )
    for kind, verbs, parameters, doc, body, right, wrong, arguments in _ROWS
)
SHAPES_BY_KIND: dict[BugKind, tuple[Shape, ...]] = {kind: tuple(each for each in SHAPES if each.kind is kind) for kind in BugKind}
VERBS = tuple(sorted({verb for shape in SHAPES for verb in shape.verbs}))
