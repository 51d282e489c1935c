"""Compiles a chat template once, in the surroundings that transformers gives it, but with a date that stands still.

transformers tells templates the clock's date and copies every message deep before each rendering (half of the time of a short one).
That both write the same text is held by the tests, which ask `apply_chat_template` for the truth.
"""

from __future__ import annotations

import json
from datetime import date
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def compile_template(source: str, today: date) -> jinja2.Template:
    """A template whose `render` takes messages, tools, add_generation_prompt and what else its writer thought of.

    Raises:
        jinja2.TemplateSyntaxError: The source is no template.
    """
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = today.strftime
    template = environment.from_string(source)
    template.globals = dict(template.globals)  # Copied by each rendering: jinja's own view of two mappings is gone through in Python.
    return template


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a short way for the fields of messages and the methods of texts, which are most of what templates ask for."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As in the sandbox: what is no attribute of a mapping is looked up in it, here without an exception on the way."""
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As in the sandbox: a text has no internal and no changing attributes, and `format` is wrapped elsewhere."""
        if type(obj) is str:
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)


class _GenerationBlock(Extension):
    """`{% generation %}`, by which templates mark what an assistant wrote; here it only stands for its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        """The body, in a scope of its own as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja's escapes for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
