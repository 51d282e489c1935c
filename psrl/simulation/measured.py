"""A workload from a run folder: its episodes, played again whole, and the seconds of its updates and syncs.

A group is drawn as it was, so that the members of a hard task are all long; its turns share the episode's generation time evenly. Of
that time the seconds in which turns waited for a slot are taken off, the same for each turn: in the mean it is what replicas said of
turns that wait and turns that run (Little's law). What a run does not tell is how long its cancelled episodes would have been: one with
redundancy knows only its shorter ones. So measure with `psrl.redundant_episodes=0` and, where it can be, slots to spare, and with
`trainer.trajectories_per_step=0`, which keeps every episode.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from psrl.errors import ConfigError
from psrl.simulation.workload import EpisodePlan, Failures, Workload
from psrl.telemetry import names
from psrl.telemetry.metric_log import read_metrics
from psrl.telemetry.names import TimeUse
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trajectories import TRAIN_FILE, lengths_of_turns, read_trajectories
from psrl.types import Episode, GroupUid, Timings
from psrl.types.latency import Latency

LEAST_SHARE = 0.1
"""Of an episode's generation time that was not waiting for slots, however many turns waited."""
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

    `sync` and `pause` of a run that `waits_for_turns` are 0: nothing says how much of them was waiting.

    Raises:
        ConfigError: It is no run folder, or holds no training episodes or no finished steps there.
    """

    def is_meant(step: int) -> bool:
        return first_step <= step and (last_step is None or step <= last_step)

    folder = RunFolder.open(run)
    path = folder.trajectories / TRAIN_FILE
    found = read_metrics(folder.metrics) if folder.metrics.is_file() else {}
    steps = [metrics for step, metrics in found.items() if is_meant(step) and names.STEP_SECONDS in metrics]
    records = (record for record in read_trajectories(path) if is_meant(record.step)) if path.is_file() else ()
    episodes = [Played.of(record.episode) for record in records if record.episode.result.outcome.judges_policy]
    wait_s = mean_wait_s(episodes, in_slots_share(steps))
    groups: defaultdict[GroupUid, list[EpisodePlan]] = defaultdict(list)
    for episode in episodes:
        groups[episode.group].append(episode.plan(wait_s))
    if not groups or not steps:
        rule = f"holds no training episodes and finished steps from step {first_step} to {last_step or 'the last'}"
        fix = "name a folder runs/<recipe>/<start time> of a run of some steps, made with trainer.trajectories_per_step=0"
        raise ConfigError(key="--from", value=str(run), rule=rule, fix=fix)
    plans = [plan for group in groups.values() for plan in group]
    synced = [] if waits_for_turns(run) else [step for step in steps if names.SYNC_PAUSED_SECONDS_MEAN in step]
    work, tokens = (sum(sum(row) for row in rows) for rows in ([p.work for p in plans], [p.num_tokens for p in plans]))
    return Workload(
        episodes=MeasuredEpisodes(groups=tuple(map(tuple, groups.values()))),
        train=_seen(step[names.STEP_SECONDS] * step[names.time_share(TimeUse.TRAINING)] for step in steps),
        push=_seen(step[names.SYNC_PUSH_SECONDS] for step in steps),
        rest=_seen(step[names.STEP_SECONDS] * step[names.time_share(TimeUse.IDLE)] for step in steps),
        sync=_seen(step[names.SYNC_PULL_SECONDS_MEAN] for step in synced),
        pause=_seen(step[names.SYNC_PAUSED_SECONDS_MEAN] for step in synced),
        equal_share=_share_of(steps, names.GROUPS_FILTERED_COUNT, names.GROUPS_TRAINED_COUNT),
        failures=Failures(episode_share=_retried_share(steps, len(plans) / len(groups))),
        tokens_per_work=tokens / work if work > 0 else 0.0,
    )


def waits_for_turns(run: Path) -> bool:
    """Whether replicas of the run let their turns end before they took weights (`psrl.partial_rollout.enable=false`)."""
    path = RunFolder.open(run).config
    settings = yaml.safe_load(path.read_text()) if path.is_file() else None
    return settings is not None and not settings["psrl"]["partial_rollout"]["enable"]


def in_slots_share(steps: list[dict[str, float]]) -> float:
    """Share of the time of turns that they were in a slot and not waiting for one.

    Example:
        Replicas said 8 running and 2 waiting turns in the mean: 0.8.
    """
    looks = [step for step in steps if names.REPLICAS_RUNNING_MEAN in step]
    running, waiting = (
        sum(step[name] * step[names.STEP_SECONDS] for step in looks) for name in (names.REPLICAS_RUNNING_MEAN, names.REPLICAS_WAITING_MEAN)
    )
    return running / (running + waiting) if running > 0 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """What an episode took."""

    group: GroupUid
    timings: Timings
    num_tokens: tuple[int, ...]
    """Of each turn; never empty."""

    @classmethod
    def of(cls, episode: Episode) -> Played:
        """As it was recorded."""
        lengths = tuple(lengths_of_turns(episode.result.trajectories)) or (0,)
        return cls(group=episode.ticket.group, timings=episode.timings, num_tokens=lengths)

    def slot_seconds(self, wait_s: float) -> float:
        """Its generation time without `wait_s` of each of its turns; a tenth is always left."""
        generation_s = self.timings.generation_s
        return max(LEAST_SHARE * generation_s, generation_s - wait_s * len(self.num_tokens))

    def plan(self, wait_s: float) -> EpisodePlan:
        """What it asked for; whatever was neither generation nor tools held its place like grading does."""
        timings, num_turns = self.timings, len(self.num_tokens)
        tool_s = timings.tools_s / (num_turns - 1) if num_turns > 1 else 0.0
        return EpisodePlan(
            work=(self.slot_seconds(wait_s) / num_turns,) * num_turns,
            num_tokens=tuple(map(float, self.num_tokens)),
            tools_s=(tool_s,) * (num_turns - 1),
            reward_s=max(0.0, timings.total_s - timings.generation_s - tool_s * (num_turns - 1)),
        )


def mean_wait_s(episodes: Sequence[Played], in_slots: float) -> float:
    """Seconds that each turn waited for a slot, so that `in_slots` of the time of all turns is left."""
    wanted = in_slots * sum(episode.timings.generation_s for episode in episodes)
    low, high = 0.0, max((episode.timings.generation_s for episode in episodes), default=0.0)
    for _ in range(40):
        middle = (low + high) / 2
        is_too_much = sum(episode.slot_seconds(middle) for episode in episodes) < wanted
        low, high = (low, middle) if is_too_much else (middle, high)
    return low


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
