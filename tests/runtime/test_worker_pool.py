"""Groups outlive the workers that play them: real actors, killed by their own groups, and no engine."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import ray

from psrl.data_plane import MemoryDataPlane, TrajectoryRow
from psrl.data_plane.memory import meta_of
from psrl.processes.kept import RestartLimit
from psrl.runtime.groups import EndHow, GroupRequest, GroupResult
from psrl.runtime.kept_actor import KeptActor, KeptLimits
from psrl.runtime.worker_pool import WorkerPool
from psrl.types import EpisodeTicket, Message, Outcome, Role, Task

pytestmark = pytest.mark.slow


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=100)
class Worker:
    """Plays a group as its task says: `die`, `wait` until it is ended, or `end`."""

    def __init__(self) -> None:
        self._told: dict[str, EndHow] = {}
        self._changed = asyncio.Event()

    async def run_group(self, request: GroupRequest) -> GroupResult:
        words = request.task.data_source
        if words == "die" or (words == "die once" and not Path(request.task.prompt[0].content).exists()):
            Path(request.task.prompt[0].content).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        group = request.tickets[0].group
        while words == "wait" and group not in self._told:
            await self._changed.wait()
        return GroupResult(group=group, summaries=(), meta=meta_of([]), records=(), attempt=request.attempt)

    async def alive(self) -> None:
        pass

    async def end_group(self, group: str, how: EndHow) -> bool:
        self._told[group] = how
        self._changed.set()
        return True


@pytest.fixture(scope="module")
def local_ray():
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def request(uid: str, how: str, path="") -> GroupRequest:
    task = Task(uid=uid, prompt=(Message(role=Role.USER, content=str(path)),), data_source=how)
    tickets = tuple(EpisodeTicket(uid=f"{uid}-e{index}", group=uid, admitted_version=0, seed=index) for index in range(2))
    return GroupRequest(task=task, tickets=tickets, wants_records=False)


def play(body, *, num_workers: int = 1, data_plane=None, max_resends: int = 2):
    """`body(pool, deaths)` while the workers are kept alive."""
    deaths = []

    async def nothing(handle) -> None:
        await handle.__ray_ready__.remote()

    async def run():
        limits = KeptLimits(restarts=RestartLimit(max_restarts=50), startup_s=60.0, silent_after_s=60.0)
        workers = [
            KeptActor(
                f"agent worker {index}",
                Worker.remote,
                prepare=nothing,
                limits=limits,
                died=lambda name, why: deaths.append((name, why)),
                note=lambda _: None,
            )
            for index in range(num_workers)
        ]
        pool = WorkerPool(workers, data_plane=data_plane or MemoryDataPlane(), max_resends=max_resends, note=lambda _: None)
        for worker in workers:
            await worker.ready()
        keeping = [asyncio.create_task(worker.keep()) for worker in workers]
        try:
            return await asyncio.wait_for(body(pool), 60), deaths
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    return asyncio.run(run())


def test_a_group_whose_worker_dies_is_played_by_its_successor_and_one_death_costs_one_restart(local_ray, tmp_path):
    async def body(pool):
        result = await pool.play(request("a", "die once", tmp_path / "died"), what="group a", deadline_s=50)
        await pool.play(request("b", "end"), what="group b", deadline_s=50)
        await asyncio.sleep(3)  # longer than the next looks at the actor: a death that is told twice would be seen
        return result

    result, deaths = play(body)
    assert result.group == "a"
    assert [name for name, _ in deaths] == ["agent worker 0"]
    assert "pid " in deaths[0][1]


def test_a_group_that_kills_every_worker_is_given_up_and_the_others_go_on(local_ray, tmp_path):
    async def body(pool):
        poison = pool.play(request("a", "die", tmp_path / "died"), what="group a", deadline_s=50)
        results = await asyncio.gather(poison, pool.play(request("b", "end"), what="group b", deadline_s=50))
        await pool.play(request("c", "end"), what="group c", deadline_s=50)  # by the third successor: the last death has been told
        return results

    (poison, other), deaths = play(body)
    assert {summary.outcome for summary in poison.summaries} == {Outcome.INFRA_ERROR}
    assert [summary.error for summary in poison.summaries] == ["3 agent workers died with its group"] * 2
    assert (other.group, len(deaths)) == ("b", 3)


def test_a_group_that_is_ended_while_it_waits_for_a_worker_is_ended_once_it_has_one(local_ray):
    async def body(pool):
        (worker,) = pool.workers
        worker.suspect(worker.handle, "it is replaced for this test")
        playing = asyncio.create_task(pool.play(request("a", "wait"), what="group a", deadline_s=50))
        await asyncio.sleep(0)
        await pool.end_group("a", EndHow.CANCEL)
        return await playing

    result, deaths = play(body)
    assert result.group == "a"
    assert [why.partition(" (pid")[0] for _, why in deaths] == ["it is replaced for this test"]


def test_rows_that_only_the_dead_worker_had_put_are_forgotten(local_ray, tmp_path):
    plane = MemoryDataPlane()
    plane.put([TrajectoryRow(key=key, tags={}, columns={}) for key in ("a-e0-t1", "ab-e0-t0")])

    async def body(pool):
        return await pool.play(request("a", "die once", tmp_path / "died"), what="group a", deadline_s=50)

    play(body, data_plane=plane)
    assert plane.keys() == ["ab-e0-t0"]
