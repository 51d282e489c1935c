"""Tool-call formats by name; importing this registers those that psrl ships."""

from psrl.chat.parsers.base import ParsedCalls, ToolFormat, call_id, tool_formats
from psrl.chat.parsers.deepseek import DeepSeekFormat
from psrl.chat.parsers.harmony import HarmonyFormat
from psrl.chat.parsers.hermes import HermesFormat
from psrl.chat.parsers.llama3_json import Llama3JsonFormat
from psrl.chat.parsers.mistral import MistralFormat
from psrl.chat.parsers.qwen3_coder import Qwen3CoderFormat
from psrl.chat.parsers.reasoning import split_reasoning

__all__ = [
    "DeepSeekFormat",
    "HarmonyFormat",
    "HermesFormat",
    "Llama3JsonFormat",
    "MistralFormat",
    "ParsedCalls",
    "Qwen3CoderFormat",
    "ToolFormat",
    "call_id",
    "split_reasoning",
    "tool_formats",
]
