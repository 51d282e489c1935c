"""The assemble loop: arrived groups become training data, or are dropped and replaced."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from psrl.config.algorithm import FilterGroupsConfig
from psrl.config.psrl_section import PsrlConfig
from psrl.data_plane import DataPlane
from psrl.errors import TooManyFailuresError
from psrl.runtime.board import Board
from psrl.runtime.groups import EpisodeSummary, GroupResult
from psrl.telemetry import names
from psrl.telemetry.errors_log import ErrorLog, ErrorRates
from psrl.types import Outcome

INFRA_WINDOW = 64
"""Episodes over which the infra error rate is taken."""


class AssembleLoop:
    """Decides over each group: train on it, or drop it so that the feed loop refills.

    Consumes: results of agent workers.
    Waits for: the next result.
    Unblocked by: any group that ends.
    """

    def __init__(
        self,
        *,
        board: Board,
        arrivals: asyncio.Queue[GroupResult],
        data_plane: DataPlane,
        settings: PsrlConfig,
        filter_groups: FilterGroupsConfig,
        groups_per_step: int,
        errors: ErrorLog,
        report: Callable[[GroupResult], None],
    ) -> None:
        """`report` sees every group that arrived, trained on or not."""
        self._board = board
        self._arrivals = arrivals
        self._data_plane = data_plane
        self._settings = settings
        self._filter = filter_groups
        self._groups_per_step = groups_per_step
        self._errors = errors
        self._report = report
        self._rates = ErrorRates(INFRA_WINDOW)
        self._pass_rates: Counter[float] = Counter()
        self._arrived: list[EpisodeSummary] = []
        self._num_filtered = 0
        self._num_dropped = 0

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            TooManyFailuresError: Infra errors passed their limit, or dynamic sampling found no group to learn from.
        """
        while True:
            result = await self._arrivals.get()
            self._report(result)
            self._arrived += result.summaries
            self._count_failures(result)
            if not self._has_enough_members(result):
                self._num_dropped += 1
                await self._drop(result)
            elif self._filter.enable and len(set(result.rewards)) == 1:
                await self._drop(result)
                self._count_filtered(result)
            else:
                await self._board.arrive(result)

    def take_metrics(self) -> dict[str, float]:
        """Of everything that arrived since the last call, what was not trained on included; a new step begins."""
        arrived = self._arrived
        metrics = {
            names.GROUPS_FILTERED_COUNT: float(self._num_filtered),
            names.GROUPS_DROPPED_COUNT: float(self._num_dropped),
            names.ERRORS_INFRA_RATE: sum(each.outcome is Outcome.INFRA_ERROR for each in arrived) / max(1, len(arrived)),
            names.ERRORS_RETRIES_COUNT: float(sum(each.num_retries for each in arrived)),
        }
        self._arrived, self._num_filtered, self._num_dropped = [], 0, 0
        self._pass_rates.clear()
        return metrics

    def _has_enough_members(self, result: GroupResult) -> bool:
        num_judged = len(result.rewards)
        if num_judged == len(result.summaries):
            return num_judged > 0
        return self._settings.incomplete_groups == "allow_partial" and num_judged >= self._settings.min_group_size

    async def _drop(self, result: GroupResult) -> None:
        await asyncio.to_thread(self._data_plane.clear, result.meta.keys)
        await self._board.drop(result.group)

    def _count_failures(self, result: GroupResult) -> None:
        for summary in result.summaries:
            has_failed = summary.outcome is Outcome.INFRA_ERROR
            self._rates.observe("infra_error" if has_failed else None)
            if summary.error is not None:
                self._log(summary)
        rate = self._rates.rate()
        if self._rates.num_units >= INFRA_WINDOW and rate > self._settings.max_infra_error_rate:
            causes = Counter(summary.error for summary in result.summaries if summary.error is not None)
            raise TooManyFailuresError(
                f"{rate:.0%} of the last {INFRA_WINDOW} episodes ended infra_error "
                f"(psrl.max_infra_error_rate={self._settings.max_infra_error_rate:g}); most often: {causes.most_common(1)}"
            )

    def _log(self, summary: EpisodeSummary) -> None:
        self._errors.record_text(
            summary.outcome.value,
            summary.error or "",
            is_retryable=summary.outcome is Outcome.INFRA_ERROR,
            unit=summary.uid,
            step=self._board.version,
        )

    def _count_filtered(self, result: GroupResult) -> None:
        self._num_filtered += 1
        accuracies = [summary.accuracy or 0.0 for summary in result.summaries]
        self._pass_rates[round(sum(accuracies) / len(accuracies), 2)] += 1
        limit = self._filter.max_num_gen_batches * self._groups_per_step
        if self._num_filtered >= limit:
            histogram = ", ".join(f"{rate:g}: {count}" for rate, count in sorted(self._pass_rates.items()))
            raise TooManyFailuresError(
                f"dynamic sampling dropped {self._num_filtered} groups with equal rewards in one step "
                f"(algorithm.filter_groups.max_num_gen_batches={self._filter.max_num_gen_batches}); pass rates: {histogram}"
            )
