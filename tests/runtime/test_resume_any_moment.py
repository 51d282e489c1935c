"""Whatever the moment at which a run is killed, after its resume every task is trained on once, or has another fate, and none is lost.

The loops are the run's own (feed, assemble) around its own board; only agent workers and trainer are played by the test, which draws
who ends when, when a checkpoint is made and when the driver dies.
"""

import asyncio
import json
from pathlib import Path

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from psrl.config.algorithm import FilterGroupsConfig
from psrl.config.psrl_section import PsrlConfig
from psrl.data_plane import MemoryDataPlane
from psrl.data_plane.memory import meta_of
from psrl.datasets.source import uids_given
from psrl.runtime.board import Board, Candidate
from psrl.runtime.groups import GroupRequest, GroupResult
from psrl.runtime.loops.assemble import AssembleLoop
from psrl.runtime.loops.feed import FeedLoop
from psrl.runtime.resume import check_frontier, fit_to_settings
from psrl.runtime.resume_point import Reissue, ResumePoint, check_point
from psrl.staleness import Coordinator, CoordinatorSettings, StalenessLedger
from psrl.telemetry.errors_log import ErrorLog
from psrl.telemetry.group_log import Fate, GroupFate, GroupLog, check_group_log, read_group_log
from tests.runtime.resume_builders import a_result, a_source, settings

NUM_STEPS, GROUPS_PER_STEP = 4, 2
LIMIT_S = 10.0


class Players:
    """Agent workers: a group ends when the test says so."""

    def __init__(self):
        self.playing: dict[str, tuple[GroupRequest, asyncio.Future]] = {}

    async def play(self, request, *, what, deadline_s):
        group = request.tickets[0].group
        self.playing[group] = (request, asyncio.get_running_loop().create_future())
        return await self.playing[group][1]

    def end(self, group, *, is_lost):
        """With rewards, or with members that could not be judged."""
        request, future = self.playing.pop(group)
        judged = a_result(group, admitted=request.tickets[0].admitted_version, attempt=request.attempt).summaries[0]
        future.set_result(
            GroupResult(
                group=group,
                summaries=() if is_lost else (judged, judged),
                meta=meta_of([]),
                records=(),
                oldest_version=request.tickets[0].admitted_version,
                attempt=request.attempt,
            )
        )


class Driver:
    """One life of the driver, from a point."""

    def __init__(self, folder: Path, point: ResumePoint, *, staleness: int, redundant_groups: int):
        self.config = PsrlConfig(staleness=staleness, rollout_n=2, redundant_groups=redundant_groups)
        self.step, self.source, self.players = point.step, a_source(), Players()
        self.source.load_state_dict(point.source_state)
        empty = StalenessLedger(staleness=0, groups_per_buffer=1, version=point.version).snapshot()
        ledger = StalenessLedger.restore(
            point.ledger or empty,
            staleness=staleness,
            groups_per_buffer=GROUPS_PER_STEP,
            redundant_groups=redundant_groups,
            last_version=NUM_STEPS,
        )
        chosen = CoordinatorSettings.of(self.config, max_groups_in_flight=4, seed=1)
        self.board = Board(Coordinator(chosen, ledger, num_instances=1))
        self.board.restore(point.arrived, [Candidate(task=self.source.task_of(one.uid), attempt=one.attempt) for one in point.reissue])
        self.board.instance_is_up(0, point.version)
        self.board.published(point.version)
        self.log = GroupLog(folder / "groups.jsonl")
        self.errors = ErrorLog(folder / "errors.jsonl")
        arrivals = asyncio.Queue()
        self.feed = FeedLoop(
            source=self.source,
            board=self.board,
            player=self.players,
            arrivals=arrivals,
            rollout_n=2,
            redundant_episodes=0,
            run_seed=1,
            group_deadline_s=LIMIT_S,
            wants_records=lambda: False,
        )
        assemble = AssembleLoop(
            board=self.board,
            arrivals=arrivals,
            data_plane=MemoryDataPlane(),
            settings=self.config,
            filter_groups=FilterGroupsConfig(),
            groups_per_step=GROUPS_PER_STEP,
            errors=self.errors,
            report=lambda result: None,
            record_fate=self.log.write,
        )
        self.tasks = [asyncio.create_task(self.feed.run()), asyncio.create_task(assemble.run())]

    async def die(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.log.close()
        self.errors.close()

    async def settle(self):
        """Until the loops wait for what only the test can do."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def end_group(self, index, *, is_lost):
        if not self.players.playing:
            return
        group = list(self.players.playing)[index % len(self.players.playing)]
        candidate = next(each for each in self.board.in_flight if each.group == group)
        self.players.end(group, is_lost=is_lost)
        async with asyncio.timeout(LIMIT_S):
            # The assemble loop clears rows in a thread; then the group has arrived, has its fate, or waits to be issued again.
            while any(each is candidate for each in self.board.in_flight):
                await asyncio.to_thread(int)
        await self.settle()

    async def train(self):
        if self.step == NUM_STEPS or not self.board.coordinator.ledger.is_ready():
            return
        ready = await self.board.take_ready()
        self.step += 1
        self.board.published(self.board.advance())
        for result in ready.groups:
            self.log.write(
                GroupFate(
                    uid=result.group,
                    fate=Fate.TRAINED,
                    step=self.step,
                    admitted_version=ready.consumed.admitted[result.group],
                    buffer_version=ready.consumed.version,
                    oldest_version=result.oldest_version,
                    attempt=result.attempt,
                )
            )
        await self.settle()

    async def sync(self):
        for order in self.board.coordinator.due_syncs():
            self.board.sync_began(order.instance)
            self.board.synced(order.instance, order.version)
        await self.settle()

    def point(self, folder):
        """As `RunLoops.point`."""
        return ResumePoint(
            step=self.step,
            version=self.board.version,
            source_state=self.feed.pending_state,
            ledger=self.board.coordinator.ledger.snapshot(),
            reissue=tuple(Reissue(uid=candidate.group, attempt=candidate.attempt) for candidate in self.board.in_flight),
            arrived=self.board.arrived,
            log_lengths={"groups.jsonl": (folder / "groups.jsonl").stat().st_size},
        )


def through_json(point: ResumePoint) -> ResumePoint:
    check_point(point)
    back = ResumePoint.of(json.loads(json.dumps(point.as_dict())), json.loads(json.dumps(point.arrived_as_list())))
    assert back == point
    return back


async def run_to_the_end(folder: Path, moves, *, staleness: int, redundant_groups: int) -> Driver:
    start = ResumePoint(step=0, version=0, source_state=a_source().state_dict())
    saved, bound = start, {"staleness": staleness, "redundant_groups": redundant_groups}
    driver = Driver(folder, saved, **bound)
    await driver.settle()
    for name, number in moves:
        if name in ("end", "lose"):
            await driver.end_group(number, is_lost=name == "lose")
        elif name == "train":
            await driver.train()
        elif name == "sync":
            await driver.sync()
        elif name == "save":
            saved = through_json(driver.point(folder))
        else:
            await driver.die()
            length = saved.log_lengths["groups.jsonl"] if saved is not start else 0
            check_frontier(saved, {fate.uid for fate in read_group_log(folder / "groups.jsonl", size_bytes=length)})
            with (folder / "groups.jsonl").open("r+b") as file:
                file.truncate(length)
            if saved is not start:
                bound["staleness"] = number % 3
                now = settings(f"psrl.staleness={bound['staleness']}", f"trainer.total_training_steps={NUM_STEPS}")
                saved = fit_to_settings(saved, now)
            driver = Driver(folder, saved, **bound)
            await driver.settle()
    async with asyncio.timeout(LIMIT_S):
        while driver.step < NUM_STEPS:
            await driver.sync()
            await driver.end_group(0, is_lost=False)
            await driver.train()
    return driver


MOVES = st.lists(
    st.tuples(st.sampled_from(["end", "end", "end", "train", "train", "sync", "lose", "save", "save", "kill"]), st.integers(0, 5)),
    max_size=40,
)


@given(moves=MOVES, staleness=st.integers(0, 2), redundant_groups=st.integers(0, 1))
@hypothesis_settings(max_examples=60, deadline=None)
def test_no_task_is_trained_on_twice_and_none_is_lost(tmp_path_factory, moves, staleness, redundant_groups):
    folder = tmp_path_factory.mktemp("run")

    async def run():
        driver = await run_to_the_end(folder, moves, staleness=staleness, redundant_groups=redundant_groups)
        point = through_json(driver.point(folder))
        await driver.die()
        return point

    point = asyncio.run(run())
    fates = read_group_log(folder / "groups.jsonl")
    open_groups = [result.group for result in point.arrived] + [one.uid for one in point.reissue]
    given_uids = uids_given(point.source_state)
    # A resume may have had more staleness than the run it went on with, never more than 2.
    assert check_group_log(fates, staleness=2, groups_per_step=GROUPS_PER_STEP, given=given_uids, unfinished=open_groups) == []
    assert sum(fate.fate is Fate.TRAINED for fate in fates) == NUM_STEPS * GROUPS_PER_STEP
