"""Every kept episode as one JSON line: enough to look at it, to grade it again without generating, and to train on it again.

The tokens are stored per trajectory as flat lists and as the lengths of each turn, so a `Trajectory` comes back exactly
(logprobs to six significant digits, actions left out: they are read from the tokens).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from psrl.telemetry.json_lines import JsonLinesFile, read_json_lines
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
    Submission,
    Task,
    TaskUid,
    Timings,
    ToolCall,
    Trajectory,
    TrajectoryUid,
)

TRAIN_FILE = "train.jsonl"
VAL_FILE = "val.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRecord:
    """An episode read back from the run folder."""

    step: int
    """Training step that the episode belongs to; for validation the step after which it ran."""
    episode: Episode
    pieces: tuple[tuple[str, ...], ...] = ()
    """Text of each token, one tuple per trajectory; empty where the writer was not given them."""


class TrajectoryWriter:
    """Appends episodes to `train.jsonl` and `val.jsonl` of one folder."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the run folder's `trajectories`."""
        self._folder = folder
        self._files: dict[str, JsonLinesFile] = {}

    def write(self, episode: Episode, *, step: int, pieces: Sequence[Sequence[str]] = ()) -> None:
        """Add one episode to the file of its kind.

        Args:
            episode: Validation episodes (by their ticket) go to `val.jsonl`.
            step: Training step.
            pieces: Text of each token, one list per trajectory of the result; for people who look at it later.
        """
        name = VAL_FILE if episode.ticket.is_validation else TRAIN_FILE
        if name not in self._files:
            self._files[name] = JsonLinesFile(self._folder / name)
        self._files[name].append(_line_of(episode, step, pieces))

    def close(self) -> None:
        """Close the files; may be called twice."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def read_trajectories(path: Path) -> Iterator[EpisodeRecord]:
    """Episodes of one file in the order in which they were written; an unfinished last line is left out."""
    for line in read_json_lines(path):
        yield _record_of(line)


def lengths_of_turns(trajectories: Sequence[Trajectory]) -> list[int]:
    """Sampled tokens of each turn of an episode; branches of a session's tree share the turns before they part.

    Example:
        Turns a (3 tokens), b (5) on one branch and a, c (7) on another -> [3, 5, 7].
    """
    lengths: dict[tuple[int, ...], int] = {}
    for trajectory in trajectories:
        seen: tuple[int, ...] = ()
        for step in trajectory.steps:
            seen = (*seen, *step.observation_ids, *step.sampled_ids)
            lengths[seen] = len(step.sampled_ids)
    return list(lengths.values())


def _line_of(episode: Episode, step: int, pieces: Sequence[Sequence[str]]) -> dict[str, Any]:
    ticket, task, result, score = episode.ticket, episode.task, episode.result, episode.score
    assert len(pieces) in (0, len(result.trajectories)), f"{ticket.uid}: {len(pieces)} lists of pieces"
    trajectories = [_trajectory_line(trajectory) for trajectory in result.trajectories]
    for line, texts in zip(trajectories, pieces, strict=False):
        assert len(texts) == len(line["ids"]), f"{line['uid']}: {len(texts)} pieces for {len(line['ids'])} tokens"
        line["pieces"] = list(texts)
    return {
        "step": step,
        "uid": ticket.uid,
        "group": ticket.group,
        "is_validation": ticket.is_validation,
        "seed": ticket.seed,
        "admitted_version": ticket.admitted_version,
        "temperature": ticket.temperature,
        "task": task.uid,
        "data_source": task.data_source,
        "agent": task.agent_name,
        "env_class": task.env_class,
        "data_class": task.data_class,
        "prompt": [_message_line(message) for message in task.prompt],
        "ground_truth": task.ground_truth,
        "extra_info": task.extra_info,
        "outcome": result.outcome.value,
        "error": result.error,
        "reward": score.reward,
        "accuracy": score.accuracy,
        "parts": score.parts,
        "messages": [_message_line(message) for message in result.messages],
        "turn_texts": result.turn_texts,
        "step_rewards": result.step_rewards,
        "counts": result.counts,
        "timings": asdict(episode.timings),
        "loop_timings": asdict(result.timings),
        "submission": None if result.submission is None else asdict(result.submission),
        "trajectories": trajectories,
    }


def _trajectory_line(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "uid": trajectory.uid,
        "ids": trajectory.ids(),
        "loss_mask": trajectory.loss_mask(),
        "logprobs": [_six_digits(value) for value in trajectory.logprobs()],
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


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")


def _message_line(message: Message) -> dict[str, Any]:
    line: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.tool_calls:
        line["tool_calls"] = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    for key, value in (("tool_call_id", message.tool_call_id), ("name", message.name), ("reasoning", message.reasoning)):
        if value is not None:
            line[key] = value
    return line


def _record_of(line: dict[str, Any]) -> EpisodeRecord:
    ticket = EpisodeTicket(
        uid=EpisodeUid(line["uid"]),
        group=GroupUid(line["group"]),
        admitted_version=PolicyVersion(line["admitted_version"]),
        seed=line["seed"],
        is_validation=line["is_validation"],
        temperature=line["temperature"],
    )
    task = Task(
        uid=TaskUid(line["task"]),
        prompt=tuple(_message_of(message) for message in line["prompt"]),
        data_source=line["data_source"],
        ground_truth=line["ground_truth"],
        extra_info=line["extra_info"],
        agent_name=line["agent"],
        env_class=line["env_class"],
        data_class=line["data_class"],
    )
    result = LoopResult(
        outcome=Outcome(line["outcome"]),
        trajectories=tuple(_trajectory_of(trajectory) for trajectory in line["trajectories"]),
        messages=tuple(_message_of(message) for message in line["messages"]),
        turn_texts=tuple(line["turn_texts"]),
        step_rewards=tuple(line["step_rewards"]),
        counts=line["counts"],
        timings=Timings(**line["loop_timings"]),
        submission=Submission(**line["submission"]) if line.get("submission") else None,
        error=line["error"],
    )
    score = Score(reward=line["reward"], accuracy=line["accuracy"], parts=line["parts"])
    pieces = tuple(tuple(trajectory["pieces"]) for trajectory in line["trajectories"] if "pieces" in trajectory)
    episode = Episode(ticket=ticket, task=task, result=result, score=score, timings=Timings(**line["timings"]))
    return EpisodeRecord(step=line["step"], episode=episode, pieces=pieces)


def _trajectory_of(line: dict[str, Any]) -> Trajectory:
    trajectory = Trajectory(uid=TrajectoryUid(line["uid"]))
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
    return trajectory


def _message_of(line: dict[str, Any]) -> Message:
    calls = line.get("tool_calls", ())
    return Message(
        role=Role(line["role"]),
        content=line["content"],
        tool_calls=tuple(ToolCall(id=call["id"], name=call["name"], arguments=call["arguments"]) for call in calls),
        tool_call_id=line.get("tool_call_id"),
        name=line.get("name"),
        reasoning=line.get("reasoning"),
    )
