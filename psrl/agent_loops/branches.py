"""Which branches of a session are trained on: `rollout.agent.branch_reward`."""

from __future__ import annotations

from collections.abc import Sequence

from psrl.types import Step, Trajectory

SHARED = "shared"
LAST = "last"


def trained_branches(trajectories: Sequence[Trajectory], branch_reward: str) -> tuple[Trajectory, ...]:
    """The trajectories that carry the episode's reward.

    Args:
        trajectories: One per leaf, the branch of the last turn at the end; each sampled token has mask 1 in the first that holds it.
        branch_reward: `shared`: all of them. `last`: the branch of the last turn, all of whose sampled tokens are trained on.
    """
    if branch_reward == SHARED or len(trajectories) <= 1:
        return tuple(trajectories)
    whole: list[Trajectory] = []
    for trajectory in trajectories:
        whole.append(_with_shared_turns(trajectory, whole))
    return (whole[-1],)


def _with_shared_turns(branch: Trajectory, earlier: Sequence[Trajectory]) -> Trajectory:
    """`branch`, with the turns that it shares with one of the whole `earlier` ones as steps of its own again.

    Example:
        earlier 1 2 | 3 4 and branch 1 2 3 4 5 | 6 (sampled after the bar) -> 1 2 | 3 4, 5 | 6.
    """
    first, *rest = branch.steps
    shared: list[Step] = []
    for other in earlier:
        begins_alike: list[Step] = []
        context: list[int] = []
        for step in other.steps:
            context += [*step.observation_ids, *step.sampled_ids]
            if context != first.observation_ids[: len(context)]:
                break
            begins_alike.append(step)
        shared = max(shared, begins_alike, key=len)
    num_shared = sum(len(step.observation_ids) + len(step.sampled_ids) for step in shared)
    whole = Trajectory(uid=branch.uid)
    own = Step(
        observation_ids=first.observation_ids[num_shared:],
        sampled_ids=first.sampled_ids,
        logprobs=first.logprobs,
        policy_versions=first.policy_versions,
        temperature=first.temperature,
        finish_reason=first.finish_reason,
    )
    for step in (*shared, own, *rest):
        whole.append(step)
    return whole
