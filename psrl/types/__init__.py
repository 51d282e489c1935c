"""The nouns of psrl, one small frozen dataclass each."""

from psrl.types.data_proto import DataProto
from psrl.types.generation import FinishReason, GenerateRequest, Generation, SamplingParams, turn_priority, turn_seed
from psrl.types.ids import EpisodeUid, GroupUid, PolicyVersion, SessionId, TaskUid, TrajectoryUid
from psrl.types.message import Message, ParsedTurn, Role, ToolCall, ToolCallError, ToolSchema
from psrl.types.outcome import Episode, EpisodeTicket, LoopResult, Outcome, Score, Submission, Timings
from psrl.types.sandbox import CommandResult, SandboxLimits, SandboxSpec
from psrl.types.session import AgentSampling, SamplingContract, SessionAddress, SessionLimits, SessionRecord, SessionSpec
from psrl.types.swe import SweProblem
from psrl.types.task import Task
from psrl.types.trajectory import NOT_SAMPLED_VERSION, Step, Trajectory

__all__ = [
    "NOT_SAMPLED_VERSION",
    "AgentSampling",
    "CommandResult",
    "DataProto",
    "Episode",
    "EpisodeTicket",
    "EpisodeUid",
    "FinishReason",
    "GenerateRequest",
    "Generation",
    "GroupUid",
    "LoopResult",
    "Message",
    "Outcome",
    "ParsedTurn",
    "PolicyVersion",
    "Role",
    "SamplingContract",
    "SamplingParams",
    "SandboxLimits",
    "SandboxSpec",
    "Score",
    "SessionAddress",
    "SessionId",
    "SessionLimits",
    "SessionRecord",
    "SessionSpec",
    "Step",
    "Submission",
    "SweProblem",
    "Task",
    "TaskUid",
    "Timings",
    "ToolCall",
    "ToolCallError",
    "ToolSchema",
    "Trajectory",
    "TrajectoryUid",
    "turn_priority",
    "turn_seed",
]
