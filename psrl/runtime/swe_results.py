"""What an evaluation says of problems with a patch: resolved or not, how the episodes ended, and the patches in SWE-bench's format.

One episode per problem counts: the greedy one where there is one, else the first. An episode that could not be judged counts as not
resolved, so failures never flatter; it is also counted by its outcome.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

from psrl.swe.intervals import wilson_interval
from psrl.telemetry.trajectories import lengths_of_turns
from psrl.types import Episode, SweProblem
from psrl.types.swe import SWE_KEY

PREDICTIONS_FILE = "predictions.json"
RESULTS_FILE = "results.json"
MAX_ERROR_CHARACTERS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class SweResult:
    """One problem's episode that counts."""

    instance_id: str
    repo: str
    outcome: str
    is_resolved: bool
    reward: float | None
    """None where it could not be judged."""
    exit_status: str | None
    """As the agent says it."""
    num_turns: int | None
    """As captured, or else as the agent counted; None where neither is known."""
    num_sampled: int | None
    """Tokens; None where they were sampled by somebody else."""
    seconds: float
    error: str | None
    patch: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SweSummary:
    """All problems together."""

    num_problems: int
    num_resolved: int
    low: float
    high: float
    """Ends of the 95% confidence interval of the resolve rate."""
    outcomes: dict[str, int]
    exit_statuses: dict[str, int]
    by_repo: dict[str, tuple[int, int]]
    """(resolved, problems), those with most problems first."""
    mean_turns: float | None
    num_sampled: int | None
    mean_episode_s: float
    predictions: Path

    @property
    def resolve_rate(self) -> float:
        """Share of the problems that were resolved."""
        return self.num_resolved / self.num_problems


class SweResults:
    """Collects episodes that left a patch, or tried to; keeps the files of the run folder up to date."""

    def __init__(self, folder: Path, *, model_name: str) -> None:
        """`folder` is the run's; `model_name` stands in the predictions."""
        self._folder = folder
        self._model_name = model_name
        self._results: dict[str, SweResult] = {}
        self._are_greedy: set[str] = set()

    @property
    def num_resolved(self) -> int:
        """So far."""
        return sum(result.is_resolved for result in self._results.values())

    def add(self, episode: Episode) -> None:
        """An episode that has ended; others than those of problems with a patch say nothing here."""
        is_problem = SWE_KEY in episode.task.extra_info
        if not is_problem and episode.result.submission is None:
            return
        result = result_of(episode)
        if result.instance_id in self._are_greedy or (result.instance_id in self._results and episode.ticket.temperature is None):
            return
        if episode.ticket.temperature is not None:
            self._are_greedy.add(result.instance_id)
        self._results[result.instance_id] = result
        self._write()

    def summary(self) -> SweSummary | None:
        """None where there was no such episode."""
        results = list(self._results.values())
        if not results:
            return None
        num_resolved = self.num_resolved
        low, high = wilson_interval(num_resolved, len(results))
        turns = [result.num_turns for result in results if result.num_turns is not None]
        tokens = [result.num_sampled for result in results if result.num_sampled is not None]
        repos: defaultdict[str, list[bool]] = defaultdict(list)
        for result in results:
            repos[result.repo].append(result.is_resolved)
        return SweSummary(
            num_problems=len(results),
            num_resolved=num_resolved,
            low=low,
            high=high,
            outcomes=dict(Counter(result.outcome for result in results).most_common()),
            exit_statuses=dict(Counter(result.exit_status or "none" for result in results).most_common()),
            by_repo={repo: (sum(each), len(each)) for repo, each in sorted(repos.items(), key=lambda item: (-len(item[1]), item[0]))},
            mean_turns=sum(turns) / len(turns) if turns else None,
            num_sampled=sum(tokens) if tokens else None,
            mean_episode_s=sum(result.seconds for result in results) / len(results),
            predictions=self._folder / PREDICTIONS_FILE,
        )

    def _write(self) -> None:
        """Whole files each time, so that what an interrupted evaluation leaves can be read."""
        predictions = {
            name: {"instance_id": name, "model_name_or_path": self._model_name, "model_patch": result.patch}
            for name, result in self._results.items()
        }
        results = [{name: value for name, value in asdict(result).items() if name != "patch"} for result in self._results.values()]
        _replace(self._folder / PREDICTIONS_FILE, predictions)
        _replace(self._folder / RESULTS_FILE, results)


def result_of(episode: Episode) -> SweResult:
    """What counts of an episode."""
    result, task = episode.result, episode.task
    problem = SweProblem.of_task(task) if SWE_KEY in task.extra_info else None
    lengths = lengths_of_turns(result.trajectories)
    calls = result.counts.get("turns", result.counts.get("agent/calls"))
    return SweResult(
        instance_id=problem.instance_id if problem else task.uid,
        repo=problem.repo if problem else task.data_source,
        outcome=result.outcome.value,
        is_resolved=episode.score.accuracy == 1.0,
        reward=episode.score.reward,
        exit_status=result.submission.exit_status if result.submission else None,
        num_turns=None if calls is None else int(calls),
        num_sampled=sum(lengths) if lengths else None,
        seconds=round(episode.timings.total_s, 3),
        error=result.error[:MAX_ERROR_CHARACTERS] if result.error else None,
        patch=result.submission.patch if result.submission else "",
    )


def _replace(path: Path, content: object) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")
    os.replace(unfinished, path)
