"""Episodes for the tests of the run folder and the report."""

import pytest

from psrl.types import (
    Episode,
    EpisodeTicket,
    EpisodeUid,
    GroupUid,
    LoopResult,
    Message,
    Outcome,
    PolicyVersion,
    Role,
    Score,
    Step,
    Task,
    TaskUid,
    Timings,
    ToolCall,
    Trajectory,
    TrajectoryUid,
)


def make_episode(uid="train-0-000001", *, text="What is 2+3?", arguments=None, reward=1.0, accuracy=1.0, is_validation=False, **result):
    trajectory = Trajectory(uid=TrajectoryUid(f"{uid}-e0-t0"))
    for observed, sampled, version in (([1, 2, 3], [4, 5], 7), ([6], [7, 8, 9], 8)):
        trajectory.append(
            Step(
                observation_ids=observed,
                sampled_ids=sampled,
                logprobs=[-0.123456789] * len(sampled),
                policy_versions=[version] * len(sampled),
                temperature=1.0,
                finish_reason="stop",
            )
        )
    prompt = (Message(role=Role.SYSTEM, content="You may use a tool."), Message(role=Role.USER, content=text))
    call = ToolCall(id="call-0-0", name="code_interpreter", arguments=arguments or {"code": "2+3"})
    messages = (
        *prompt,
        Message(role=Role.ASSISTANT, reasoning="easy", tool_calls=(call,)),
        Message(role=Role.TOOL, content="5", tool_call_id="call-0-0", name="code_interpreter"),
        Message(role=Role.ASSISTANT, content=f"{text} 5"),
    )
    fields = {
        "outcome": Outcome.FINISHED,
        "trajectories": (trajectory,),
        "messages": messages,
        "turn_texts": ("call", "5"),
        "step_rewards": (None, 0.5),
        "counts": {"tool_calls": 1.0},
        "timings": Timings(total_s=1.5, generation_s=1.0),
    }
    return Episode(
        ticket=EpisodeTicket(
            uid=EpisodeUid(f"{uid}-e0"), group=GroupUid(uid), admitted_version=PolicyVersion(7), seed=11, is_validation=is_validation
        ),
        task=Task(
            uid=TaskUid(uid),
            prompt=prompt,
            data_source="arithmetic",
            ground_truth="5",
            extra_info={"depth": 2},
            agent_name="multi_turn_agent",
        ),
        result=LoopResult(**(fields | result)),
        score=Score(reward=reward, accuracy=accuracy, parts={"tool_bonus": 0.25}),
        timings=Timings(total_s=2.0, generation_s=1.0, tools_s=0.25, reward_s=0.5),
    )


@pytest.fixture
def episode_of():
    return make_episode
