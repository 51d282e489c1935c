"""Between observations and token ids; importing this package registers what psrl brings."""

from psrl.agent_data import mini_swe_agent_data, tool_agent_data
from psrl.agent_data.base import AgentData, AgentDataParts, build_agent_data, register_agent_data
from psrl.agent_data.conversation import ConversationAgentData

__all__ = [
    "AgentData",
    "AgentDataParts",
    "ConversationAgentData",
    "build_agent_data",
    "mini_swe_agent_data",
    "register_agent_data",
    "tool_agent_data",
]
