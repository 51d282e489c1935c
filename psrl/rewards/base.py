"""What all scorers share: which outcomes are judged at all, the self-test, and the registry.

Invariant: an episode whose outcome says nothing about the policy gets reward None from every scorer, so no scorer can turn a
failure of the machinery into a punishment.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from psrl.config.reward import CustomRewardFunctionConfig, RewardConfig
from psrl.protocols import Sandboxes, Scorer
from psrl.registry import Registry
from psrl.types import LoopResult, Score, Task


class EpisodeScorer(Scorer):
    """Base of every scorer: subclasses say how to judge an episode that may be judged."""

    async def score(self, task: Task, result: LoopResult) -> Score:
        """Reward of one episode; None where the outcome does not judge the policy."""
        if not result.outcome.judges_policy:
            return Score(reward=None)
        return await self.judge(task, result)

    @abstractmethod
    async def judge(self, task: Task, result: LoopResult) -> Score:
        """Reward of an episode that ended because of what the policy did, also at a limit.

        Raises:
            RewardError: The grader failed or ran out of time.
        """

    async def self_test(self) -> None:
        """Grade known answers in the real grader, before a run starts.

        Raises:
            RewardError: The grader does not work here.
            ConfigError: The user's own grader cannot be loaded.
        """

    async def close(self) -> None:
        """Nothing to free unless a subclass holds processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerParts:
    """What a run offers to its scorer."""

    reward: RewardConfig
    custom: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    sandboxes: Sandboxes
    """Where what an agent wrote is run to be judged; fresh ones, never those of its episode."""
    allow_network: bool = False
    """Whether a project that asks for the network gets it: `sandbox.allow_network`."""


scorers: Registry[Callable[[ScorerParts], EpisodeScorer]] = Registry("scorer", key="reward.name")


def final_turn(result: LoopResult) -> str:
    """The sampled text of the last turn; empty where no turn was sampled."""
    return result.turn_texts[-1] if result.turn_texts else ""
