"""Deadlines and deaths have names."""

import asyncio
import errno
import re
from typing import Never

import pytest

from psrl.errors import ActorDiedError, ConfigError, DeadlineError, ProcessDiedError, PsrlError, RunFolderError, WeightSyncError
from psrl.processes.kept import RestartHistory, RestartLimit
from psrl.protocols import WeightManifest, WeightReport
from psrl.runtime.kept_replica import check_report
from psrl.runtime.lifetime import cause_in, unless_stopped
from psrl.runtime.startup import Checklist
from psrl.runtime.supervision import Supervisor, UnitsInFlight, answer_of, first_done, first_line
from psrl.runtime.watchdog import Watchdog


def test_a_unit_that_does_not_end_is_named():
    async def run():
        with pytest.raises(DeadlineError, match=r"train step 3 did not end within 0\.02 s"):
            await answer_of("train step 3", asyncio.Event().wait(), 0.02)

    asyncio.run(run())


async def lives() -> str:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def ends_after(turns: int, cause: str) -> str:
    for _ in range(turns):
        await asyncio.sleep(0)
    return cause


async def is_given_up(error: PsrlError) -> Never:
    raise error


def test_the_first_death_is_named():
    async def run():
        supervisor = Supervisor()
        supervisor.watch("train worker 0", lives())
        supervisor.watch("TransferQueue's controller", ends_after(1, "the process ended"))
        with pytest.raises(ProcessDiedError, match="TransferQueue's controller died: the process ended"):
            await asyncio.wait_for(supervisor.run(), 10)

    asyncio.run(run())


def test_of_what_died_together_the_one_that_the_others_lean_on_is_named():
    async def run():
        supervisor = Supervisor()
        supervisor.watch("Ray", ends_after(20, "its raylet ended"))
        supervisor.watch("train worker 0", ends_after(1, "the process ended"))
        supervisor.keep("agent worker 0", is_given_up(ProcessDiedError("agent worker 0 died 4 times")))
        with pytest.raises(ProcessDiedError, match="Ray died: its raylet ended"):
            await asyncio.wait_for(supervisor.run(), 10)

    asyncio.run(run())


def test_of_two_looks_at_one_death_the_one_that_knows_more_is_told():
    async def run():
        knows, suspects = ends_after(5, "it ended with code -9"), ends_after(1, "a call failed")
        return await first_done((knows, suspects), grace_s=10)

    assert asyncio.run(run()) == "it ended with code -9"


def test_a_process_that_is_given_up_ends_the_watch_with_its_history():
    async def run():
        supervisor = Supervisor()
        supervisor.watch("train worker 0", lives())
        supervisor.keep("agent worker 0", is_given_up(ProcessDiedError("agent worker 0 died 4 times")))
        with pytest.raises(ProcessDiedError, match="agent worker 0 died 4 times"):
            await asyncio.wait_for(supervisor.run(), 10)

    asyncio.run(run())


def test_a_process_may_end_as_often_as_its_limit_says_and_then_all_causes_are_told():
    now = [0.0]
    history = RestartHistory("agent worker 0", RestartLimit(max_restarts=2, window_s=100.0), clock=lambda: now[0])
    history.ended("killed at 0")
    now[0] = 90.0
    history.ended("killed at 90")
    now[0] = 101.0  # the first is out of the window
    history.ended("killed at 101")
    now[0] = 110.0
    with pytest.raises(
        ProcessDiedError, match=r"died 3 times within 100 s, the last time: killed at 110 \(before: 20 s ago: killed at 90; 9 s"
    ):
        history.ended("killed at 110")
    assert history.num_restarts == 3


def test_without_restarts_the_first_death_is_the_end():
    with pytest.raises(ProcessDiedError, match=r"^gateway died: killed$"):
        RestartHistory("gateway", RestartLimit(max_restarts=0)).ended("killed")


def test_the_watchdog_says_what_is_awaited_and_when_it_fails_once_nothing_ends():
    units, told = UnitsInFlight(), asyncio.Queue()

    async def run():
        watching = asyncio.create_task(Watchdog(units, stall_s=0.05, tell=told.put_nowait).run())
        with units.unit("group t7 in agent worker 1", deadline_s=90.0):
            report = await asyncio.wait_for(told.get(), 10)
        watching.cancel()
        return report

    assert re.search(r"nothing has ended for 0 s; awaited: group t7 in agent worker 1 \(0 s, fails after 90 s\)", asyncio.run(run()))


def test_the_watchdog_is_silent_while_units_end_and_when_there_is_none():
    units, told = UnitsInFlight(), []

    async def run():
        watching = asyncio.create_task(Watchdog(units, stall_s=0.2, tell=told.append).run())
        with units.unit("a long one", deadline_s=90.0):
            for _ in range(20):
                with units.unit("a short one", deadline_s=90.0):
                    await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        watching.cancel()

    asyncio.run(run())
    assert told == []


def test_a_dead_process_is_the_cause_of_what_followed_from_it():
    died, followed = ProcessDiedError("agent worker 0 died"), DeadlineError("group x")
    assert cause_in(ExceptionGroup("loops", [followed, ExceptionGroup("inner", [died])])) is died


def test_a_mistake_in_the_code_is_not_dressed_up_as_a_failure_of_the_run():
    group = ExceptionGroup("loops", [KeyError("typo")])
    with pytest.raises(ExceptionGroup):
        cause_in(group)


def test_a_full_disk_is_a_cause():
    error = OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
    assert isinstance(cause_in(ExceptionGroup("loops", [error])), RunFolderError)


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


def test_a_part_that_does_not_start_is_told_with_what_is_up_and_what_else_is_awaited():
    async def run():
        checklist = Checklist(limit_s=0.2, done=lambda what: None)
        await checklist.step("engines", asyncio.sleep(0))
        await checklist.step("gateway", asyncio.Event().wait())

    with pytest.raises(DeadlineError, match=r"start-up: gateway did not end within 0\.2 s \(up: engines 0\.0 s; awaited: gateway\)"):
        asyncio.run(run())


def test_an_actor_that_could_not_be_made_says_why():
    error = ActorDiedError(
        "The actor died because of an error raised in its creation task, \x1b[36mray::A.__init__()\x1b[39m (pid=1)\n"
        '  File "a.py", line 1, in __init__\nTypeError: unexpected keyword\n'
    )
    assert first_line(error) == "The actor died because of an error raised in its creation task: TypeError: unexpected keyword"


def test_errors_cross_processes_whole():
    import pickle

    error = pickle.loads(pickle.dumps(ConfigError(key="a.b", value=3, rule="is odd", fix="set 4")))
    assert (error.key, error.value, error.rule, error.fix) == ("a.b", 3, "is odd", "set 4")
