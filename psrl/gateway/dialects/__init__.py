"""The APIs that agents may speak to a session."""

from psrl.gateway.dialects.anthropic_messages import AnthropicMessages
from psrl.gateway.dialects.base import Dialect
from psrl.gateway.dialects.openai_chat import OpenAIChat
from psrl.gateway.dialects.openai_responses import OpenAIResponses

DIALECTS: tuple[Dialect, ...] = (OpenAIChat(), AnthropicMessages(), OpenAIResponses())
"""Each at its own path."""
