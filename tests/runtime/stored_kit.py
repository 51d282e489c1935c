"""Run folders with stored episodes, written by psrl's own writer."""

from dataclasses import replace
from pathlib import Path

from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trajectories import TrajectoryWriter
from psrl.types import (
    Episode,
    EpisodeTicket,
    LoopResult,
    Message,
    Outcome,
    Role,
    Score,
    Step,
    Task,
    Timings,
    Trajectory,
)

LOGPROBS = [-0.1234567891234, -1e-9, -17.25]
"""Of the sampled tokens: digits that float32 does not keep, one that it barely tells from 0."""


def task_of(group: str) -> Task:
    return Task(uid=group, prompt=(Message(role=Role.USER, content=f"What is {group}?"),), data_source="sums", ground_truth="5")


def episode_of(group: str, index: int, *, reward=1.0, version=3, temperature=1.0, logprobs=LOGPROBS, ids=(9, 11, 13), **result) -> Episode:
    uid = f"{group}-e{index}"
    trajectory = Trajectory(uid=f"{uid}-t0")
    versions = [version] * len(ids)
    trajectory.append(
        Step(
            observation_ids=[1, 2, 3 + index],
            sampled_ids=list(ids),
            logprobs=list(logprobs),
            policy_versions=versions,
            temperature=temperature,
            finish_reason="stop",
        )
    )
    fields = {
        "outcome": Outcome.FINISHED,
        "trajectories": (trajectory,),
        "messages": task_of(group).prompt,
        "turn_texts": (f"The answer is {reward}.",),
        "step_rewards": (reward,),
        "timings": Timings(total_s=2.0, generation_s=1.5),
    }
    return Episode(
        ticket=EpisodeTicket(uid=uid, group=group, admitted_version=version, seed=index),
        task=task_of(group),
        result=LoopResult(**(fields | result)),
        score=Score(reward=reward, accuracy=None if reward is None else float(reward > 0)),
        timings=Timings(total_s=2.0, generation_s=1.5),
    )


def run_folder(folder: Path, episodes, settings: str = "recipe: retool_tiny") -> RunFolder:
    """A run folder of retool_tiny with these episodes in its `train.jsonl`; `settings` are lines of YAML."""
    run = RunFolder(folder)
    run.trajectories.mkdir(parents=True)
    run.config.write_text(f"defaults: [/retool_tiny/config@_global_, _self_]\n{settings}\n")
    writer = TrajectoryWriter(run.trajectories)
    for episode in episodes:
        writer.write(replace(episode, ticket=replace(episode.ticket, is_validation=False)), step=1)
    writer.close()
    return run


def train_file(run: RunFolder) -> Path:
    return run.trajectories / "train.jsonl"
