"""Deadlines and deaths have names."""

import asyncio

import pytest

from psrl.errors import ConfigError, DeadlineError, EngineError, ProcessDiedError, WeightSyncError
from psrl.protocols import WeightManifest, WeightReport
from psrl.runtime.kept_replica import check_report
from psrl.runtime.lifetime import cause_in, unless_stopped
from psrl.runtime.supervision import Supervisor, answer_of


def test_a_unit_that_does_not_end_is_named():
    async def run():
        with pytest.raises(DeadlineError, match=r"train step 3 did not end within 0\.02 s"):
            await answer_of("train step 3", asyncio.Event().wait(), 0.02)

    asyncio.run(run())


def test_the_first_death_is_named():
    async def dies() -> None:
        raise EngineError("replica 1 ended with code -9")

    async def run():
        supervisor = Supervisor()
        supervisor.watch("train worker 0", asyncio.Event().wait())
        supervisor.watch("engine replica 1", dies())
        with pytest.raises(ProcessDiedError, match="engine replica 1 died: replica 1 ended with code -9"):
            await asyncio.wait_for(supervisor.run(), 1)

    asyncio.run(run())


def test_a_dead_process_is_the_cause_of_what_followed_from_it():
    died, followed = ProcessDiedError("agent worker 0 died"), DeadlineError("group x")
    assert cause_in(ExceptionGroup("loops", [followed, ExceptionGroup("inner", [died])])) is died


def test_a_mistake_in_the_code_is_not_dressed_up_as_a_failure_of_the_run():
    group = ExceptionGroup("loops", [KeyError("typo")])
    with pytest.raises(ExceptionGroup):
        cause_in(group)


def test_work_is_cancelled_when_a_stop_is_requested_first():
    async def run():
        stop, was_cancelled = asyncio.Event(), asyncio.Event()

        async def work() -> int:
            try:
                await asyncio.Event().wait()
            finally:
                was_cancelled.set()
            return 1

        stop.set()
        assert await unless_stopped(work(), stop) is None
        assert was_cancelled.is_set()

    asyncio.run(run())


@pytest.mark.parametrize(
    "report",
    [
        WeightReport(version=2, num_matched=1, num_expected=1, checksum="c"),
        WeightReport(version=3, num_matched=0, num_expected=1, checksum="c"),
        WeightReport(version=3, num_matched=1, num_expected=1, checksum="other"),
    ],
)
def test_a_replica_that_reports_other_weights_stops_the_run(report):
    manifest = WeightManifest(version=3, tensors=(None,), total_bytes=4, checksum="c")
    check_report("replica 0", manifest, WeightReport(version=3, num_matched=1, num_expected=1, checksum="c"))
    with pytest.raises(WeightSyncError, match="replica 0 has version"):
        check_report("replica 0", manifest, report)


def test_errors_cross_processes_whole():
    import pickle

    error = pickle.loads(pickle.dumps(ConfigError(key="a.b", value=3, rule="is odd", fix="set 4")))
    assert (error.key, error.value, error.rule, error.fix) == ("a.b", 3, "is odd", "set 4")
