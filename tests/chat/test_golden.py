"""Turns that released chat templates and tokenizers wrote are read exactly: reasoning, content and calls."""

import json
from pathlib import Path

import pytest
from formats_under_test import FORMATS, expected, tools_for

from psrl.chat.parsers import tool_formats

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", FORMATS)
def test_what_released_templates_write_is_read_exactly(name):
    rows = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    assert rows
    tool_format = tool_formats.resolve(name)()
    for row in rows:
        reasoning, rest = tool_format.split_reasoning(row["text"], is_open=False)
        parsed = tool_format.parse(rest, turn=0, tools=tools_for(row["calls"]))
        assert parsed.calls == expected(row["calls"]), row
        assert (reasoning or None, parsed.content) == (row["reasoning"], row["content"]), row
