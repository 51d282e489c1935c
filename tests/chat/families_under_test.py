"""The real tokenizers of the chat tests, and how each one's template is asked for the whole conversation.

`whole` is the outside truth: transformers' own `apply_chat_template`, on messages that this file maps by hand where the template
knows nothing of tools.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from transformers import AutoTokenizer

from psrl.chat import HfRenderer, ProbeReport, load_renderer, probe
from psrl.types import Message, ToolSchema
from tests.real_models import (
    gemma3_tokenizer_path,
    gpt_oss_tokenizer_path,
    llama3_1_tokenizer_path,
    qwen3_tokenizer_path,
    smollm2_path,
)

FOLDERS: dict[str, Callable[[], Path]] = {
    "smollm2": smollm2_path,
    "qwen3": qwen3_tokenizer_path,
    "llama3_1": llama3_1_tokenizer_path,
    "gpt_oss": gpt_oss_tokenizer_path,
    "gemma3": gemma3_tokenizer_path,
}
END_OF_TURN = {
    "smollm2": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "gpt_oss": "<|return|>",
    "gemma3": "<end_of_turn>",
}
CLOSER = {**END_OF_TURN, "gpt_oss": "<|end|>"}
SEPARATOR = {"smollm2": "\n", "qwen3": "\n", "llama3_1": "", "gpt_oss": "", "gemma3": "\n"}
HEADER = {
    "smollm2": "<|im_start|>assistant\n",
    "qwen3": "<|im_start|>assistant\n",
    "llama3_1": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gpt_oss": "<|start|>assistant",
    "gemma3": "<start_of_turn>model\n",
}
USER_HEADER = {
    "smollm2": "<|im_start|>user\n",
    "qwen3": "<|im_start|>user\n",
    "llama3_1": "<|start_header_id|>user<|end_header_id|>\n\n",
    "gpt_oss": "<|start|>user<|message|>",
    "gemma3": "<start_of_turn>user\n",
}
KNOWS_TOOLS = ("qwen3", "gpt_oss")
DATE = "2025-01-01"
FAMILIES = tuple(FOLDERS)
TOOL = ToolSchema(
    name="code_interpreter",
    description='Runs Python; prints {"what": "it says"}.',
    parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
)


@dataclass(frozen=True)
class RealFamily:
    """A real tokenizer, the renderer under test, and the truth."""

    name: str
    renderer: HfRenderer
    tokenizer: object
    end_of_turn_id: int
    report: ProbeReport

    def whole(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, header: bool) -> str:
        """The template's own rendering of the whole conversation."""
        if self.name in KNOWS_TOOLS:
            plain = [message.to_template() for message in messages]
            schemas = [tool.to_template() for tool in tools] or None
        else:
            plain, schemas = by_hand(messages, tools), None
        if self.name == "gpt_oss":
            plain = [with_one_text(message) for message in plain]
        if self.name == "gemma3":
            plain = [
                {"role": role, "content": "\n\n".join(message["content"] for message in group)}
                for role, group in groupby(plain, key=lambda message: message["role"])
            ]
        return self.tokenizer.apply_chat_template(plain, tools=schemas, add_generation_prompt=header, tokenize=False)

    def end_of(self, said: Message, ids: Sequence[int], start: int) -> int:
        """Where in the template's ids the past turn that begins at `start` ends, its last token included."""
        closer = "<|call|>" if self.name == "gpt_oss" and said.tool_calls else CLOSER[self.name]
        return ids.index(self.tokenizer.convert_tokens_to_ids(closer), start) + 1

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


@cache
def real_family(name: str) -> RealFamily:
    path = str(FOLDERS[name]())
    renderer = load_renderer(path, tool_format="hermes")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = tokenizer.chat_template.replace('strftime_now("%Y-%m-%d")', f"'{DATE}'")
    return RealFamily(name, renderer, tokenizer, tokenizer.get_vocab()[END_OF_TURN[name]], probe(renderer))


def with_one_text(message: dict[str, object]) -> dict[str, object]:
    """GPT-OSS's template refuses reasoning and content beside one call."""
    if message.get("tool_calls") and message["content"] and message.get("reasoning_content"):
        return {**message, "content": "", "reasoning_content": f"{message['reasoning_content']}\n\n{message['content']}"}
    return message


def by_hand(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[dict[str, str]]:
    """The conversation for a template without tools, written down step by step."""
    plain: list[dict[str, str]] = []
    if tools:
        text = (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
            + "\n".join(json.dumps(tool.to_template(), ensure_ascii=False) for tool in tools)
            + "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
            "<tool_call></tool_call> XML tags:\n<tool_call>\n"
            '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )
        if messages[0].role == "system":
            text = messages[0].content + "\n\n" + text
            messages = messages[1:]
        plain.append({"role": "system", "content": text})
    previous = None
    for message in messages:
        content = message.content
        for call in message.tool_calls:
            body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
            content += ("\n" if content else "") + f"<tool_call>\n{body}\n</tool_call>"
        if message.role == "tool":
            answer = f"<tool_response>\n{message.content}\n</tool_response>"
            if previous == "tool":
                plain[-1]["content"] += "\n" + answer
            else:
                plain.append({"role": "user", "content": answer})
        else:
            plain.append({"role": str(message.role), "content": content})
        previous = message.role
    return plain
