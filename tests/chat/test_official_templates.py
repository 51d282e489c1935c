"""What the official chat templates write is read exactly, whatever text the arguments hold; and so are the ids of such turns."""

import json
from dataclasses import dataclass
from functools import cache

import pytest
from families_under_test import FOLDERS
from formats_under_test import calls_of, expected, parse, tools_for
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from psrl.chat import load_renderer
from psrl.chat.markup import CUT, KEPT
from tests.real_models import official_templates_path

FUZZ = settings(max_examples=15, deadline=None)


@dataclass(frozen=True, kw_only=True)
class Official:
    """A template, and how its assistant's turn is found in what it writes."""

    file: str
    format: str
    header: str
    end: str
    max_calls: int = 3
    arguments_as_text: bool = False
    """It expects arguments as JSON text, as OpenAI's API gives them."""

    def turn(self, calls):
        functions = [
            {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False) if self.arguments_as_text else arguments}
            for name, arguments in calls
        ]
        said = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function} for function in functions],
        }
        template = (official_templates_path() / self.file).read_text(encoding="utf-8")
        rendered, _ = render_jinja_template(
            conversations=[[{"role": "user", "content": "Hi"}, said]], chat_template=template, bos_token="", eos_token=""
        )
        turn = rendered[0][rendered[0].index(self.header) + len(self.header) :]
        return turn[: turn.rindex(self.end)]


CHATML = {"header": "<|im_start|>assistant\n", "end": "<|im_end|>"}
DEEPSEEK = {"header": "<｜Assistant｜>", "end": "<｜end▁of▁sentence｜>", "arguments_as_text": True}
LLAMA = {"header": "<|start_header_id|>assistant<|end_header_id|>\n\n", "end": "<|eot_id|>", "max_calls": 1}
TEMPLATES = (
    Official(file="qwen2_5.jinja", format="hermes", **CHATML),
    Official(file="qwen3.jinja", format="hermes", **CHATML),
    Official(file="qwen3_5_think.jinja", format="qwen3_coder", **CHATML),
    Official(file="qwen3_6.jinja", format="qwen3_coder", **CHATML),
    Official(file="llama3_1.jinja", format="llama3_json", **LLAMA),
    Official(file="llama3_2.jinja", format="llama3_json", **LLAMA),
    Official(file="gptoss.jinja", format="harmony", header="<|start|>assistant", end="<|call|>", max_calls=1),
    Official(file="deepseekv3.jinja", format="deepseek", **DEEPSEEK),
)


@cache
def renderer_of(family, tool_format):
    return load_renderer(str(FOLDERS[family]()), tool_format=tool_format)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.file)
@FUZZ
@given(data=st.data())
def test_calls_that_a_template_writes_are_read_exactly(template, data):
    calls = data.draw(calls_of(template.format, max_size=template.max_calls))
    parsed = parse(template.format, template.turn(calls), calls)
    assert (parsed.calls, parsed.content) == (expected(calls), "")


@pytest.mark.parametrize(("family", "position"), [("qwen3", 1), ("gpt_oss", 6)])
@FUZZ
@given(data=st.data())
def test_calls_are_read_from_the_ids_of_a_turn(family, position, data):
    template = TEMPLATES[position]
    renderer = renderer_of(family, template.format)
    calls = data.draw(calls_of(template.format, max_size=template.max_calls))
    ids = renderer.template.encode(template.turn(calls).replace(CUT, CUT + KEPT) + template.end)
    assert ids[-1] in renderer.stop_token_ids
    assert renderer.parse(ids, turn=0, tools=tools_for(calls)).calls == expected(calls)
