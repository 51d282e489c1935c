"""Every kept episode as one JSON line: enough to look at it, to grade it again without generating, and to train on it again.

The tokens are stored per trajectory as flat lists and as the lengths of each turn, so a `Trajectory` comes back exactly: logprobs to the
nine digits that tell float32 apart, actions left out (they are read from the tokens). `read_trajectories` is the one reader: whoever
looks at stored episodes, grades them again or trains on them uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from psrl.errors import ConfigError
from psrl.telemetry.json_lines import JsonLinesFile, read_line_at, read_lines
from psrl.types import (
    Episode,
    EpisodeTicket,
    EpisodeUid,
    GroupUid,
    LoopResult,
    Outcome,
    PolicyVersion,
    Score,
    Submission,
    Task,
    TaskUid,
    Timings,
    Trajectory,
)
from psrl.types.json_form import message_from_json, message_to_json, trajectory_from_json, trajectory_to_json

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
    offset: int = 0
    """Where its line begins in the file: `read_episode_at` finds it again."""


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
        self._files[name].append(line_of(episode, step=step, pieces=pieces))

    def close(self) -> None:
        """Close the files; may be called twice."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def read_trajectories(path: Path) -> Iterator[EpisodeRecord]:
    """Episodes of one file in the order in which they were written; an unfinished last line is left out.

    Raises:
        ConfigError: A line is no stored episode; names file, line and field.
    """
    try:
        for line in read_lines(path):
            yield _checked_record(line.content, path, f"line {line.number}", offset=line.offset)
    except ValueError as error:
        rule, fix = f"cannot be read: {error}", "name a file that psrl wrote"
        raise ConfigError(key="trajectories", value=str(path), rule=rule, fix=fix) from error


def read_episode_at(path: Path, offset: int) -> EpisodeRecord:
    """The episode whose line begins at `offset`.

    Raises:
        ConfigError: The file has changed since.
    """
    try:
        content = read_line_at(path, offset)
    except (OSError, ValueError) as error:
        rule, fix = f"has changed: no episode begins at byte {offset} any more ({error})", "leave files alone that a run reads"
        raise ConfigError(key="trajectories", value=str(path), rule=rule, fix=fix) from error
    return _checked_record(content, path, f"byte {offset}", offset=offset)


def stored_file(path: Path, *, key: str) -> Path:
    """The file that `path` means: itself, or `train.jsonl` of a run folder or of its `trajectories`.

    Raises:
        ConfigError: There is none; `key` names what was given.
    """
    candidates = (path, path / TRAIN_FILE, path / "trajectories" / TRAIN_FILE)
    found = next((each for each in candidates if each.is_file()), None)
    if found is not None:
        return found
    if not path.exists():
        rule = "there is no such file or folder"
    elif (path / "trajectories").is_dir():
        rule = f"its trajectories hold no {TRAIN_FILE}: no training episode was kept"
    else:
        rule = "holds no trajectories"
    fix = "name a run folder runs/<recipe>/<start time>, or a file trajectories/*.jsonl; psrl rollout makes one"
    raise ConfigError(key=key, value=str(path), rule=rule, fix=fix)


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


def line_of(episode: Episode, *, step: int, pieces: Sequence[Sequence[str]] = ()) -> dict[str, Any]:
    """What stands in the file for one episode; see `TrajectoryWriter.write`."""
    ticket, task, result, score = episode.ticket, episode.task, episode.result, episode.score
    assert len(pieces) in (0, len(result.trajectories)), f"{ticket.uid}: {len(pieces)} lists of pieces"
    trajectories = [trajectory_to_json(trajectory) for trajectory in result.trajectories]
    for line in trajectories:
        line["logprobs"] = [_as_float32(value) for value in line["logprobs"]]
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
        "prompt": [message_to_json(message) for message in task.prompt],
        "ground_truth": task.ground_truth,
        "extra_info": task.extra_info,
        "outcome": result.outcome.value,
        "error": result.error,
        "reward": score.reward,
        "accuracy": score.accuracy,
        "parts": score.parts,
        "messages": [message_to_json(message) for message in result.messages],
        "turn_texts": result.turn_texts,
        "step_rewards": result.step_rewards,
        "counts": result.counts,
        "timings": asdict(episode.timings),
        "loop_timings": asdict(result.timings),
        "submission": None if result.submission is None else asdict(result.submission),
        "trajectories": trajectories,
    }


def _as_float32(value: float) -> float:
    """Nine digits: what the data plane makes of it (float32) is the same before and after the file."""
    return float(f"{value:.9g}")


def _checked_record(line: Any, path: Path, where: str, *, offset: int) -> EpisodeRecord:
    try:
        return _record_of(line, offset)
    except KeyError as error:
        rule = f"{where} has no field {error.args[0]!r}"
    except (TypeError, ValueError, AttributeError) as error:
        rule = f"{where} does not say what an episode's line does: {error}"
    fix = "these are lines of another form: store the episodes again (psrl rollout), or read them with the psrl that wrote them"
    raise ConfigError(key="trajectories", value=str(path), rule=rule, fix=fix)


def _record_of(line: dict[str, Any], offset: int) -> EpisodeRecord:
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
        prompt=tuple(message_from_json(message) for message in line["prompt"]),
        data_source=line["data_source"],
        ground_truth=line["ground_truth"],
        extra_info=line["extra_info"],
        agent_name=line["agent"],
        env_class=line["env_class"],
        data_class=line["data_class"],
    )
    result = LoopResult(
        outcome=Outcome(line["outcome"]),
        trajectories=tuple(trajectory_from_json(trajectory) for trajectory in line["trajectories"]),
        messages=tuple(message_from_json(message) for message in line["messages"]),
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
    return EpisodeRecord(step=line["step"], episode=episode, pieces=pieces, offset=offset)
