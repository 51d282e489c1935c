"""Messages and trajectories as JSON: the one form, on disk (trajectories/*.jsonl) and between processes (records of sessions).

Invariant: what `..._from_json` reads equals what `..._to_json` was given, but for the actions of steps. OpenAI's form of a message is
another thing: chat templates and APIs need it (`Message.to_template`).
"""

from __future__ import annotations

import math
from typing import Any

from psrl.types.ids import TrajectoryUid
from psrl.types.message import Message, Role, ToolCall
from psrl.types.trajectory import Step, Trajectory


def message_to_json(message: Message) -> dict[str, Any]:
    """What is absent is left out."""
    line: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.tool_calls:
        line["tool_calls"] = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    for key, value in (("tool_call_id", message.tool_call_id), ("name", message.name), ("reasoning", message.reasoning)):
        if value is not None:
            line[key] = value
    return line


def message_from_json(line: dict[str, Any]) -> Message:
    """The message. Raises as `trajectory_from_json`."""
    calls = line.get("tool_calls", ())
    return Message(
        role=Role(line["role"]),
        content=line["content"],
        tool_calls=tuple(ToolCall(id=call["id"], name=call["name"], arguments=call["arguments"]) for call in calls),
        tool_call_id=line.get("tool_call_id"),
        name=line.get("name"),
        reasoning=line.get("reasoning"),
    )


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """Flat columns of all tokens, and the lengths of the turns; actions are left out, they are read from the tokens."""
    return {
        "uid": trajectory.uid,
        "ids": trajectory.ids(),
        "loss_mask": trajectory.loss_mask(),
        "logprobs": trajectory.logprobs(),
        "versions": trajectory.versions(),
        "turns": [
            {
                "num_observed": len(step.observation_ids),
                "num_sampled": len(step.sampled_ids),
                "temperature": step.temperature,
                "finish_reason": step.finish_reason,
            }
            for step in trajectory.steps
        ],
    }


def trajectory_from_json(line: dict[str, Any]) -> Trajectory:
    """The trajectory.

    Raises:
        KeyError, TypeError, ValueError: A field is missing or is not what it should be.
    """
    trajectory = Trajectory(uid=TrajectoryUid(line["uid"]))
    num_tokens = sum(turn["num_observed"] + turn["num_sampled"] for turn in line["turns"])
    lengths = {name: len(line[name]) for name in ("ids", "loss_mask", "logprobs", "versions")}
    if set(lengths.values()) != {num_tokens}:
        raise ValueError(f"the turns of {trajectory.uid} have {num_tokens} tokens, its columns {lengths}")
    start = 0
    for turn in line["turns"]:
        middle = start + turn["num_observed"]
        end = middle + turn["num_sampled"]
        trajectory.append(
            Step(
                observation_ids=line["ids"][start:middle],
                sampled_ids=line["ids"][middle:end],
                # JSON has no NaN: null comes back as what it was.
                logprobs=[math.nan if value is None else value for value in line["logprobs"][middle:end]],
                policy_versions=line["versions"][middle:end],
                temperature=turn["temperature"],
                finish_reason=turn["finish_reason"],
            )
        )
        start = end
    if trajectory.loss_mask() != line["loss_mask"]:
        raise ValueError(f"loss_mask of {trajectory.uid} is another than its turns say: a token is learned exactly if it was sampled")
    return trajectory
