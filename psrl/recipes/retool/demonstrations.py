"""Rows of ReTool-SFT as conversations with tool calls: what `psrl sft` learns from.

A published row has two messages: a prompt that ends in the question, and one answer in which `<code>` blocks, each followed by the
`<interpreter>`'s output, stand in the text, and the last of it in `<answer>`. Here each block becomes a call of `code_interpreter` and
a tool's message, so that the model learns to call as it will in episodes. Rows that hold calls already (verl's converted ones) are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from psrl.datasets.rows import named
from psrl.errors import ConfigError, RowError
from psrl.recipes.published_rows import rows_of_hub, rows_of_source
from psrl.recipes.row_files import write_rows
from psrl.tools.code_interpreter import SCHEMA

QUESTION_MARK = "*user question:*"
MAX_LEFT_OUT_SHARE = 0.01
_BLOCK = re.compile(r"<code>(?P<code>.*?)</code>\s*<interpreter>(?P<output>.*?)</interpreter>", re.DOTALL)
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_TAG = re.compile(r"</?(?:code|interpreter)>")
_ANSWER_TAG = re.compile(r"</?answer>")
_REMINDER = re.compile(r"\s*Remember to place the final answer in the last part using the format:.*\Z", re.DOTALL)
"""The recipe's own system message asks for the box."""


def write_demonstrations(output: Path, source: str, *, system_text: str) -> Path:
    """Convert rows of a file, a folder or the hub, and write them; the file appears whole or not at all.

    Raises:
        ConfigError: There are none, or more than one in a hundred cannot be converted; they are named.
    """
    path = Path(source).expanduser()
    is_name = not path.exists() and source.count("/") == 1 and not path.suffix
    rows = rows_of_hub(source, split="train") if is_name else rows_of_source(_there(path), split=None)
    converted, bad = list[dict[str, Any]](), list[RowError]()
    for file, row, raw in rows:
        try:
            converted.append(conversation_of(raw, system_text=system_text, source=file, row=row))
        except RowError as error:
            bad.append(error)
    if not converted or len(bad) > MAX_LEFT_OUT_SHARE * (len(converted) + len(bad)):
        rule = f"{len(bad)} of {len(converted) + len(bad)} rows cannot be used: {named(bad)}" if bad else "hold no row"
        raise ConfigError(key="--sft", value=source, rule=rule, fix="correct these rows")
    write_rows({output: converted})
    print(f"{len(converted)} demonstrations written to {output}" + (f"; left out: {named(bad)}" if bad else ""))
    return output


def conversation_of(raw: Any, *, system_text: str, source: str, row: int) -> dict[str, Any]:
    """One row as `messages` with calls, and `tools`.

    Raises:
        RowError: Reasons: `unknown_shape`, `no_question`, `broken_blocks`, `no_answer`.
    """

    def refuse(reason: str, detail: str) -> RowError:
        return RowError(source=source, row=row, reason=reason, detail=detail)

    messages = raw.get("messages") if isinstance(raw, Mapping) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise refuse("unknown_shape", f"a row has messages with role and content, this is {raw!r:.80}")
    if any(each.get("tool_calls") for each in messages):
        kept = [_plain(each) for each in messages]
        begins = [] if kept[0]["role"] == "system" else [{"role": "system", "content": system_text}]
        return {"messages": [*begins, *kept], "tools": [SCHEMA.to_template()]}
    roles = [each.get("role") for each in messages if each.get("role") != "system"]
    if roles != ["user", "assistant"]:
        raise refuse("unknown_shape", f"the messages are of user and assistant, these are of {roles}")
    asked, said = (each["content"] for each in messages if each.get("role") != "system")
    question = _REMINDER.sub("", _ANSWER_TAG.sub("", asked.rpartition(QUESTION_MARK)[2])).strip()
    if not question:
        raise refuse("no_question", f"nothing follows {QUESTION_MARK!r}")
    return {
        "messages": [{"role": "system", "content": system_text}, {"role": "user", "content": question}, *_turns(said, refuse)],
        "tools": [SCHEMA.to_template()],
    }


def _turns(said: str, refuse: Any) -> Iterator[dict[str, Any]]:
    """The answer, cut at its blocks."""
    position = 0
    for number, block in enumerate(_BLOCK.finditer(said)):
        text = said[position : block.start()]
        fenced = _FENCE.search(block["code"])
        code = (fenced[1] if fenced else block["code"]).strip()
        if _TAG.search(text) or not code:
            raise refuse("broken_blocks", f"block {number} is not closed, has no output or no code: {block[0]!r:.80}")
        call = {"id": f"call-{number}", "type": "function", "function": {"name": SCHEMA.name, "arguments": {"code": code}}}
        yield {"role": "assistant", "content": text.strip(), "tool_calls": [call]}
        yield {"role": "tool", "content": block["output"].strip(), "tool_call_id": f"call-{number}", "name": SCHEMA.name}
        position = block.end()
    last = said[position:]
    if _TAG.search(last):
        raise refuse("broken_blocks", f"a block is not closed or has no output: {last!r:.80}")
    last = _ANSWER_TAG.sub("", last).strip()
    if not last:
        raise refuse("no_answer", "nothing follows the last block")
    yield {"role": "assistant", "content": last}


def _is_message(message: Any) -> bool:
    """Text of a role; a message that calls may say nothing beside, as OpenAI's API has it."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str) or (content is None and bool(message.get("tool_calls")))


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without the columns that Parquet fills with null where other rows have a value."""
    return {name: value for name, value in message.items() if value is not None}


def _there(path: Path) -> Path:
    if not path.exists():
        fix = "name a file or folder that exists, or a data set of the hub, such as JoeYing/ReTool-SFT"
        raise ConfigError(key="--sft", value=str(path), rule="is not on this machine", fix=fix)
    return path
