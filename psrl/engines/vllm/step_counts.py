"""What vLLM says of itself after each of its steps, as the engine contract counts it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import StatLoggerBase

from psrl.engines.rate import TokenRate

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


class StepCounts:
    """Sums over the data-parallel engines of one replica. Written by the engine's thread, read by any."""

    def __init__(self) -> None:
        self.rate = TokenRate()
        self.num_sampled = 0
        self._running: dict[int, int] = {}
        self._cache_usage: dict[int, float] = {}

    def logger(self, vllm_config: VllmConfig, engine_index: int) -> StepLogger:
        """Made by vLLM, one for each engine."""
        return StepLogger(self, vllm_config, engine_index)

    @property
    def num_running(self) -> int:
        """Requests in the last step."""
        return sum(self._running.values())

    @property
    def cache_usage(self) -> float:
        """Share of the cache's blocks that running requests hold, the mean over the engines."""
        return sum(self._cache_usage.values()) / max(1, len(self._cache_usage))

    def stepped(self, engine: int, *, num_running: int, cache_usage: float) -> None:
        """What an engine's scheduler says after a step."""
        self._running[engine] = num_running
        self._cache_usage[engine] = cache_usage

    def sampled(self, num_tokens: int) -> None:
        """Tokens of a step."""
        self.num_sampled += num_tokens
        self.rate.add(num_tokens)

    def nothing_runs(self) -> None:
        """All requests were given back: vLLM tells of that only with its next step."""
        self._running = dict.fromkeys(self._running, 0)
        self._cache_usage = dict.fromkeys(self._cache_usage, 0.0)


class StepLogger(StatLoggerBase):
    """vLLM's interface for whoever wants to know of steps."""

    def __init__(self, counts: StepCounts, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._counts, self._engine = counts, engine_index

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called after each step, and when the scheduler changed."""
        if scheduler_stats is not None:
            self._counts.stepped(self._engine, num_running=scheduler_stats.num_running_reqs, cache_usage=scheduler_stats.kv_cache_usage)
        if iteration_stats is not None and iteration_stats.num_generation_tokens:
            self._counts.sampled(iteration_stats.num_generation_tokens)

    def log_engine_initialized(self) -> None:
        """Nothing to say: the process prints its settings itself."""
