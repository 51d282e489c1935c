"""What is asked of the parts of a problem before anything is done with them, whoever wrote them: texts, ids, names of tests, paths.

Rows are other people's: an id becomes the name of files, a path is put back in a sandbox and a name of a parser is looked up.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from psrl.errors import RowError
from psrl.types.swe_rules import is_path

MAX_STATEMENT_CHARACTERS = 200_000
"""Of an issue, which a row holds twice; the longest published ones have a quarter of that."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,199}")
_PARSER = re.compile(r"parse_log_[A-Za-z0-9_]{1,100}")
_BREAKS = re.compile(r"[\r\n\0]")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
Refuse = Callable[[str, str], RowError]
"""The error of (reason, detail)."""


def checked_id(name: str, refuse: Refuse, *, what: str = "instance_id") -> str:
    """An id that can be a file's name everywhere."""
    if not _ID.fullmatch(name):
        rule = "letters A to Z, digits and _ . + -, the first one a letter or digit, at most 200"
        raise refuse("bad_field", f"{what} is no plain name ({rule}): {shown(name)}")
    return name


def text_of(raw: Mapping[str, Any], column: str, refuse: Refuse, *, default: str | None = None) -> str:
    """A column's text; `default` where it is missing or null."""
    value = raw.get(column)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise refuse("bad_field", f"{column} must be text, it is {shown(value)}")
    return checked_text(value, column, refuse)


def checked_text(text: str, what: str, refuse: Refuse) -> str:
    """A text that can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refuse("bad_field", f"{what} holds half a character at {error.start}, which no file can hold") from error
    return text


def checked_statement(text: str, refuse: Refuse, *, what: str = "problem_statement") -> str:
    """An issue without the space around it."""
    statement = text.strip()
    if not statement:
        raise refuse("empty_statement", f"{what} says nothing")
    if len(statement) > MAX_STATEMENT_CHARACTERS:
        raise refuse("too_large", f"{what} has {len(statement)} characters; an issue has at most {MAX_STATEMENT_CHARACTERS}")
    return statement


def tests_named(raw: Mapping[str, Any], column: str, refuse: Refuse) -> tuple[str, ...]:
    """A list of tests, published as a list or as JSON text; without repetition."""
    value = raw.get(column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise refuse("bad_field", f"{column} is no JSON: {error}") from error
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(test, str) for test in value):
        raise refuse("bad_field", f"{column} must be a list of texts, it is {shown(value)}")
    for test in value:
        if not test.strip() or _BREAKS.search(test):
            raise refuse("bad_field", f"{column} names a test that is empty or has several lines: {shown(test)}")
        checked_text(test, column, refuse)
    return tuple(dict.fromkeys(value))


def checked_paths(paths: Iterable[str], reason: str, refuse: Refuse) -> tuple[str, ...]:
    """Paths below the project, none of them of its git; in order."""
    kept = tuple(paths)
    for path in kept:
        if not is_path(path) or _BREAKS.search(path):
            raise refuse(reason, f"{shown(path)} is no path of the project (below it, in its shortest form, not of its git)")
    return kept


def checked_parser(name: str, refuse: Refuse) -> str:
    """The name of a log parser, as all of the `swebench` package's are called; empty where there is none."""
    if name and not _PARSER.fullmatch(name):
        raise refuse("bad_field", f"log_parser is no parser of swebench, such as parse_log_pytest: {shown(name)}")
    return name


def shown(value: Any) -> str:
    """A value in at most 100 characters, whatever it holds."""
    return f"{_SHORT.repr(value):.100}"
