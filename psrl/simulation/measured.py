"""A workload from a run folder: its episodes, played again whole, and the seconds of its updates and syncs.

A group is drawn as it was, so that the members of a hard task are all long; its turns share the episode's generation time evenly. What a
run does not tell: how long its cancelled episodes would have been (a run with redundancy knows only its shorter ones), and which part of
a turn was spent waiting for a slot (a run whose engines were full tells longer turns than they are). So measure with
`psrl.redundant_episodes=0` and slots to spare, and with `trainer.trajectories_per_step=0`, which keeps every episode.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from psrl.errors import ConfigError
from psrl.simulation.workload import EpisodePlan, Failures, Workload
from psrl.telemetry import names
from psrl.telemetry.metric_log import read_metrics
from psrl.telemetry.names import TimeUse
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trajectories import TRAIN_FILE, lengths_of_turns, read_trajectories
from psrl.types import Episode, GroupUid
from psrl.types.latency import Latency

NUM_LEFT_OUT = 2
"""First steps of a run, in which everything is slower: nothing is warm, and the first weights are taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredEpisodes:
    """Groups that were played, each drawn with equal chance; members beyond those it had are drawn from it again."""

    groups: tuple[tuple[EpisodePlan, ...], ...]

    def draw(self, rng: random.Random, num_members: int) -> list[EpisodePlan]:
        """See `Episodes`."""
        group = rng.choice(self.groups)
        drawn: list[EpisodePlan] = []
        while len(drawn) < num_members:
            drawn += rng.sample(group, min(len(group), num_members - len(drawn)))
        return drawn

    def tools(self) -> Latency:
        """Of its turns but the last ones."""
        return _seen(tool_s for group in self.groups for plan in group for tool_s in plan.tools_s)

    def grading(self) -> Latency:
        """Of its episodes, with all that was neither generation nor tools."""
        return _seen(plan.reward_s for group in self.groups for plan in group)


def measured_workload(run: Path, *, first_step: int = NUM_LEFT_OUT + 1, last_step: int | None = None) -> Workload:
    """What took time in the run of this folder, from `first_step` to `last_step` (None: its last), both included.

    Raises:
        ConfigError: It is no run folder, or holds no training episodes or no finished steps there.
    """

    def is_meant(step: int) -> bool:
        return first_step <= step and (last_step is None or step <= last_step)

    folder = RunFolder.open(run)
    path = folder.trajectories / TRAIN_FILE
    groups: defaultdict[GroupUid, list[EpisodePlan]] = defaultdict(list)
    for record in read_trajectories(path) if path.is_file() else ():
        if is_meant(record.step) and record.episode.result.outcome.judges_policy:
            groups[record.episode.ticket.group].append(plan_of(record.episode))
    found = read_metrics(folder.metrics) if folder.metrics.is_file() else {}
    steps = [metrics for step, metrics in found.items() if is_meant(step) and names.STEP_SECONDS in metrics]
    if not groups or not steps:
        rule = f"holds no training episodes and finished steps from step {first_step} to {last_step or 'the last'}"
        fix = "name a folder runs/<recipe>/<start time> of a run of some steps, made with trainer.trajectories_per_step=0"
        raise ConfigError(key="--from", value=str(run), rule=rule, fix=fix)
    plans = [plan for group in groups.values() for plan in group]
    work, tokens = (sum(sum(row) for row in rows) for rows in ([p.work for p in plans], [p.num_tokens for p in plans]))
    return Workload(
        episodes=MeasuredEpisodes(groups=tuple(map(tuple, groups.values()))),
        train=_seen(step[names.STEP_SECONDS] * step[names.time_share(TimeUse.TRAINING)] for step in steps),
        push=_seen(step[names.SYNC_PUSH_SECONDS] for step in steps),
        rest=_seen(step[names.STEP_SECONDS] * step[names.time_share(TimeUse.IDLE)] for step in steps),
        sync=_seen(step[names.SYNC_PULL_SECONDS_MEAN] for step in steps if names.SYNC_PULL_SECONDS_MEAN in step),
        pause=_seen(step[names.SYNC_PAUSED_SECONDS_MAX] for step in steps if names.SYNC_PAUSED_SECONDS_MAX in step),
        equal_share=_share_of(steps, names.GROUPS_FILTERED_COUNT, names.GROUPS_TRAINED_COUNT),
        failures=Failures(episode_share=_retried_share(steps, len(plans) / len(groups))),
        tokens_per_work=tokens / work if work > 0 else 0.0,
    )


def plan_of(episode: Episode) -> EpisodePlan:
    """What the episode asked for; whatever was neither generation nor tools held its place like grading does."""
    lengths = lengths_of_turns(episode.result.trajectories)
    timings, num_turns = episode.timings, max(1, len(lengths))
    tool_s = timings.tools_s / (num_turns - 1) if num_turns > 1 else 0.0
    return EpisodePlan(
        work=(timings.generation_s / num_turns,) * num_turns,
        num_tokens=tuple(map(float, lengths)) or (0.0,),
        tools_s=(tool_s,) * (num_turns - 1),
        reward_s=max(0.0, timings.total_s - timings.generation_s - tool_s * (num_turns - 1)),
    )


def _seen(values: Iterable[float]) -> Latency:
    found = tuple(max(0.0, value) for value in values)
    return Latency.empirical(found) if found else Latency.constant(0.0)


def _share_of(steps: list[dict[str, float]], part: str, rest: str) -> float:
    num_part, num_rest = (sum(step.get(name, 0.0) for step in steps) for name in (part, rest))
    return num_part / (num_part + num_rest) if num_part else 0.0


def _retried_share(steps: list[dict[str, float]], episodes_per_group: float) -> float:
    """Of all plays of an episode, those that ended `infra_error`."""
    num_retries = sum(step.get(names.ERRORS_RETRIES_COUNT, 0.0) for step in steps)
    num_kept = episodes_per_group * sum(step.get(names.GROUPS_TRAINED_COUNT, 0.0) for step in steps)
    return num_retries / (num_retries + num_kept) if num_retries else 0.0
