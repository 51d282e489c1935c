"""What tests need to know of each tool-call format: its marks, and tools whose schemas describe given arguments."""

import json

from hypothesis import strategies as st

from psrl.chat.parsers import tool_formats
from psrl.types import ToolCall, ToolSchema

FORMATS = ("deepseek", "harmony", "hermes", "llama3_json", "mistral", "qwen3_coder")
MARKS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>"],
    "llama3_json": ["<|python_tag|>", '\n{"name": "f", "parameters": ', ";"],
    "harmony": ["<|start|>assistant", "<|channel|>commentary to=functions.f", "<|channel|>analysis", "<|message|>", "<|call|>", "<|end|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS][", '{"name": "f", "arguments": '],
    "deepseek": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
    ],
}
OPENINGS = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "llama3_json": "<|python_tag|>",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
    "mistral": "[TOOL_CALLS]",
    "deepseek": "<｜tool▁call▁begin｜>",
}
CLOSINGS = {
    "hermes": "</tool_call>",
    "qwen3_coder": "</tool_call>",
    "llama3_json": ";",
    "harmony": "<|call|>",
    "mistral": "]",
    "deepseek": "<｜tool▁call▁end｜>",
}
JUNK = ['"', "\\", '\\"', "{", "}", "[", "]", ",", ":", "\n", " ", "x", "'''", '{"name": "f", "arguments": {}}', "<think>", "</think>"]
TEXT = st.characters(exclude_categories=["Cs"])
NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,10}", fullmatch=True)
PROSE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[{\n"), max_size=12).filter(lambda text: not text.isspace())
"""White space alone is left out: between harmony's messages it says nothing."""


def hostile(name):
    """Texts made of a format's own marks, JSON's and Python's, and anything else."""
    pieces = st.sampled_from(MARKS[name]) | st.sampled_from(JUNK) | st.text(TEXT, max_size=6)
    return st.lists(pieces, max_size=12).map("".join)


def can_be_carried(name, text):
    """Qwen3-Coder's XML escapes nothing, so a value cannot hold what ends a value, or what stands between calls; JSON holds any text."""
    ends_value = "</parameter>" in text and ("<parameter=" in text or "</function>" in text)
    ends_call = "</function>" in text and "<function=" in text
    return name != "qwen3_coder" or not (ends_value or ends_call)


def json_values(name):
    """JSON values whose texts are hostile to the format."""
    texts = hostile(name).filter(lambda text: can_be_carried(name, text))
    floats = st.floats(allow_nan=False, allow_infinity=False)
    return st.recursive(
        st.none() | st.booleans() | st.integers(-(10**12), 10**12) | floats | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=4,
    ).filter(lambda value: can_be_carried(name, json.dumps(value)))


def arguments_of(name):
    """Objects of arguments; keys are names where the format writes them as such."""
    keys = NAMES if name == "qwen3_coder" else hostile(name)
    return st.dictionaries(keys, json_values(name), max_size=3)


def calls_of(name, *, max_size):
    """Lists of (tool name, arguments)."""
    return st.lists(st.tuples(NAMES, arguments_of(name)), min_size=1, max_size=max_size, unique_by=lambda call: call[0])


def tools_for(calls):
    """Schemas that say of every argument what type it has."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
    return [
        ToolSchema(
            name=name,
            description="",
            parameters={"type": "object", "properties": {key: {"type": kinds[type(value)]} for key, value in arguments.items()}},
        )
        for name, arguments in calls
    ]


def written(name, calls):
    """The calls as the format writes them."""
    return [tool_formats.resolve(name)().call_text(tool, arguments) for tool, arguments in calls]


def expected(calls, *, turn=0):
    """What a parser must make of the calls."""
    return tuple(ToolCall(id=f"call-{turn}-{position}", name=name, arguments=arguments) for position, (name, arguments) in enumerate(calls))


def parse(name, text, calls=(), *, turn=0):
    """The turn as `HfRenderer` reads it: reasoning taken away, then the calls."""
    tool_format = tool_formats.resolve(name)()
    _, rest = tool_format.split_reasoning(text, is_open=False)
    return tool_format.parse(rest, turn=turn, tools=tools_for(calls))
