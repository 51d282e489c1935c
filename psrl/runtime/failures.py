"""Episodes that could not be judged: written down, counted, and past a limit the end of the run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from psrl.errors import TooManyFailuresError
from psrl.runtime.groups import EpisodeSummary
from psrl.telemetry.errors_log import ErrorLog, ErrorRates
from psrl.types import Outcome

INFRA_WINDOW = 64
"""Episodes over which the rate of those is taken that could not be judged, whatever failed."""


class FailureLimit:
    """The share of the last episodes without a reward, against `psrl.max_infra_error_rate`."""

    def __init__(self, errors: ErrorLog, *, max_rate: float) -> None:
        """What failed is written to `errors`."""
        self._errors = errors
        self._max_rate = max_rate
        self._rates = ErrorRates(INFRA_WINDOW)
        self._causes: deque[str | None] = deque(maxlen=INFRA_WINDOW)
        """Of the same episodes; None where one was judged."""

    def count(self, summaries: Sequence[EpisodeSummary], *, step: int) -> None:
        """Episodes that ended; those that psrl ended itself do not count.

        Raises:
            TooManyFailuresError: The limit is passed; names the most frequent cause in the window.
        """
        for summary in summaries:
            if summary.outcome is not Outcome.ABORTED:
                self._rates.observe(None if summary.reward is not None else "unjudged")
                self._causes.append(None if summary.reward is not None else summary.error)
            if summary.error is not None:
                is_fault = summary.outcome is Outcome.INFRA_ERROR
                self._errors.record_text(summary.outcome.value, summary.error, is_retryable=is_fault, unit=summary.uid, step=step)
        rate = self._rates.rate()
        if self._rates.num_units >= INFRA_WINDOW and rate > self._max_rate:
            causes = Counter(cause for cause in self._causes if cause is not None)
            raise TooManyFailuresError(
                f"{rate:.0%} of the last {INFRA_WINDOW} episodes could not be judged: infra_error, or a grader that failed "
                f"(psrl.max_infra_error_rate={self._max_rate:g}); most often: {causes.most_common(1)}"
            )
