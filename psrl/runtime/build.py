"""Puts a run together: the only place that sees the whole tree of settings and the real parts.

Actors are made first, all at once; each then does its slow part (imports, model, sandboxes) as `startup.py` says, and the same again
when it has to be started again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ray

from psrl.chat.renderer import HfRenderer, load_renderer
from psrl.config.deployment_checks import instance_sizes
from psrl.config.gateway_checks import starts_gateway
from psrl.config.model_size import read_model_size
from psrl.config.placement import Role
from psrl.config.plan_of_engines import engine_threads
from psrl.config.rollout import AgentConfig, RolloutConfig
from psrl.config.tree import Config
from psrl.data_plane.transfer_queue import TransferQueueDataPlane
from psrl.datasets.source import TaskSource, build_source, build_training_tasks, build_validation_tasks
from psrl.gateway.gateway import GatewaySettings
from psrl.processes.kept import RestartLimit
from psrl.runtime.actors.agent_worker import AgentWorkerActor
from psrl.runtime.actors.engine_replica import EngineReplicaActor
from psrl.runtime.actors.gateway import GatewayActor
from psrl.runtime.actors.parameter_server import ParameterServerActor
from psrl.runtime.actors.train_worker import TrainWorkerActor, TrainWorkerSettings
from psrl.runtime.addresses import Addresses, tell_all
from psrl.runtime.first_prompts import FirstPrompts
from psrl.runtime.fleet import Fleet
from psrl.runtime.groups import AgentWorkerSettings
from psrl.runtime.kept_actor import Died, KeptActor, KeptLimits, Make, Prepare
from psrl.runtime.kept_replica import KeptReplica
from psrl.runtime.loops.validate import Validation
from psrl.runtime.parameter_server import NUM_KEPT, ParameterServer
from psrl.runtime.placement import REPLICAS, Places
from psrl.runtime.worker_pool import WorkerPool
from psrl.sandbox import build_interpreter
from psrl.tools.config import load_tools
from psrl.types import Episode, PolicyVersion, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The processes of a run."""

    train_workers: tuple[ray.actor.ActorHandle, ...]
    workers: WorkerPool
    fleet: Fleet
    gateway: KeptActor | None
    """None where nothing of the run needs sessions."""
    parameter_server: ParameterServer
    data_plane: TransferQueueDataPlane
    endpoints: Addresses
    places: Places

    @property
    def kept(self) -> tuple[KeptActor, ...]:
        """Those that are started again when they die."""
        gateway = () if self.gateway is None else (self.gateway,)
        return (self.parameter_server.actor, *gateway, *self.fleet.all_replicas, *self.workers.workers)

    async def push_weights(self, version: PolicyVersion, deadline_s: float) -> None:
        """Have the trainer's weights published as `version`; see `ParameterServer.push`."""
        await self.parameter_server.push(self.train_workers, version, deadline_s=deadline_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reports:
    """Who is told of what happens to processes."""

    died: Died
    """The process, and why it is started again."""
    note: Callable[[str], None]
    """A line for people."""


def make_cluster(config: Config, log_folder: Path, places: Places, *, with_training: bool = True, reports: Reports) -> Cluster:
    """Ask Ray for every process; none of them has done its slow part yet."""
    num_ranks = config.trainer.num_workers if with_training else 0
    train_workers = tuple(
        TrainWorkerActor.options(name=f"train-worker-{rank}", **places.options(Role.TRAIN_WORKER, rank)).remote(
            settings=train_worker_settings(config, rank, num_ranks, places)
        )
        for rank in range(num_ranks)
    )
    makers, endpoints = _Makers(config, log_folder, places, reports), Addresses()
    parameter_server = makers.parameter_server(train_workers)
    rollout, deadlines = config.gen_actor_rollout_ref.rollout, config.psrl.deadlines
    replicas, validating = (
        [makers.replica(role, index, parameter_server, endpoints) for index in range(places.count(role))] for role in REPLICAS
    )
    is_behind_smg = starts_gateway(config)
    data_plane = TransferQueueDataPlane(deadline_s=deadlines.data_plane_s, startup_deadline_s=deadlines.startup_s)
    gateway = makers.gateway(replicas, endpoints) if is_behind_smg else None
    workers = [makers.agent_worker(index, endpoints) for index in range(rollout.agent.num_workers)]
    endpoints.on_move.append(tell_all([*workers, *([gateway] if gateway is not None else [])]))
    return Cluster(
        train_workers=train_workers,
        workers=WorkerPool(
            workers,
            data_plane=data_plane,
            max_resends=config.psrl.max_episode_retries + 1,
            is_near=is_near(places, is_behind_smg=is_behind_smg),
            note=reports.note,
        ),
        fleet=Fleet(replicas, parameter_server, validating=validating, is_behind_smg=is_behind_smg),
        gateway=gateway,
        parameter_server=parameter_server,
        data_plane=data_plane,
        endpoints=endpoints,
        places=places,
    )


class _Makers:
    """How each kind of process that may be started again is made, and what it needs before it works."""

    def __init__(self, config: Config, log_folder: Path, places: Places, reports: Reports) -> None:
        self._config = config
        self._places = places
        self._log_folder = log_folder
        self._limits = KeptLimits(
            restarts=RestartLimit(max_restarts=config.psrl.restarts.max_restarts, window_s=config.psrl.restarts.window_s),
            startup_s=config.psrl.deadlines.startup_s,
            silent_after_s=config.psrl.deadlines.stall_s,
        )
        self._reports = reports

    def parameter_server(self, train_workers: Sequence[ray.actor.ActorHandle]) -> ParameterServer:
        """A new one gets the versions that the first train worker still has."""

        async def prepare(handle: ray.actor.ActorHandle) -> None:
            if train_workers:
                await train_workers[0].republish.remote(handle)

        def make() -> ray.actor.ActorHandle:
            options = self._places.options(Role.PARAMETER_SERVER, 0)
            return ParameterServerActor.options(**options).remote(num_kept=NUM_KEPT, lease_s=self._config.psrl.deadlines.weight_sync_s)

        return ParameterServer(self._kept("parameter server", make, prepare))

    def replica(self, role: Role, index: int, parameter_server: ParameterServer, endpoints: Addresses) -> KeptReplica:
        """Of training or of validation. A new one listens where the old one did, unless that node is lost."""
        model, rollout = self._config.train_actor_rollout_ref.model, rollout_of(self._config, role, index, self._places)
        log_folder, sync_s = self._log_folder, self._config.psrl.deadlines.weight_sync_s
        drain_s = 0.0 if self._config.psrl.partial_rollout.enable else rollout.request_timeout_s  # running turns end first

        def make(port: int) -> ray.actor.ActorHandle:
            is_elsewhere = self._settle(role, index)
            return EngineReplicaActor.options(**self._places.options(role, index)).remote(
                index=index if role is Role.REPLICA else self._places.count(Role.REPLICA) + index,
                model=model,
                rollout=rollout,
                log_folder=log_folder,
                weight_sync_s=sync_s,
                host=self._places.host(role, index),
                port=0 if is_elsewhere else port,
                followers=self._places.followers(role, index),
            )

        return KeptReplica(
            f"{role.value} {index}",
            make,
            moved=endpoints.move,
            parameter_server=parameter_server,
            sync_s=sync_s + drain_s,
            stuck_after_s=rollout.request_timeout_s,
            num_nodes=self._places.num_nodes(role, index),
            limits=self._limits,
            died=self._reports.died,
            note=self._reports.note,
        )

    def agent_worker(self, index: int, endpoints: Addresses) -> KeptActor:
        """A new one first removes what the old one left: sandboxes are labelled with their worker's process."""
        settings = agent_worker_settings(self._config)

        async def prepare(handle: ray.actor.ActorHandle) -> None:
            await handle.start.remote()
            known = endpoints.get()
            await handle.connect.remote(known)
            if endpoints.get() is not known:  # an engine moved meanwhile, of which nobody told one that was not connected
                await handle.connect.remote(endpoints.get())

        def make() -> ray.actor.ActorHandle:
            self._settle(Role.AGENT_WORKER, index)
            return AgentWorkerActor.options(**self._places.options(Role.AGENT_WORKER, index)).remote(settings)

        return self._kept(f"agent worker {index}", make, prepare)

    def gateway(self, replicas: Sequence[KeptReplica], endpoints: Addresses) -> KeptActor:
        """A new one has the old one's addresses and key; sessions are lost, and their episodes played again."""
        settings = gateway_settings(self._config, self._log_folder, host=self._places.host(Role.GATEWAY, 0))

        async def prepare(handle: ray.actor.ActorHandle) -> None:
            await handle.start.remote(successor_of=endpoints.get().gateway)
            await handle.attach.remote([replica.url for replica in replicas])

        options = self._places.options(Role.GATEWAY, 0)
        return self._kept("gateway", lambda: GatewayActor.options(**options).remote(settings), prepare, has_watch=True)

    def _settle(self, role: Role, index: int) -> bool:
        """Whether what is started again goes to another node, because its own is lost."""
        is_elsewhere = self._places.settle(role, index)
        if is_elsewhere:
            self._reports.note(f"{role.value} {index} goes to {' and '.join(self._places.addresses(role, index))}: its node is lost")
        return is_elsewhere

    def _kept(self, name: str, make: Make, prepare: Prepare, *, has_watch: bool = False) -> KeptActor:
        return KeptActor(
            name, make, prepare=prepare, has_watch=has_watch, limits=self._limits, died=self._reports.died, note=self._reports.note
        )


def is_near(places: Places, *, is_behind_smg: bool) -> Callable[[int, int, bool], bool]:
    """Whether an agent worker lies on the node of an instance; behind SMG, which chooses by itself, none is nearer than another."""

    def near(worker: int, instance: int, is_validation: bool) -> bool:
        role = Role.VALIDATION_REPLICA if is_validation and places.count(Role.VALIDATION_REPLICA) else Role.REPLICA
        return is_behind_smg or places.address(Role.AGENT_WORKER, worker) == places.address(role, instance)

    return near


def rollout_of(config: Config, role: Role, index: int, places: Places) -> RolloutConfig:
    """The settings of one replica: its device, its share of its node's cores, its tensor parallel size."""
    rollout = config.gen_actor_rollout_ref.rollout
    num_workers = instance_sizes(config)[index if role is Role.REPLICA else 0]
    share = max(1, places.threads(role, index) // (num_workers // places.num_nodes(role, index)))
    inner = rollout.pipeline_model_parallel_size * rollout.data_parallel_size
    return replace(
        rollout,
        device=places.device(role, index),
        num_threads=engine_threads(rollout, read_model_size(config.train_actor_rollout_ref.model.path), share),
        tensor_model_parallel_size=num_workers // inner,
    )


def train_worker_settings(config: Config, rank: int, num_ranks: int, places: Places) -> TrainWorkerSettings:
    """The sections that one training rank reads."""
    actor = config.train_actor_rollout_ref.actor
    return TrainWorkerSettings(
        model=config.train_actor_rollout_ref.model,
        actor=replace(actor, num_threads=actor.num_threads or places.threads(Role.TRAIN_WORKER, rank)),
        ref=config.train_actor_rollout_ref.ref,
        algorithm=config.algorithm,
        critic=config.critic,
        critic_warmup=config.trainer.critic_warmup,
        total_steps=config.trainer.total_training_steps,
        seed=config.trainer.seed,
        device=places.device(Role.TRAIN_WORKER, rank),
        rank=rank,
        world_size=num_ranks,
        collective_timeout_s=config.psrl.deadlines.train_step_s,
        data_plane_deadline_s=config.psrl.deadlines.data_plane_s,
        startup_deadline_s=config.psrl.deadlines.startup_s,
        ps_mode=config.psrl.ps_mode,
        export_dtype=config.trainer.export_dtype,
        import_folder=config.import_folder,
    )


def agent_worker_settings(config: Config) -> AgentWorkerSettings:
    """The sections that agent workers read."""
    return AgentWorkerSettings(
        model=config.train_actor_rollout_ref.model,
        gen_rollout=config.gen_actor_rollout_ref.rollout,
        val_rollout=config.train_actor_rollout_ref.rollout,
        reward=config.reward,
        custom_reward_function=config.custom_reward_function,
        sandbox=config.sandbox,
        rollout_gateway=config.psrl.rollout_gateway,
        max_episode_retries=config.psrl.max_episode_retries,
        data_plane_deadline_s=config.psrl.deadlines.data_plane_s,
        startup_deadline_s=config.psrl.deadlines.startup_s,
        import_folder=config.import_folder,
    )


def gateway_settings(config: Config, log_folder: Path, *, host: str) -> GatewaySettings:
    """What SMG and the session router read."""
    model, rollout = config.train_actor_rollout_ref.model, config.gen_actor_rollout_ref.rollout
    return GatewaySettings(
        model_path=model.tokenizer_path or model.path,
        tool_format=rollout.multi_turn.format,
        history_thinking=model.history_thinking,
        request_timeout_s=rollout.request_timeout_s,
        startup_timeout_s=rollout.startup_timeout_s,
        limits=config.psrl.rollout_gateway,
        log_folder=log_folder,
        host=host,
    )


def make_validation(
    config: Config,
    tasks: Sequence[Task],
    cluster: Cluster,
    *,
    record: Callable[[Episode, int], None],
    keeps_all: bool = False,
    progress: Callable[[int, int], None] = lambda num_done, num_tasks: None,
) -> Validation:
    """Validation as configured; `record` sees the episodes that are kept, with `keeps_all` those of every task."""
    rollout = config.train_actor_rollout_ref.rollout
    per_task = rollout.n + config.trainer.val_greedy
    played_at_once = rollout.agent.num_workers * rollout.agent.max_concurrent_episodes
    max_groups_in_flight = min(len(tasks), -(-played_at_once // per_task))
    return Validation(
        tasks=tasks,
        workers=cluster.workers,
        num_sampled=rollout.n,
        is_greedy_too=config.trainer.val_greedy,
        run_seed=config.trainer.seed,
        group_deadline_s=group_deadline_s(config, rollout.agent, max_groups_in_flight * per_task),
        max_groups_in_flight=max(1, max_groups_in_flight),
        num_records=len(tasks) if keeps_all else config.trainer.trajectories_per_step or len(tasks),
        record=record,
        progress=progress,
    )


def group_deadline_s(config: Config, agent: AgentConfig, num_episodes: int) -> float:
    """Seconds for a group that is one of those in flight, `num_episodes` in all.

    One worker may have to play all of them, after the others died, and every wave of what it plays at once may use its whole time-out.
    """
    num_waves = -(-num_episodes // agent.max_concurrent_episodes) + 1
    return num_waves * (config.psrl.max_episode_retries + 1) * (agent.episode_timeout_s + agent.step_timeout_s)


def run_renderer(config: Config) -> HfRenderer:
    """The tokenizer and template of the run, as agent workers load them too."""
    model = config.train_actor_rollout_ref.model
    return load_renderer(
        model.tokenizer_path or model.path,
        tool_format=config.gen_actor_rollout_ref.rollout.multi_turn.format,
        history_thinking=model.history_thinking,
    )


def load_tasks(config: Config, renderer: HfRenderer) -> TaskSource:
    """Rows or generated tasks, with their prompts measured by the run's own tokenizer, the tools' schemas included.

    Raises:
        ConfigError, RowError: Files, rows, tools or prompt lengths are not as configured.
    """
    return build_source(config.data, prompt_tokens=_first_prompts(config, renderer).num_tokens)


def load_validation_tasks(config: Config, renderer: HfRenderer) -> list[Task]:
    """The validation tasks alone, measured in the same way; what is trained on need not be there.

    Raises:
        ConfigError, RowError: See `load_tasks`; or there is none.
    """
    return build_validation_tasks(config.data, prompt_tokens=_first_prompts(config, renderer).num_tokens)


def load_training_tasks(config: Config, renderer: HfRenderer) -> list[Task]:
    """The training tasks alone, each once in the order of the files.

    Raises:
        ConfigError, RowError: See `load_tasks`; or there is none.
    """
    return build_training_tasks(config.data, prompt_tokens=_first_prompts(config, renderer).num_tokens)


def _first_prompts(config: Config, renderer: HfRenderer) -> FirstPrompts:
    tool_path = config.gen_actor_rollout_ref.rollout.multi_turn.tool_config_path
    tools = load_tools(tool_path, program_runner=build_interpreter(config.sandbox)) if tool_path else []
    return FirstPrompts(config, renderer, [tool.schema for tool in tools])
