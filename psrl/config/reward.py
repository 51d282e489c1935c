"""`reward` and `custom_reward_function`: how episodes are judged."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class OverlongBufferConfig:
    """DAPO's soft overlong punishment: a penalty that grows over the last `len` tokens."""

    enable: bool = False
    len: int = 128
    penalty_factor: float = 1.0
    max_sampled_tokens: int = 512
    """Sampled tokens of an episode at which the penalty is full; observations do not count."""


@dataclass(kw_only=True)
class RewardConfig:
    """The scorer and its bounds."""

    name: str = "environment"
    """`environment` (sum of the environment's own rewards), `retool`, `math_answer`, or `custom`."""
    num_processes: int = 1
    """Child processes in which checkers run."""
    timeout_s: float = 10.0
    """Of one grading; then the child is killed and the reward is None."""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)


@dataclass(kw_only=True)
class CustomRewardFunctionConfig:
    """verl's hook: compute_score(data_source, solution_str, ground_truth, extra_info)."""

    path: str | None = None
    name: str = "compute_score"
