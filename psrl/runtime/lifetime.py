"""The life of a run's processes: started, watched while the work is done, and ended whatever happens.

`psrl train` and `psrl eval` differ in the work that they give to `run_with_processes`, and in nothing else.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from psrl.config.tree import Config
from psrl.errors import ProcessDiedError, PsrlError, RunFolderError
from psrl.processes.guard import start_guard
from psrl.runtime.build import Cluster, Reports, make_cluster
from psrl.runtime.cluster import RayProcesses, ray_of
from psrl.runtime.run_record import RunRecord
from psrl.runtime.shutdown import StopRequest, stop_cluster
from psrl.runtime.startup import Checklist, check_run_folder, start_cluster
from psrl.runtime.supervision import UNITS, end_tasks
from psrl.runtime.watchdog import Watchdog

Result = TypeVar("Result")
Work = Callable[[Cluster, asyncio.Event], Coroutine[Any, Any, None]]
"""What is done with the live processes; the event says that a stop was requested."""

DISK_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO))
GRACE_FOR_THE_SUPERVISOR_S = 6.0
"""When the work fails, a dead process is often the cause; so long the supervisor may take to name it."""


async def run_with_processes(config: Config, record: RunRecord, work: Work, *, with_training: bool) -> bool:
    """Do `work` while every process of the run is up.

    Returns:
        Whether a stop was requested; `work` was then cut short, or never begun.

    Raises:
        PsrlError: What failed, by name. It stands in the record's errors; processes and sandboxes are gone.
    """
    stop = StopRequest(note=record.note)
    stop.install()
    told: PsrlError | None = None
    try:
        record.activity("starting Ray")
        start_guard()
        with ray_of(config, with_training=with_training) as ray_of_run:
            stop.install()  # again: Ray takes SIGTERM for itself
            ray_processes = ray_of_run.processes
            record.started("Ray")
            for line in ray_of_run.places.lines():
                record.note(line)
            reports = Reports(died=record.died, note=record.note)
            cluster = make_cluster(config, record.folder.logs, ray_of_run.places, with_training=with_training, reports=reports)
            try:
                await _start_and_work(cluster, config, record, work, ray_processes, stop.event)
            except (PsrlError, OSError, BaseExceptionGroup) as error:
                told = cause_in(error)
                _tell(record, told)  # now: ending what is left may take a while, and without Ray may not come to its end
                raise told from error
            finally:
                record.activity("ending processes")
                cluster.data_plane.give_up()
                if ray_processes.dead() is None:
                    for leftover in await stop_cluster(cluster, deadline_s=config.psrl.deadlines.shutdown_s):
                        record.note(leftover)
    except PsrlError as error:
        if error is not told:
            _tell(record, error)
        raise
    finally:
        stop.restore()
    return stop.event.is_set()


def _tell(record: RunRecord, cause: PsrlError) -> None:
    with suppress(OSError):  # of a full disk; the command's own words name the cause
        record.failed(cause)
    record.note(f"stopping: {type(cause).__name__}: {str(cause).splitlines()[0]}")


async def _start_and_work(
    cluster: Cluster, config: Config, record: RunRecord, work: Work, ray_processes: RayProcesses, stop: asyncio.Event
) -> None:
    checklist = Checklist(limit_s=config.psrl.deadlines.startup_s, done=record.started)
    supervisor = await unless_stopped(start_cluster(cluster, config, ray_processes=ray_processes, checklist=checklist), stop)
    if supervisor is None:
        return
    record.note(f"up after Ray: {checklist}")
    await check_run_folder(cluster, record.folder.path)
    watching = asyncio.create_task(supervisor.run(), name="supervisor")
    working = asyncio.create_task(work(cluster, stop), name="work")
    watchdog = asyncio.create_task(Watchdog(UNITS, stall_s=config.psrl.deadlines.stall_s, tell=record.stalled).run(), name="watchdog")
    try:
        done, _ = await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
        if working in done and working.exception() is not None:
            await asyncio.wait({watching}, timeout=GRACE_FOR_THE_SUPERVISOR_S)
        if watching.done():
            watching.result()
        working.result()
    finally:
        await end_tasks({watching, working, watchdog}, config.psrl.deadlines.shutdown_s)


async def unless_stopped(work: Coroutine[Any, Any, Result], stop: asyncio.Event) -> Result | None:
    """The result of `work`, or None when a stop was requested first; then `work` is cancelled."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await end_tasks({working, stopping}, GRACE_FOR_THE_SUPERVISOR_S)


def cause_in(error: BaseException) -> PsrlError:
    """The psrl error inside (groups of) errors; a process's death before anything that followed from it.

    A disk that takes nothing more is one, too.

    Raises:
        BaseException: `error` itself, when there is none: a mistake of the programmer's.
    """
    leaves = [_disk_error(leaf) or leaf for leaf in leaves_of(error)]
    ours = [leaf for leaf in leaves if isinstance(leaf, PsrlError)]
    if len(ours) < len(leaves) or not ours:
        raise error
    return next((leaf for leaf in ours if isinstance(leaf, ProcessDiedError)), ours[0])


def _disk_error(error: BaseException) -> PsrlError | None:
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return RunFolderError(f"a file of the run cannot be written: {error}")
    return None


def leaves_of(error: BaseException) -> list[BaseException]:
    """The errors inside nested groups."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves_of(inner)]
    return [error]
