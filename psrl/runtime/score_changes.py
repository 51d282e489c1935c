"""Old scores of episodes against new ones: what a regrade changed."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from psrl.types import Episode, EpisodeUid, Score

MAX_NAMED = 10
"""Episodes that are named, those whose reward changed most."""
TOLERANCE = 1e-9
"""Rewards that differ by less are the same: a file keeps them to the last digit, sums may not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreChange:
    """One episode whose score is another now."""

    uid: EpisodeUid
    before: Score
    after: Score

    @property
    def size(self) -> float:
        """By how much the reward differs; infinite where one of them is none."""
        before, after = self.before.reward, self.after.reward
        return math.inf if (before is None) != (after is None) else abs((after or 0.0) - (before or 0.0))


@dataclass(kw_only=True, slots=True)
class SourceScores:
    """Of the episodes of one data source."""

    rewards_before: list[float] = field(default_factory=list)
    rewards_after: list[float] = field(default_factory=list)
    accuracies_before: list[float] = field(default_factory=list)
    accuracies_after: list[float] = field(default_factory=list)
    num_episodes: int = 0
    num_up: int = 0
    num_down: int = 0
    num_judged_now: int = 0
    """Without a reward before, with one now."""
    num_unjudged_now: int = 0
    """The other way round."""

    @property
    def num_changed(self) -> int:
        """Whose reward is another."""
        return self.num_up + self.num_down + self.num_judged_now + self.num_unjudged_now


class ScoreChanges:
    """Counts and means by data source; grows by one episode at a time."""

    def __init__(self) -> None:
        self.by_source: defaultdict[str, SourceScores] = defaultdict(SourceScores)
        self._largest: list[tuple[float, int, ScoreChange]] = []

    def add(self, before: Episode, after: Episode) -> None:
        """One episode, before and after."""
        scores = self.by_source[before.task.data_source]
        scores.num_episodes += 1
        for score, rewards, accuracies in (
            (before.score, scores.rewards_before, scores.accuracies_before),
            (after.score, scores.rewards_after, scores.accuracies_after),
        ):
            rewards += [] if score.reward is None else [score.reward]
            accuracies += [] if score.accuracy is None else [score.accuracy]
        old, new = before.score.reward, after.score.reward
        if old is None or new is None:
            scores.num_judged_now += new is not None
            scores.num_unjudged_now += old is not None
        else:
            scores.num_up += new > old + TOLERANCE
            scores.num_down += new < old - TOLERANCE
        change = ScoreChange(uid=before.ticket.uid, before=before.score, after=after.score)
        if change.size > TOLERANCE and (old is not None or new is not None):
            heapq.heappush(self._largest, (change.size, -self.num_episodes, change))
            if len(self._largest) > MAX_NAMED:
                heapq.heappop(self._largest)

    @property
    def num_episodes(self) -> int:
        """So far."""
        return sum(scores.num_episodes for scores in self.by_source.values())

    @property
    def num_changed(self) -> int:
        """Whose reward is another now."""
        return sum(scores.num_changed for scores in self.by_source.values())

    @property
    def largest(self) -> list[ScoreChange]:
        """The largest changes first; of equal ones the earliest episodes."""
        return [change for _, _, change in sorted(self._largest, key=lambda entry: entry[:2], reverse=True)]

    def __str__(self) -> str:
        return f"{self.num_changed} changed"


def mean_or_none(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return fmean(values) if values else None
