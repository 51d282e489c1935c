"""`reward` and `custom_reward_function`: how episodes are judged."""

import math
from dataclasses import dataclass, field

SCORE_TIMEOUT_S = 120.0
"""Far above `reward.timeout_s`, which a scorer itself keeps: the end of waiting for a scorer that does not."""


@dataclass(kw_only=True)
class OverlongBufferConfig:
    """DAPO's soft overlong punishment: a penalty that grows over the last `len` tokens."""

    enable: bool = False
    len: int = 128
    penalty_factor: float = 1.0
    max_sampled_tokens: int = 512
    """Sampled tokens of an episode at which the penalty is full; observations do not count."""


@dataclass(kw_only=True)
class ExecutionConfig:
    """How a patch is graded by running the project's tests (`reward.name=execution`); docs/swe_grading.md."""

    mode: str = "binary"
    """`binary`, `test_ratio`, `partial_credit` or `shaped`: what an attempt earns that does not resolve the problem."""
    timeout_s: float = 300.0
    """Of one whole grading: the sandbox, the project, the patch, the tests. A row's `timeout_s` is of the tests alone."""
    max_patch_kb: int = 512
    """A larger patch is not graded: it is refused as too large."""
    cache_size: int = 1024
    """Verdicts of the same problem and patch that are kept in each process; 0 keeps none."""
    memory_mb: int = 1024
    num_processes: int = 128
    """Of the grading sandbox, threads included."""
    disk_mb: int = 256


@dataclass(kw_only=True)
class RewardConfig:
    """The scorer and its bounds."""

    name: str = "environment"
    """`environment` (sum of the environment's own rewards), `retool`, `math_answer`, `execution`, or `custom`."""
    num_processes: int = 1
    """Child processes in which checkers run; with `execution`, gradings at once in one agent worker."""
    timeout_s: float = 10.0
    """Of one grading by a checker; then the child is killed and the reward is None. `execution` has its own."""
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)

    def score_timeout_s(self, *, max_concurrent: int) -> float:
        """When to stop waiting for a score, where so many episodes may be judged at once and gradings queue for their places."""
        if self.name != "execution":
            return SCORE_TIMEOUT_S
        return SCORE_TIMEOUT_S + self.execution.timeout_s * math.ceil(max_concurrent / self.num_processes)


@dataclass(kw_only=True)
class CustomRewardFunctionConfig:
    """verl's hook: compute_score(data_source, solution_str, ground_truth, extra_info)."""

    path: str | None = None
    name: str = "compute_score"
