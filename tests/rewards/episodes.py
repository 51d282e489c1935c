"""Small episodes to judge."""

from psrl.config.reward import CustomRewardFunctionConfig
from psrl.config.sandbox import SandboxConfig
from psrl.rewards.base import ScorerParts
from psrl.rewards.scorer import build_scorer
from psrl.sandbox import BackendSandboxes
from psrl.types import LoopResult, Message, Outcome, Role, Step, Task, TaskUid, Trajectory, TrajectoryUid


def scorer_of(reward, custom=None):
    """The scorer that these settings choose."""
    return build_scorer(
        ScorerParts(reward=reward, custom=custom or CustomRewardFunctionConfig(), sandboxes=BackendSandboxes(SandboxConfig()))
    )


def task(truth="42", **fields):
    return Task(uid=TaskUid("val-0-0"), prompt=(Message(role=Role.USER, content="?"),), data_source="test", ground_truth=truth, **fields)


def result(*turns, outcome=Outcome.FINISHED, tool_turns=0, step_rewards=(), num_sampled=1, num_observed=1, counts=None):
    trajectory = Trajectory(uid=TrajectoryUid("t"))
    trajectory.append(
        Step(
            observation_ids=[0] * num_observed,
            sampled_ids=[1] * num_sampled,
            logprobs=[0.0] * num_sampled,
            policy_versions=[0] * num_sampled,
            temperature=1.0,
            finish_reason="stop",
        )
    )
    return LoopResult(
        outcome=outcome,
        trajectories=(trajectory,),
        messages=(),
        turn_texts=turns,
        step_rewards=step_rewards,
        counts={"tool_turns": float(tool_turns), **(counts or {})},
    )
