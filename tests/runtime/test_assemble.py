"""Arrived groups are trained on or replaced, and both are counted."""

import asyncio
from dataclasses import replace

import pytest

from psrl.config.algorithm import FilterGroupsConfig
from psrl.config.psrl_section import PsrlConfig
from psrl.data_plane import MemoryDataPlane
from psrl.data_plane.memory import meta_of
from psrl.errors import TooManyFailuresError
from psrl.runtime.board import Board, Candidate
from psrl.runtime.groups import EpisodeSummary, GroupResult
from psrl.runtime.loops.assemble import AssembleLoop
from psrl.staleness import Coordinator, CoordinatorSettings, StalenessLedger
from psrl.telemetry.errors_log import ErrorLog, read_errors
from psrl.telemetry.group_log import GroupFate
from psrl.types import Outcome, Task, Timings

LIMIT_S = 10.0


def episode(uid: str, reward: float | None, num_retries: int = 0) -> EpisodeSummary:
    return EpisodeSummary(
        uid=uid,
        outcome=Outcome.INFRA_ERROR if reward is None else Outcome.FINISHED,
        reward=reward,
        accuracy=reward,
        num_turns=1,
        num_sampled=1,
        counts={},
        timings=Timings(),
        temperature=None,
        error="EngineError: gone" if reward is None else None,
        num_retries=num_retries,
    )


def group(uid: str, *episodes: EpisodeSummary) -> GroupResult:
    return GroupResult(group=uid, summaries=episodes, meta=meta_of([]), records=())


async def assembled(folder, results: list[GroupResult], *, settings=None, filter_groups=None, num_kept: int) -> tuple[list[str], dict]:
    """The groups that are trained on, and the step's metrics; all results must have been looked at."""
    ledger = StalenessLedger(staleness=0, groups_per_buffer=num_kept, version=0)
    chosen = CoordinatorSettings.of(PsrlConfig(), max_groups_in_flight=100, seed=1)
    board = Board(Coordinator(chosen, ledger, num_instances=1))
    board.instance_is_up(0, 0)
    fates: list[GroupFate] = []
    arrivals: asyncio.Queue[GroupResult] = asyncio.Queue()
    errors = ErrorLog(folder / "errors.jsonl")
    loop = AssembleLoop(
        board=board,
        arrivals=arrivals,
        data_plane=MemoryDataPlane(),
        settings=settings or PsrlConfig(rollout_n=2),
        filter_groups=filter_groups or FilterGroupsConfig(),
        groups_per_step=num_kept,
        errors=errors,
        report=lambda result: None,
        record_fate=fates.append,
    )

    async def play() -> None:
        for result in results:
            candidate = Candidate(task=Task(uid=result.group, prompt=(), data_source="test"))
            await board.admit(lambda candidate=candidate: candidate, prompt_of=lambda task: "")
            await arrivals.put(result)

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(loop.run())
        tasks.create_task(play())
        ready = await board.take_ready()
        running.cancel()
    errors.close()
    assert [fate.uid for fate in fates] == [each.group for each in results if each.group not in ready.consumed.groups]
    return [each.group for each in ready.groups], loop.take_metrics()


def test_failures_count_although_their_group_is_replaced(tmp_path):
    results = [
        group("a", episode("a-e0", 1.0), episode("a-e1", None, num_retries=2)),
        group("b", episode("b-e0", 1.0), episode("b-e1", 0.0, num_retries=1)),
    ]
    kept, metrics = asyncio.run(assembled(tmp_path, results, num_kept=1))
    assert kept == ["b"]
    assert metrics == {
        "groups/filtered/count": 0.0,
        "groups/dropped/count": 1.0,
        "groups/surplus/count": 0.0,
        "groups/reissued/count": 0.0,
        "errors/infra/rate": 0.25,
        "errors/retries/count": 3.0,
    }
    (failed,) = read_errors(tmp_path / "errors.jsonl")
    assert (failed.unit, failed.error_class, failed.is_retryable, failed.step) == ("a-e1", "infra_error", True, 0)


def test_a_group_that_lost_a_member_is_kept_where_the_settings_allow_it(tmp_path):
    results = [group("a", episode("a-e0", 1.0), episode("a-e1", 0.0), episode("a-e2", None))]
    settings = PsrlConfig(rollout_n=3, incomplete_groups="allow_partial", min_group_size=2)
    kept, metrics = asyncio.run(assembled(tmp_path, results, settings=settings, num_kept=1))
    assert kept == ["a"]
    assert metrics["groups/dropped/count"] == 0.0


def test_equal_rewards_are_replaced_only_by_dynamic_sampling(tmp_path):
    results = [group("a", episode("a-e0", 1.0), episode("a-e1", 1.0)), group("b", episode("b-e0", 1.0), episode("b-e1", 0.0))]
    assert asyncio.run(assembled(tmp_path, results[:1], num_kept=1))[0] == ["a"]
    kept, metrics = asyncio.run(assembled(tmp_path, results, filter_groups=FilterGroupsConfig(enable=True), num_kept=1))
    assert kept == ["b"]
    assert metrics["groups/filtered/count"] == 1.0


def test_dynamic_sampling_that_finds_nothing_ends_with_the_pass_rates(tmp_path):
    results = [group(name, episode(f"{name}-e0", 1.0), episode(f"{name}-e1", 1.0)) for name in "abc"]
    settings = FilterGroupsConfig(enable=True, max_num_gen_batches=2)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(assembled(tmp_path, results, filter_groups=settings, num_kept=1))
    assert caught.group_contains(TooManyFailuresError, match=r"dropped 2 groups.*pass rates: 1: 2")


def test_too_many_failures_end_the_run_with_their_cause(tmp_path):
    results = [group(f"g{index:02}", episode(f"{index}-e0", None), episode(f"{index}-e1", 1.0)) for index in range(40)]
    settings = PsrlConfig(rollout_n=2, max_infra_error_rate=0.25)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(assembled(tmp_path, results, settings=settings, num_kept=1))
    assert caught.group_contains(TooManyFailuresError, match=r"50% of the last 64.*EngineError: gone")


def test_a_grader_that_fails_ends_the_run_as_other_failures_do(tmp_path):
    def unjudged(uid: str) -> EpisodeSummary:
        return replace(episode(uid, None), outcome=Outcome.FINISHED, error="RewardError: the judge is down")

    results = [group(f"g{index:02}", unjudged(f"{index}-e0"), unjudged(f"{index}-e1")) for index in range(40)]
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(assembled(tmp_path, results, num_kept=1))
    assert caught.group_contains(TooManyFailuresError, match=r"100% of the last 64.*a grader that failed.*the judge is down")
