"""Groups that are not trained on: those that teach nothing, and those that take too long.

Dynamic sampling looks at groups that have arrived; the proactive filter at groups in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum

from psrl.config.asynchrony import ProactiveFilterConfig
from psrl.errors import TooManyFailuresError
from psrl.types import GroupUid


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group's episodes differ; equal ones give every episode an advantage of 0."""
    return len(set(rewards)) > 1


class DynamicSampling:
    """Counts arrived groups that were left out for want of signal, up to a limit per training step."""

    def __init__(self, *, max_filtered: int) -> None:
        """`max_filtered`: so many in one step end the run."""
        assert max_filtered >= 1, f"max_filtered={max_filtered}"
        self._max_filtered = max_filtered
        self._pass_rates: Counter[float] = Counter()

    @property
    def num_filtered(self) -> int:
        """Groups left out in this step."""
        return self._pass_rates.total()

    def leave_out(self, *, pass_rate: float) -> None:
        """Count a group; `pass_rate` is the mean accuracy of its episodes.

        Raises:
            TooManyFailuresError: The limit is reached; with the histogram of pass rates.
        """
        self._pass_rates[round(pass_rate, 2)] += 1
        if self.num_filtered >= self._max_filtered:
            histogram = ", ".join(f"{rate:g}: {count}" for rate, count in sorted(self._pass_rates.items()))
            raise TooManyFailuresError(
                f"dynamic sampling dropped {self.num_filtered} groups with equal rewards in one step "
                f"(the limit of algorithm.filter_groups.max_num_gen_batches); pass rates: {histogram}"
            )

    def begin_step(self) -> None:
        """Counts start at 0 again."""
        self._pass_rates.clear()


class OverdueAction(StrEnum):
    """What is done with a group that is in flight too long."""

    RETRY = "retry"
    """It is ended and issued again, as long as psrl.max_reissues allows."""
    TRUNCATE = "truncate"
    """Its episodes end with what they have."""
    NULL = "null"
    """It is ended and left out; another takes its slot."""


class ProactiveFilter:
    """Names groups that are in flight for longer than the limit: each once, and only so many per training step."""

    def __init__(self, settings: ProactiveFilterConfig) -> None:
        self.action = None if settings.action == "none" else OverdueAction(settings.action)
        self._time_limit_s = settings.time_limit_s
        self._max_per_step = settings.max_per_step
        self._num_in_step = 0
        self._named: set[GroupUid] = set()
        """Of the groups in flight."""

    def overdue(self, in_flight: Mapping[GroupUid, float], now_s: float) -> list[GroupUid]:
        """Groups past the limit that were not named before, longest in flight first.

        Args:
            in_flight: When each was admitted, in order of admission.
            now_s: On the same clock.
        """
        found: list[GroupUid] = []
        if self.action is None:
            return found
        for group, admitted_at_s in in_flight.items():
            if now_s - admitted_at_s <= self._time_limit_s or self._num_in_step >= self._max_per_step:
                break
            if group not in self._named:
                self._named.add(group)
                self._num_in_step += 1
                found.append(group)
        return found

    def forget(self, group: GroupUid) -> None:
        """It is not in flight any more; if it is issued again, it may be named again."""
        self._named.discard(group)

    def begin_step(self) -> None:
        """The count per step starts at 0 again."""
        self._num_in_step = 0
