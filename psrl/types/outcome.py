"""How an episode ended, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from psrl.types.ids import EpisodeUid, GroupUid, PolicyVersion
from psrl.types.message import Message
from psrl.types.task import Task
from psrl.types.trajectory import Trajectory


class Outcome(StrEnum):
    """How an episode ended."""

    FINISHED = "finished"
    """The environment said done, or the model gave its final turn."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """A turn or the trajectory reached its token limit; the cut turn executed nothing."""
    TIMEOUT = "timeout"
    """The episode's or a step's seconds ran out because of what the policy did, or psrl truncated it: what it had is judged."""
    AGENT_ERROR = "agent_error"
    """The agent program itself failed."""
    INFRA_ERROR = "infra_error"
    """Something that says nothing about the policy failed: engine, sandbox service, grader."""
    ABORTED = "aborted"
    """psrl itself ended it: shutdown, a filter, an update."""

    @property
    def judges_policy(self) -> bool:
        """Whether this outcome may have a reward at all."""
        return self not in (Outcome.INFRA_ERROR, Outcome.ABORTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeTicket:
    """An episode's reservation: what the controller hands to an agent worker with a task."""

    uid: EpisodeUid
    group: GroupUid
    admitted_version: PolicyVersion
    """V_traj."""
    seed: int
    """Every random choice of the episode derives from it."""
    is_validation: bool = False
    temperature: float | None = None
    """Overrides the rollout's temperature (validation runs greedy and sampled); None keeps it."""
    instance: int | None = None
    """Index of the rollout instance (replica) that plays it; None: any, as where there is only one instance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Seconds that an episode spent, by what it waited for."""

    total_s: float = 0.0
    generation_s: float = 0.0
    tools_s: float = 0.0
    """Inside `Environment.reset` and `step`."""
    reward_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What an agent left at its end, for scorers and people."""

    exit_status: str
    """As the agent says it, such as mini-swe-agent's `Submitted` or `LimitsExceeded`."""
    patch: str
    """What it changed, as `git diff --binary` in its sandbox says; empty where nothing was changed or could be had."""
    text: str = ""
    """What it handed in with its last words."""

    @property
    def is_submitted(self) -> bool:
        """Whether the agent said that it is done, and did not just run into a limit."""
        return self.exit_status == "Submitted"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopResult:
    """What an agent loop returns; the reward is not known yet."""

    outcome: Outcome
    trajectories: tuple[Trajectory, ...]
    """One per branch; empty only for `infra_error` and `aborted`."""
    messages: tuple[Message, ...]
    """The conversation for people and scorers, the prompt included."""
    turn_texts: tuple[str, ...]
    """The sampled text of each turn of the main branch; the last one is the final turn."""
    step_rewards: tuple[float | None, ...] = ()
    """What the environment returned, one per step; None where it does not judge."""
    counts: dict[str, float] = field(default_factory=dict)
    """Per-episode counters for metrics, such as `tool_calls`, `tool_errors/invalid_json`."""
    timings: Timings = Timings()
    submission: Submission | None = None
    """Of agents that hand something in; None of every other loop, and where the agent's sandbox was lost."""
    error: str | None = None
    """Cause in words where the outcome is an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What a scorer says of an episode."""

    reward: float | None
    """None where the episode could not be judged; such an episode is never trained on."""
    accuracy: float | None = None
    """1.0 solved, 0.0 not solved: what validation reports."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, for metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """A finished episode: the record that goes to the run folder."""

    ticket: EpisodeTicket
    task: Task
    result: LoopResult
    score: Score
    timings: Timings
