"""ReTool-SFT's rows become conversations with calls, learned where the assistant wrote and nowhere else."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from psrl.chat import load_renderer
from psrl.datasets.demonstrations import load_demonstrations, tokens_of
from psrl.errors import ConfigError, RowError
from psrl.recipes.retool.demonstrations import conversation_of, write_demonstrations
from psrl.recipes.retool.prepare import SYSTEM_TEXT, prepare
from psrl.types import Role
from tests.real_models import qwen3_tokenizer_path

PROMPT = (
    "Solve the following problem step by step. You now have the ability to selectively write executable Python code to enhance your "
    "reasoning process. [...]\n\n*user question:*\n<answer>Find the greatest integer less than $\\sqrt{10} + \\sqrt{80}$.\n\n"
    "Remember to place the final answer in the last part using the format: \n\n\\boxed{'The final answer goes here.'}</answer>"
)
ANSWER = (
    "Let me calculate.\n<code>\n```python\nimport math\nprint(math.sqrt(10) + math.sqrt(80))\n```\n</code>\n"
    "<interpreter>\n12.106549570149\n</interpreter>\nThe squares confirm it.\n<code>\nprint(12 < 12.1 < 13)\n</code>"
    "<interpreter>True</interpreter>\n<answer>\n\\boxed{12}\n</answer>"
)
ROW = {"messages": [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": ANSWER}]}
"""As published: prompt and answer, with blocks in the text. The prompt's middle is left out."""


def converted(row):
    return conversation_of(row, system_text=SYSTEM_TEXT, source="f", row=3)


def test_blocks_become_calls_and_tool_messages():
    messages = converted(ROW)["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert messages[1]["content"] == "Find the greatest integer less than $\\sqrt{10} + \\sqrt{80}$."
    assert messages[2]["content"] == "Let me calculate."
    codes = [message["tool_calls"][0]["function"]["arguments"]["code"] for message in messages if "tool_calls" in message]
    assert codes == ["import math\nprint(math.sqrt(10) + math.sqrt(80))", "print(12 < 12.1 < 13)"]
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["12.106549570149", "True"]
    assert messages[-1] == {"role": "assistant", "content": "\\boxed{12}"}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("<code>print(1)</code> and no output", "broken_blocks"),
        ("<code>print(1)", "broken_blocks"),
        ("<code>\n```python\n```\n</code><interpreter>1</interpreter> 1", "broken_blocks"),
        ("<code>print(1)</code><interpreter>1</interpreter>", "no_answer"),
    ],
)
def test_a_row_that_cannot_be_cut_is_refused_by_its_reason(answer, reason):
    with pytest.raises(RowError) as caught:
        converted({"messages": [ROW["messages"][0], {"role": "assistant", "content": answer}]})
    assert (caught.value.reason, caught.value.row) == (reason, 3)


def test_only_the_assistants_tokens_are_learned_in_the_layout_of_the_models_own_template(tmp_path):
    write_demonstrations(tmp_path / "sft.jsonl", str(jsonl(tmp_path, [ROW])), system_text=SYSTEM_TEXT)
    (demonstration,) = load_demonstrations([str(tmp_path / "sft.jsonl")])
    renderer = load_renderer(str(qwen3_tokenizer_path()), tool_format="hermes")
    tokens = tokens_of(demonstration, renderer)
    learned, runs = [], []
    for token, mask in zip(tokens.ids, tokens.loss_mask, strict=True):
        if mask and not learned:
            runs.append([])
        learned = [token] if mask else []
        if mask:
            runs[-1].append(token)
    assert [renderer.decode(run) for run in runs] == [
        'Let me calculate.\n<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "import math\\nprint(math.sqrt(10) + '
        'math.sqrt(80))"}}\n</tool_call><|im_end|>',
        'The squares confirm it.\n<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(12 < 12.1 < 13)"}}\n'
        "</tool_call><|im_end|>",
        "\\boxed{12}<|im_end|>",
    ]
    # Qwen3's own template writes the same conversation; it puts an empty thought before an answer that follows a tool.
    whole = renderer.template.text(demonstration.messages, demonstration.tools, header=False)
    assert renderer.decode(tokens.ids) in whole.replace("<think>\n\n</think>\n\n", "")


def test_rows_with_calls_as_verl_converts_them_are_kept_also_from_parquet(tmp_path):
    call = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": "print(1)"}}}
    messages = [
        {"role": "user", "content": "q", "tool_calls": None},
        {"role": "assistant", "content": "so", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_calls": None},
        {"role": "assistant", "content": "\\boxed{1}", "tool_calls": None},
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": messages, "tools": "[]"}] * 3), tmp_path / "rows.parquet")
    prepare(None, tmp_path / "out", sft=str(tmp_path / "rows.parquet"), with_model=False)
    first, *rest = load_demonstrations([str(tmp_path / "out" / "sft.jsonl")])
    assert len(rest) == 2
    assert [message.role for message in first.messages] == [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    assert first.messages[2].tool_calls[0].arguments == {"code": "print(1)"}
    assert first.tools[0].name == "code_interpreter"
    # The file itself, too, with its tools as one JSON text.
    assert load_demonstrations([str(tmp_path / "rows.parquet")])[0].messages[1].tool_calls[0].name == "code_interpreter"


def test_a_message_may_call_and_say_nothing_and_needs_a_role(tmp_path):
    call = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": "print(1)"}}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "1"}]
    row = {"messages": [{"role": "user", "content": "q"}, *turns, {"role": "assistant", "content": "\\boxed{1}"}]}
    write_demonstrations(tmp_path / "sft.jsonl", str(jsonl(tmp_path, [row])), system_text="s")
    (demonstration,) = load_demonstrations([str(tmp_path / "sft.jsonl")])
    assert [(message.content, len(message.tool_calls)) for message in demonstration.messages[2:]] == [("", 1), ("1", 0), ("\\boxed{1}", 0)]
    with pytest.raises(RowError, match="role"):
        converted({"messages": [{"content": "q"}, *turns]})


def test_many_broken_rows_refuse_the_file_and_nothing_is_written(tmp_path):
    broken = {"messages": [{"role": "user", "content": "q"}]}
    with pytest.raises(ConfigError, match=r"2 of 4 rows cannot be used.*unknown_shape"):
        write_demonstrations(tmp_path / "sft.jsonl", str(jsonl(tmp_path, [ROW, broken, ROW, broken])), system_text="s")
    assert not (tmp_path / "sft.jsonl").exists()


def jsonl(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
