"""The nouns of psrl, one small frozen dataclass each."""

from psrl.types.data_proto import DataProto
from psrl.types.generation import FinishReason, GenerateRequest, Generation, SamplingParams
from psrl.types.ids import EpisodeUid, GroupUid, PolicyVersion, TaskUid, TrajectoryUid
from psrl.types.message import Message, ParsedTurn, Role, ToolCall, ToolCallError, ToolSchema
from psrl.types.outcome import Episode, EpisodeTicket, LoopResult, Outcome, Score, Timings
from psrl.types.task import Task
from psrl.types.trajectory import NOT_SAMPLED_VERSION, Step, Trajectory

__all__ = [
    "NOT_SAMPLED_VERSION",
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
    "SamplingParams",
    "Score",
    "Step",
    "Task",
    "TaskUid",
    "Timings",
    "ToolCall",
    "ToolCallError",
    "ToolSchema",
    "Trajectory",
    "TrajectoryUid",
]
