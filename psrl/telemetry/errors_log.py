"""What failed in a run: one line per failure in `errors.jsonl`, and how often each class fails lately."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from psrl.errors import PsrlError
from psrl.telemetry.json_lines import JsonLinesFile, read_json_lines

MAX_MESSAGE_CHARACTERS = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorRecord:
    """One failure."""

    time: float
    """Seconds since 1970."""
    unit: str
    """What failed, such as an episode's uid or `train step 7`."""
    error_class: str
    is_retryable: bool
    message: str
    step: int
    """Training steps done when it happened."""


class ErrorLog:
    """Appends failures to `errors.jsonl`."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """`path` is the run folder's `errors`."""
        self._lines = JsonLinesFile(path)
        self._clock = clock

    def record(self, error: BaseException, *, unit: str, step: int) -> ErrorRecord:
        """Write one failure. Only errors of psrl know whether a retry can help; others are taken as final."""
        retryable = isinstance(error, PsrlError) and error.is_retryable
        return self.record_text(type(error).__name__, str(error), is_retryable=retryable, unit=unit, step=step)

    def record_text(self, error_class: str, message: str, *, is_retryable: bool, unit: str, step: int) -> ErrorRecord:
        """Write one failure that arrived as text, such as the error of a LoopResult from another process."""
        record = ErrorRecord(
            time=self._clock(),
            unit=unit,
            error_class=error_class,
            is_retryable=is_retryable,
            message=message[:MAX_MESSAGE_CHARACTERS],
            step=step,
        )
        self._lines.append(asdict(record))
        return record

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_errors(path: Path) -> Iterator[ErrorRecord]:
    """The failures of a run in order."""
    for line in read_json_lines(path):
        yield ErrorRecord(**line)


class ErrorRates:
    """Share of the last `window` units that failed, by class.

    Example:
        window 4 and units ok, EngineError, ok, ok, SandboxError -> the first ok has left: {"EngineError": 0.25, "SandboxError": 0.25}.
    """

    def __init__(self, window: int) -> None:
        assert window > 0, f"a window of {window} units holds nothing"
        self._units: deque[str | None] = deque(maxlen=window)

    def observe(self, error_class: str | None) -> None:
        """One unit ended: None when it worked."""
        self._units.append(error_class)

    @property
    def num_units(self) -> int:
        """Units in the window; rates of few units say little."""
        return len(self._units)

    def rates(self) -> dict[str, float]:
        """Rate of each class that failed in the window."""
        counts = Counter(unit for unit in self._units if unit is not None)
        return {name: count / len(self._units) for name, count in sorted(counts.items())}

    def rate(self) -> float:
        """Rate of all classes together; 0 before the first unit."""
        return sum(unit is not None for unit in self._units) / len(self._units) if self._units else 0.0
