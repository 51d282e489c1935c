"""From what episodes said to the metrics of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import comb
from statistics import fmean, pstdev

from psrl.runtime.board import Board, ReadyBuffer
from psrl.runtime.groups import EpisodeSummary, GroupResult
from psrl.telemetry import names, val_accuracy
from psrl.telemetry.names import TimeUse
from psrl.types import GroupUid, Outcome, PolicyVersion

SAID = ("env", "agent")
"""First word of the counts that others than psrl named."""


def step_metrics(groups: Sequence[GroupResult]) -> dict[str, float]:
    """Reward, accuracy, turns, tools, outcomes and environment numbers of the episodes that an update trained on."""
    episodes = [summary for group in groups for summary in group.summaries]
    return episode_metrics(episodes) | {names.GROUPS_TRAINED_COUNT: float(len(groups))}


def episode_metrics(episodes: Sequence[EpisodeSummary]) -> dict[str, float]:
    """The same of any episodes, of which there is one at least; no reward or accuracy where none was judged."""
    metrics = {
        names.TURNS_MEAN: fmean(summary.num_turns for summary in episodes),
        names.TOOL_RATE: tool_rate(episodes),
        names.TOOL_ERRORS_MEAN: fmean(num_tool_errors(summary) for summary in episodes),
        names.SAMPLED_TOKENS_MEAN: fmean(summary.num_sampled for summary in episodes),
        names.GENERATION_TOKENS_COUNT: float(sum(summary.num_sampled for summary in episodes)),
    }
    rewards = [summary.reward for summary in episodes if summary.reward is not None]
    if rewards:
        metrics |= {names.REWARD_MEAN: fmean(rewards), names.REWARD_STD: pstdev(rewards)}
    judged = [summary.accuracy for summary in episodes if summary.accuracy is not None]
    if judged:
        metrics[names.ACCURACY_MEAN] = fmean(judged)
    for outcome in Outcome:
        metrics[names.outcome_share(outcome)] = fmean(summary.outcome is outcome for summary in episodes)
    return metrics | session_metrics(episodes) | said_metrics(episodes)


def staleness_metrics(ready: ReadyBuffer, board: Board) -> dict[str, float]:
    """How old the step's data was, and what is under way."""
    ages = [ready.consumed.version - admitted for admitted in ready.consumed.admitted.values()]
    return {
        names.STALENESS_VERSION_GAP_MAX: float(max(ages)),
        names.STALENESS_VERSION_GAP_MEAN: fmean(ages),
        names.STALENESS_IN_FLIGHT_COUNT: float(board.num_in_flight),
        names.STALENESS_ARRIVED_COUNT: float(len(board.arrived)),
    }


def session_metrics(episodes: Sequence[EpisodeSummary]) -> dict[str, float]:
    """What sessions counted; empty where no episode had one."""
    counts = [summary.counts for summary in episodes if "branches" in summary.counts or "tokens/drift" in summary.counts]
    if not counts:
        return {}
    return {
        names.SESSION_DRIFT_COUNT: _total(counts, "tokens/drift"),
        names.SESSION_BRANCHES_MEAN: _total(counts, "branches") / len(counts),
        names.SESSION_OVERRIDES_MEAN: _total(counts, "sampling_overrides/") / len(counts),
    }


def said_metrics(episodes: Sequence[EpisodeSummary]) -> dict[str, float]:
    """Mean per episode of the numbers that environments said in their info and that agents returned."""
    sums: defaultdict[str, float] = defaultdict(float)
    for summary in episodes:
        for name, value in summary.counts.items():
            area, _, rest = name.partition("/")
            if area in SAID and rest:
                sums[names.said_metric(area, rest)] += value
    return {name: total / len(episodes) for name, total in sums.items()}


def _total(counts: Sequence[dict[str, float]], prefix: str) -> float:
    return float(sum(value for count in counts for name, value in count.items() if name.startswith(prefix)))


def tool_rate(episodes: Sequence[EpisodeSummary]) -> float:
    """Share of episodes with at least one tool call."""
    return fmean(summary.counts["tool_turns"] > 0 if "tool_turns" in summary.counts else False for summary in episodes)


def num_tool_errors(summary: EpisodeSummary) -> float:
    """Failed tool calls of one episode."""
    return sum(value for name, value in summary.counts.items() if name.startswith("tool_errors/"))


def seconds_by_use(groups: Iterable[GroupResult]) -> dict[TimeUse, float]:
    """Seconds that the episodes of a step waited, by what they waited for: the weights that divide the wall time of generation."""
    timings = [summary.timings for group in groups for summary in group.summaries]
    return {
        TimeUse.GENERATION: sum(timing.generation_s for timing in timings),
        TimeUse.TOOLS: sum(timing.tools_s for timing in timings),
        TimeUse.REWARD: sum(timing.reward_s for timing in timings),
    }


def validation_metrics(groups: Sequence[GroupResult], version: PolicyVersion, *, sources: Mapping[GroupUid, str]) -> dict[str, float]:
    """Greedy, mean@n and pass@k accuracy, reward and tool rate; members are told apart by their ticket's temperature.

    `sources` is each task's `data_source`; where there are several, mean@n and pass@k are also told of each.

    Where tokens came from other weights than `version` (a replica died and could only come back with newer ones) a metric says so.
    """
    episodes = [summary for group in groups for summary in group.summaries]
    sampled = [summary for summary in episodes if summary.temperature is None]
    greedy = [summary for summary in episodes if summary.temperature is not None]
    metrics: dict[str, float] = {}
    num_other = sum(group.oldest_version not in (None, version) for group in groups)
    if num_other:
        metrics[names.VAL_OTHER_VERSION_SHARE] = num_other / len(groups)
    if sampled:
        metrics |= sampled_accuracies(groups, None)
        metrics[names.VAL_MEAN_AT_N_REWARD] = fmean([s.reward for s in sampled if s.reward is not None] or [0.0])
        metrics[names.VAL_TOOL_RATE] = tool_rate(sampled)
    of_source: defaultdict[str, list[GroupResult]] = defaultdict(list)
    for group in groups:
        if any(summary.temperature is None for summary in group.summaries):
            of_source[sources[group.group]].append(group)
    if len(of_source) > 1:
        for source in sorted(of_source):
            metrics |= sampled_accuracies(of_source[source], source)
    if greedy:
        metrics[names.VAL_GREEDY_ACCURACY] = mean_accuracy(greedy)
    return metrics


def sampled_accuracies(groups: Sequence[GroupResult], source: str | None) -> dict[str, float]:
    """mean@n, and pass@k for each power of two up to n and for n itself, over the tasks that were played so often.

    `source` is what the metrics are named after. An episode that could not be judged counts as not solved.
    """
    members = [[summary for summary in group.summaries if summary.temperature is None] for group in groups]
    metrics = {val_accuracy.mean_at_n(source): mean_accuracy([summary for of_task in members for summary in of_task])}
    most = max(len(of_task) for of_task in members)
    for k in sorted({most, *(2**power for power in range(1, most.bit_length()))} - {1}):
        solved = [(len(of_task), sum(summary.accuracy == 1.0 for summary in of_task)) for of_task in members]
        chances = [pass_at_k(num_sampled, num_solved, k) for num_sampled, num_solved in solved if num_sampled >= k]
        if chances:
            metrics[val_accuracy.pass_at(k, source)] = fmean(chances)
    return metrics


def pass_at_k(num_sampled: int, num_solved: int, k: int) -> float:
    """Unbiased estimate, from n samples of which c are right, of the chance that one of k is right: 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021 (Codex), equation 1.

    Example:
        n = 4, c = 2, k = 2: of the six pairs one has no right one, so 5/6.
    """
    assert k <= num_sampled, f"pass@{k} needs {k} samples, got {num_sampled}"
    return 1.0 - comb(num_sampled - num_solved, k) / comb(num_sampled, k)


def mean_accuracy(episodes: Sequence[EpisodeSummary]) -> float:
    """Share solved; an episode that could not be judged counts as not solved, so failures never flatter."""
    return fmean(summary.accuracy or 0.0 for summary in episodes)
