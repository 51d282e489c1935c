"""Which branches of a session are trained on: `rollout.agent.branch_reward`."""

from __future__ import annotations

from psrl.types import SessionRecord, Step, Trajectory

SHARED = "shared"
LAST = "last"


def trained_branches(record: SessionRecord, branch_reward: str) -> tuple[Trajectory, ...]:
    """The trajectories that carry the episode's reward.

    Args:
        record: Its trajectories, the branch of the last turn at the end; each sampled token has mask 1 in the first that holds it.
        branch_reward: `shared`: all of them. `last`: the branch of the last turn, all of whose sampled tokens are trained on.
    """
    if branch_reward == SHARED or len(record.trajectories) <= 1:
        return record.trajectories
    return (_whole(record, len(record.trajectories) - 1),)


def _whole(record: SessionRecord, index: int) -> Trajectory:
    """A branch, with the turns that it shares with an earlier one as steps of its own again.

    Turns are known by their numbers, never by their ids: two turns may say the same and have been sampled from other weights.

    Example:
        Paths (0, 1) and (0, 2), trajectories 1 2 | 3 4 and 1 2 3 4 5 | 6 (sampled after the bar) -> of the second 1 2 | 3 4, 5 | 6.
    """
    branch, path = record.trajectories[index], record.paths[index]
    num_shared = len(path) - branch.num_turns
    if num_shared == 0:
        return branch
    holder = next(at for at in range(index) if record.paths[at][:num_shared] == path[:num_shared])
    shared = _whole(record, holder).steps[:num_shared]
    num_shared_tokens = sum(len(step.observation_ids) + len(step.sampled_ids) for step in shared)
    first, *rest = branch.steps
    own = Step(
        observation_ids=first.observation_ids[num_shared_tokens:],
        sampled_ids=first.sampled_ids,
        logprobs=first.logprobs,
        policy_versions=first.policy_versions,
        temperature=first.temperature,
        finish_reason=first.finish_reason,
    )
    whole = Trajectory(uid=branch.uid)
    for step in (*shared, own, *rest):
        whole.append(step)
    return whole
