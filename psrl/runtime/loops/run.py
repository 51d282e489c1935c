"""The loops of a run, side by side around one board.

    feed --groups--> agent workers --results--> assemble --ready buffers--> train --pushed weights--> sync --> replicas
      ^                                            |                          |                       |
      +-------------- room on the board -----------+------ new version -------+---- newer replicas ---+

    validate holds the replicas at one version; tend observes replicas, moves groups and applies the proactive filter; end cancels
    groups that are not wanted any more; stall says what the run waits for when nothing comes forward. The fleet tells which replicas
    died and which are back; the supervisor starts them again.

Each loop's docstring says what it consumes, what it waits for and who unblocks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from psrl.config.tree import Config
from psrl.datasets.source import TaskSource
from psrl.runtime.board import Board, Candidate, ReadyBuffer
from psrl.runtime.build import Cluster, group_deadline_s, make_validation
from psrl.runtime.groups import GroupResult
from psrl.runtime.lifetime import unless_stopped
from psrl.runtime.loops.assemble import AssembleLoop
from psrl.runtime.loops.feed import FeedLoop, GroupPlayer
from psrl.runtime.loops.stall import StallLoop
from psrl.runtime.loops.sync import SyncLoop
from psrl.runtime.loops.tend import EndLoop, TendLoop
from psrl.runtime.loops.train import StepMeters, TrainLoop
from psrl.runtime.loops.validate import TrainingReplicas, ValidationLoop, ValidationReplicas
from psrl.runtime.resume_point import Reissue, ResumePoint
from psrl.runtime.run_record import RunRecord
from psrl.runtime.supervision import end_tasks
from psrl.runtime.traffic import TrafficMeter
from psrl.staleness import Coordinator, CoordinatorSettings, StalenessLedger
from psrl.telemetry.names import TimeUse
from psrl.telemetry.spans import TimeShares
from psrl.types import PolicyVersion

MAX_ARRIVALS = 1024
"""Groups that may wait for the assemble loop."""
Save = Callable[[Cluster, ResumePoint], Awaitable[None]]


class RunLoops:
    """Made once the processes are up; `run` returns where the run stands at its end or at a stop."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        source: TaskSource,
        record: RunRecord,
        *,
        player: GroupPlayer,
        point: ResumePoint,
        is_validated: bool,
        save: Save,
        stop: asyncio.Event,
    ) -> None:
        """`player` plays what is trained on; `point` is where the run begins; `is_validated`: its weights were validated before."""
        self._config = config
        self._cluster = cluster
        self._source = source
        self._record = record
        self._first = point
        self._is_validated = is_validated
        self._save = save
        self._stop = stop
        self._step = point.step
        self._board = self._make_board()
        arrivals: asyncio.Queue[GroupResult] = asyncio.Queue(MAX_ARRIVALS)
        self._feed = FeedLoop(
            source=source,
            board=self._board,
            player=player,
            arrivals=arrivals,
            rollout_n=config.psrl.rollout_n,
            redundant_episodes=config.psrl.redundant_episodes,
            run_seed=config.trainer.seed,
            group_deadline_s=group_deadline_s(
                config, config.gen_actor_rollout_ref.rollout.agent, self._max_groups_in_flight * self._episodes_per_group
            ),
            wants_records=record.wants_records,
        )
        self._assemble = AssembleLoop(
            board=self._board,
            arrivals=arrivals,
            data_plane=cluster.data_plane,
            settings=config.psrl,
            filter_groups=config.algorithm.filter_groups,
            groups_per_step=config.data.train_batch_size,
            errors=record.errors,
            report=self._arrived,
            record_fate=record.left_out,
        )
        self._shares = TimeShares()
        self._traffic = TrafficMeter(cluster)
        self._make_loops_of_replicas()
        self._train = self._make_train()

    async def run(self) -> ResumePoint:
        """From the first step to the last, or to a stop between two steps.

        Raises:
            PsrlError: What ended a loop.
        """
        fleet, end = self._cluster.fleet, EndLoop(board=self._board, workers=self._cluster.workers)
        endless = {
            "feed": self._feed.run(),
            "assemble": self._assemble.run(),
            "sync": self._sync.run(),
            "tend": self._tend.run(),
            "end": end.run(),
            "validate": self._validate.run(),
            "stall": self._stall.run(),
            "fleet": fleet.run(on_down=self._board.instance_is_down, on_up=self._board.instance_is_up),
        }
        tasks = {asyncio.create_task(work, name=name) for name, work in endless.items()}
        tasks.add(asyncio.create_task(self._steps(), name="train"))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end_tasks(tasks, self._config.psrl.deadlines.shutdown_s)
        return self.point()

    def point(self) -> ResumePoint:
        """Where a resume goes on; to be taken between two steps."""
        board = self._board
        return ResumePoint(
            step=self._step,
            version=board.version,
            source_state=self._feed.pending_state,
            ledger=board.coordinator.ledger.snapshot(),
            reissue=tuple(Reissue(uid=candidate.group, attempt=candidate.attempt) for candidate in board.in_flight),
            arrived=board.arrived,
            log_lengths=self._record.folder.log_lengths(),
        )

    def _make_loops_of_replicas(self) -> None:
        """Those that look after replicas, groups in flight and validation."""
        config, fleet = self._config, self._cluster.fleet
        self._sync = SyncLoop(
            board=self._board,
            fleet=fleet,
            partial_rollout=config.psrl.partial_rollout,
            activity=self._record.rollout_activity,
            failed=self._record.sync_failed,
        )
        self._tend = TendLoop(
            board=self._board,
            fleet=fleet,
            workers=self._cluster.workers,
            num_restarts=lambda: sum(actor.num_restarts for actor in self._cluster.kept),
        )
        self._validate = ValidationLoop(
            replicas=ValidationReplicas(fleet) if fleet.validating else TrainingReplicas(self._board),
            validation=make_validation(config, self._source.validation_tasks(), self._cluster, record=self._record.episode),
            begun=self._record.begin_validation,
            done=self._record.validation,
            # A sync under way, a replica that is started again meanwhile, and the sync that is asked for.
            hold_deadline_s=config.psrl.deadlines.startup_s + 2 * config.psrl.deadlines.weight_sync_s,
        )
        self._stall = StallLoop(
            board=self._board, stall_s=config.psrl.deadlines.stall_s, progress=self._progress, tell=self._record.stalled
        )

    def _make_train(self) -> TrainLoop:
        config = self._config
        return TrainLoop(
            board=self._board,
            data_plane=self._cluster.data_plane,
            workers=self._cluster.train_workers,
            push=lambda version: self._cluster.push_weights(version, config.psrl.deadlines.weight_sync_s),
            after_step=self._after_step,
            shares=self._shares,
            meters=StepMeters(
                take_metrics=(self._assemble.take_metrics, self._sync.take_metrics, self._tend.take_metrics),
                take_standing_s=self._sync.take_standing_s,
            ),
            activity=self._record.activity,
            step_deadline_s=config.psrl.deadlines.train_step_s,
            stop=self._stop,
        )

    async def _steps(self) -> None:
        trainer, first = self._config.trainer, self._first
        if not self._is_validated and self._wants_validation(first.step):
            await unless_stopped(self._validate.begin(first.step, first.version), self._stop)
        await self._train.run(first_step=self._first.step + 1, last_step=trainer.total_training_steps)
        await unless_stopped(self._validate.finish(), self._stop)

    async def _after_step(self, step: int, ready: ReadyBuffer, metrics: dict[str, float]) -> None:
        trainer = self._config.trainer
        self._step = step
        self._record.step(metrics | await self._traffic.take(), step)
        self._record.trained(ready, step)
        is_to_be_saved = trainer.save_freq > 0 and step % trainer.save_freq == 0
        with self._shares.span(TimeUse.VALIDATION):
            if self._wants_validation(step):
                await unless_stopped(self._validate.begin(step, PolicyVersion(ready.consumed.version + 1)), self._stop)
            elif is_to_be_saved:
                # A checkpoint holds no older weights, so after a resume nobody could make their validation again.
                await unless_stopped(self._validate.finish(), self._stop)
        if is_to_be_saved:
            with self._shares.span(TimeUse.SAVING):
                await self._save(self._cluster, self.point())

    def _wants_validation(self, step: int) -> bool:
        trainer = self._config.trainer
        if step == 0:
            return trainer.val_before_train
        return step == trainer.total_training_steps or (trainer.test_freq > 0 and step % trainer.test_freq == 0)

    def _progress(self) -> int:
        """Grows with every group that ends, every step and every validation task: what a run is there for."""
        return self._assemble.num_looked_at + self._step + self._validate.num_done

    def _arrived(self, result: GroupResult) -> None:
        self._record.arrived(result)
        self._record.rollout_activity(f"{self._board.num_in_flight} groups in flight, {len(self._board.arrived)} wait for their update")

    @property
    def _max_groups_in_flight(self) -> int:
        agent = self._config.gen_actor_rollout_ref.rollout.agent
        played_at_once = agent.num_workers * agent.max_concurrent_episodes // self._episodes_per_group
        return self._config.psrl.max_groups_in_flight or max(1, played_at_once)

    @property
    def _episodes_per_group(self) -> int:
        return self._config.psrl.rollout_n + self._config.psrl.redundant_episodes

    def _make_board(self) -> Board:
        config, point = self._config, self._first
        psrl = config.psrl
        last_version = PolicyVersion(point.version + config.trainer.total_training_steps - point.step)
        empty = StalenessLedger(staleness=0, groups_per_buffer=1, version=point.version).snapshot()
        ledger = StalenessLedger.restore(
            point.ledger or empty,
            staleness=psrl.staleness,
            groups_per_buffer=config.data.train_batch_size,
            redundant_groups=psrl.redundant_groups,
            last_version=last_version,
        )
        settings = CoordinatorSettings.of(psrl, max_groups_in_flight=self._max_groups_in_flight, seed=config.trainer.seed)
        board = Board(Coordinator(settings, ledger, num_instances=self._cluster.fleet.num_instances))
        reissues = [Candidate(task=self._source.task_of(one.uid), attempt=one.attempt) for one in point.reissue]
        board.restore(point.arrived, reissues)
        board.published(point.version)
        return board
