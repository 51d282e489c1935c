"""Tool-call formats by name; importing this registers those that psrl ships."""

from psrl.chat.parsers.base import ParsedCalls, ToolFormat, call_id, tool_formats
from psrl.chat.parsers.hermes import HermesFormat
from psrl.chat.parsers.reasoning import split_reasoning

__all__ = ["HermesFormat", "ParsedCalls", "ToolFormat", "call_id", "split_reasoning", "tool_formats"]
