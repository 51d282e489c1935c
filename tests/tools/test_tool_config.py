"""The YAML file of tools: what it gives, and what each mistake in it is answered with."""

import asyncio

import pytest

from psrl.config.sandbox import SandboxConfig
from psrl.errors import ConfigError
from psrl.protocols import ToolResult
from psrl.sandbox import build_interpreter
from psrl.tools import CodeInterpreter, load_tools
from psrl.types import ToolSchema

SEARCH_SCHEMA = "{type: function, function: {name: search, description: Find., parameters: {type: object, properties: {}, required: []}}}"


def triple(value: int) -> int:
    """Multiply by three."""
    return 3 * value


class Search:
    """A user's tool class, with settings and a schema from the file."""

    def __init__(self, top_k: int, schema: ToolSchema):
        self.top_k = top_k
        self.schema = schema

    async def call(self, arguments):
        return ToolResult(text=str(self.top_k))

    async def close(self):
        pass


class NoTool:
    """Lacks everything that a tool has."""


def load(tmp_path, text):
    path = tmp_path / "tools.yaml"
    path.write_text(text)
    return load_tools(str(path), program_runner=build_interpreter(SandboxConfig()))


def test_a_file_lists_registered_names_classes_and_functions_in_order(tmp_path):
    loaded = load(
        tmp_path,
        f"""
tools:
  - name: code_interpreter
  - class_name: {__name__}.Search
    config: {{top_k: 3}}
    tool_schema: {SEARCH_SCHEMA}
  - name: {__name__}.triple
""",
    )
    assert [member.schema.name for member in loaded] == ["code_interpreter", "search", "triple"]
    assert isinstance(loaded[0], CodeInterpreter)
    assert asyncio.run(loaded[1].call({})).text == "3"
    assert asyncio.run(loaded[2].call({"value": 14})).text == "42"


def test_a_schema_in_the_file_renames_the_interpreter(tmp_path):
    parameters = "{type: object, properties: {code: {type: string}}, required: [code]}"
    schema = f"{{type: function, function: {{name: python, description: Run it., parameters: {parameters}}}}}"
    (member,) = load(tmp_path, f"tools: [{{class_name: psrl.tools.CodeInterpreter, config: {{type: native}}, tool_schema: {schema}}}]")
    assert member.schema.name == "python"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("tools: [", "is not YAML"),
        ("[]", "must hold one list under `tools:`"),
        ("tools: {}", "must hold one list"),
        ("tools: []\nmore: 1", "must hold one list"),
        ("tools: [code_interpreter]", "is no mapping"),
        ("tools: [{}]", "exactly one of name and class_name"),
        ("tools: [{name: code_interpreter, class_name: x}]", "exactly one of name and class_name"),
        ("tools: [{name: code_interpreter, confg: {}}]", "unknown key"),
        ("tools: [{name: interpreter}]", "use one of "),
        ("tools: [{name: no_such_package.Tool}]", "cannot be imported"),
        ("tools: [{name: code_interpreter, config: {speed: 1}}]", "unexpected keyword argument 'speed'"),
        ("tools: [{name: code_interpreter, config: 3}]", "config a mapping"),
        (f"tools: [{{name: {__name__}.Search, tool_schema: {SEARCH_SCHEMA}}}]", "missing a required argument: 'top_k'"),
        (f"tools: [{{name: {__name__}.NoTool}}]", "has no schema, call and close"),
        (f"tools: [{{name: {__name__}.NoTool, tool_schema: {SEARCH_SCHEMA}}}]", "takes no `schema`"),
        (f"tools: [{{name: {__name__}.triple, config: {{a: 1}}}}]", "neither config nor tool_schema"),
        (f"tools: [{{name: {__name__}.SEARCH_SCHEMA}}]", "neither a tool class nor a function"),
        ("tools: [{name: code_interpreter, tool_schema: {name: x}}]", "is no function schema"),
        ("tools: [{name: code_interpreter, tool_schema: {name: 3, description: x, parameters: {}}}]", "is no function schema"),
        ("tools: [{name: code_interpreter, tool_schema: {name: x, description: x, parameters: {}}}]", "takes one argument, `code`"),
        (f"tools: [{{name: code_interpreter, tool_schema: {SEARCH_SCHEMA}}}]", "takes one argument, `code`"),
    ],
)
def test_a_mistake_is_a_config_error_that_names_the_fix(tmp_path, text, part):
    with pytest.raises(ConfigError, match="Fix: ") as caught:
        load(tmp_path, text)
    assert part in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "tools.yaml"
    path.write_bytes(b"tools: [\xff]")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_tools(str(path), program_runner=build_interpreter(SandboxConfig()))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        load_tools(str(tmp_path / "missing.yaml"), program_runner=build_interpreter(SandboxConfig()))
