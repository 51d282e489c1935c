"""Demonstrations are laid out as episodes are, and learned where the assistant wrote."""

import json

import pytest

from psrl.chat import load_renderer
from psrl.config.load import RECIPES_FOLDER
from psrl.datasets.demonstrations import Demonstration, load_demonstrations, tokens_of
from psrl.datasets.generators import build_generator
from psrl.errors import ConfigError
from psrl.types import Message, Role


@pytest.fixture(scope="module")
def renderer():
    return load_renderer(str(RECIPES_FOLDER / "retool_tiny" / "model"), tool_format="hermes")


def test_only_what_the_assistant_wrote_is_learned(renderer):
    demonstration = Demonstration(
        messages=(
            Message(role=Role.USER, content="What is 2 + 2?"),
            Message(role=Role.ASSISTANT, content="<tool_call>\n{}\n</tool_call>"),
            Message(role=Role.TOOL, content="4"),
            Message(role=Role.ASSISTANT, content="It is 4."),
        )
    )
    tokens = tokens_of(demonstration, renderer)
    learned = [token for token, mask in zip(tokens.ids, tokens.loss_mask, strict=True) if mask]
    assert renderer.decode(learned) == "<tool_call>\n{}\n</tool_call><|im_end|>It is 4.<|im_end|>"
    assert renderer.decode(tokens.ids) == (
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{}\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>"
    )


def test_generated_demonstrations_equal_the_templates_own_rendering(renderer):
    for demonstration in build_generator("arithmetic").demonstrations(300, seed=5):
        whole = renderer.template.encode(renderer.prompt_text(demonstration.messages, demonstration.tools, header=False))
        ids = tokens_of(demonstration, renderer).ids
        assert whole[: len(ids)] == ids
        assert renderer.decode(whole[len(ids) :]) == "\n"


def test_files_of_demonstrations_are_read_with_their_tools(tmp_path):
    schema = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages, "tools": [schema]}) + "\n" + json.dumps({"messages": messages}) + "\n")
    first, second = load_demonstrations([str(path)])
    assert [tool.to_template() for tool in first.tools] == [schema]
    assert second.tools == ()
    assert [message.content for message in second.messages] == ["q", "a"]


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"prompt": []}, "missing 'messages'"),
        ({"messages": [{"role": "user", "content": "q"}]}, "needs an assistant turn"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "other messages before"),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [{}]}]}, "missing 'function'"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [1]}]}, "only the assistant calls"),
        ([1], "a row is an object"),
    ],
)
def test_a_row_that_is_no_demonstration_is_named(tmp_path, row, cause):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=cause) as caught:
        load_demonstrations([str(path)])
    assert "row 0" in str(caught.value)
