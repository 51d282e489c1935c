"""The exact token record of an episode (or of one branch): an append-only list of steps.

Invariant: ids, mask, logprobs and versions are views of the same steps, so their lengths cannot differ. A token has mask 1
only if the policy sampled it, and a sampled token of an episode has mask 1 exactly once: where branches share a turn, it is sampled
in the first of them and context in the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from psrl.types.ids import TrajectoryUid

NOT_SAMPLED_VERSION = -1
"""Policy version of a token that no policy sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one turn added to a trajectory."""

    observation_ids: list[int]  # [O]
    """Tokens that the environment and the template put before this turn; never trained on."""
    sampled_ids: list[int]  # [S]
    """Tokens that the policy sampled, the end-of-turn token included."""
    logprobs: list[float]  # [S]
    """Of the distribution sampled from, at `temperature`."""
    policy_versions: list[int]  # [S]
    """Weights that sampled each token; more than one value where an update fell inside the turn."""
    temperature: float
    finish_reason: str
    """As the engine said it: `stop`, `length` or `abort`."""
    action: Any = None
    """What AgentData read from the sampled tokens."""

    def __post_init__(self) -> None:
        lengths = {len(self.sampled_ids), len(self.logprobs), len(self.policy_versions)}
        assert len(lengths) == 1, f"sampled_ids, logprobs and policy_versions have lengths {sorted(lengths)}"


@dataclass(slots=True)
class Trajectory:
    """Steps in order; grows only at its end.

    Example:
        `append(Step(observation_ids=[1, 2], sampled_ids=[3, 4], ...))` gives ids [1, 2, 3, 4] and loss_mask [0, 0, 1, 1].
    """

    uid: TrajectoryUid
    _steps: list[Step] = field(default_factory=list)
    _num_tokens: int = 0

    def append(self, step: Step) -> None:
        """Add one turn."""
        self._steps.append(step)
        self._num_tokens += len(step.observation_ids) + len(step.sampled_ids)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The turns so far."""
        return tuple(self._steps)

    @property
    def num_turns(self) -> int:
        """How many turns the policy took."""
        return len(self._steps)

    @property
    def num_tokens(self) -> int:
        """Length T of ids, loss_mask, logprobs and versions."""
        return self._num_tokens

    @property
    def num_sampled(self) -> int:
        """How many tokens have mask 1."""
        return sum(len(step.sampled_ids) for step in self._steps)

    @property
    def temperature(self) -> float:
        """The one sampling temperature of all steps (1.0 for a trajectory without steps)."""
        temperatures = {step.temperature for step in self._steps}
        assert len(temperatures) <= 1, f"trajectory {self.uid} mixes temperatures {sorted(temperatures)}"
        return temperatures.pop() if temperatures else 1.0

    def ids(self) -> list[int]:
        """[T] every token, in the order in which the model saw it."""
        return [token for step in self._steps for part in (step.observation_ids, step.sampled_ids) for token in part]

    def loss_mask(self) -> list[int]:
        """[T] 1 where the policy sampled the token, else 0."""
        return list(self._spread(lambda step: [1] * len(step.sampled_ids), 0))

    def logprobs(self) -> list[float]:
        """[T] of the distribution sampled from; 0.0 where the mask is 0."""
        return list(self._spread(lambda step: step.logprobs, 0.0))

    def versions(self) -> list[int]:
        """[T] policy version of each token; -1 where the mask is 0."""
        return list(self._spread(lambda step: step.policy_versions, NOT_SAMPLED_VERSION))

    def turn_indices(self) -> list[int]:
        """[T] which turn sampled the token, from 0; -1 where the mask is 0."""
        return [
            value for index, step in enumerate(self._steps) for value in [-1] * len(step.observation_ids) + [index] * len(step.sampled_ids)
        ]

    def _spread(self, of_sampled: Any, elsewhere: Any) -> Iterator[Any]:
        for step in self._steps:
            yield from [elsewhere] * len(step.observation_ids)
            yield from of_sampled(step)
