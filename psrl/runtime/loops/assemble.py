"""The assemble loop: arrived groups become training data, or are dropped and replaced."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from psrl.config.algorithm import FilterGroupsConfig
from psrl.config.psrl_section import PsrlConfig
from psrl.data_plane import DataPlane
from psrl.runtime.board import SURPLUS, Board, Unwanted
from psrl.runtime.failures import FailureLimit
from psrl.runtime.groups import EpisodeSummary, GroupResult
from psrl.staleness import DynamicSampling, has_signal
from psrl.telemetry import names
from psrl.telemetry.errors_log import ErrorLog
from psrl.telemetry.group_log import Fate, GroupFate
from psrl.types import Outcome

INCOMPLETE = Unwanted(fate=Fate.DROPPED, may_come_again=False)
"""Members ended `infra_error` for good."""
WITHOUT_SIGNAL = Unwanted(fate=Fate.FILTERED, may_come_again=False)
"""All rewards are equal."""


class AssembleLoop:
    """Decides over each group: train on it, or leave it out so that the feed loop refills.

    Consumes: results of agent workers.
    Waits for: the next result; the data plane, within its deadline.
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
        record_fate: Callable[[GroupFate], None],
    ) -> None:
        """`report` sees every group that arrived, trained on or left out for good; `record_fate` those that never will be trained on."""
        self._board = board
        self._arrivals = arrivals
        self._data_plane = data_plane
        self._settings = settings
        # With staleness, groups of several updates may arrive before the first of them.
        max_filtered = filter_groups.max_num_gen_batches * groups_per_step * (settings.staleness + 1)
        self._sampling = DynamicSampling(max_filtered=max_filtered) if filter_groups.enable else None
        self._report = report
        self._record_fate = record_fate
        self._failures = FailureLimit(errors, max_rate=settings.max_infra_error_rate)
        self._arrived: list[EpisodeSummary] = []
        self._num_by_fate: Counter[Fate] = Counter()
        self._num_reissued = 0
        self.num_looked_at = 0
        """Groups that ended, whatever became of them."""

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            TooManyFailuresError: Infra errors passed their limit, or dynamic sampling found no group to learn from.
        """
        while True:
            result = await self._arrivals.get()
            self.num_looked_at += 1
            unwanted = self._board.unwanted(result.group)
            if unwanted is not None:
                await self._leave_out(result, unwanted)
                continue
            self._arrived += result.summaries
            self._failures.count(result.summaries, step=self._board.version)
            is_to_come_again = False
            if not self._has_enough_members(result):
                await self._leave_out(result, INCOMPLETE)
            elif self._sampling is not None and not has_signal(result.rewards):
                await self._leave_out(result, WITHOUT_SIGNAL)
                self._count_filtered(result)
            elif not self._board.arrive(result):
                is_to_come_again = await self._leave_out(result, SURPLUS)
            if not is_to_come_again:
                # Only now: while it was undecided, a checkpoint would have had it in flight, and a resume would write it down again.
                self._report(result)

    def take_metrics(self) -> dict[str, float]:
        """Of everything that arrived since the last call, what was not trained on included; a new step begins."""
        arrived, fates = self._arrived, self._num_by_fate
        metrics = {
            names.GROUPS_FILTERED_COUNT: float(fates[Fate.FILTERED]),
            names.GROUPS_DROPPED_COUNT: float(fates[Fate.DROPPED]),
            names.GROUPS_SURPLUS_COUNT: float(fates[Fate.SURPLUS]),
            names.GROUPS_REISSUED_COUNT: float(self._num_reissued),
            names.ERRORS_INFRA_RATE: sum(each.outcome is Outcome.INFRA_ERROR for each in arrived) / max(1, len(arrived)),
            names.ERRORS_RETRIES_COUNT: float(sum(each.num_retries for each in arrived)),
        }
        self._arrived, self._num_by_fate, self._num_reissued = [], Counter(), 0
        if self._sampling is not None:
            self._sampling.begin_step()
        return metrics

    def _has_enough_members(self, result: GroupResult) -> bool:
        num_judged, num_wanted = len(result.rewards), self._settings.rollout_n
        if num_judged == num_wanted:
            return True
        return self._settings.incomplete_groups == "allow_partial" and num_judged >= self._settings.min_group_size

    async def _leave_out(self, result: GroupResult, why: Unwanted) -> bool:
        """Whether the group is issued again; else it has its fate."""
        await asyncio.to_thread(self._data_plane.clear, result.meta.keys)
        if self._board.leave(result.group, may_come_again=why.may_come_again):
            self._num_reissued += 1
            return True
        self._num_by_fate[why.fate] += 1
        self._record_fate(
            GroupFate(
                uid=result.group,
                fate=why.fate,
                step=self._board.version,
                oldest_version=result.oldest_version,
                attempt=result.attempt,
            )
        )
        return False

    def _count_filtered(self, result: GroupResult) -> None:
        assert self._sampling is not None
        accuracies = [summary.accuracy or 0.0 for summary in result.summaries]
        self._sampling.leave_out(pass_rate=sum(accuracies) / len(accuracies))
