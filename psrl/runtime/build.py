"""Puts a run together: the only place that sees the whole tree of settings and the real parts.

Start-up is a checklist with limits. Actors are made first, all at once; each then does its slow part (imports, model, sandboxes)
while TransferQueue starts in the driver, and what needs another part's address comes last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from psrl.chat.renderer import HfRenderer, load_renderer
from psrl.config.gateway_checks import starts_gateway
from psrl.config.rollout import AgentConfig
from psrl.config.tree import Config
from psrl.data_plane.transfer_queue import TransferQueueDataPlane
from psrl.datasets.source import TaskSource, build_source, build_validation_tasks
from psrl.gateway.gateway import GatewaySettings
from psrl.runtime.actors.agent_worker import AgentWorkerActor
from psrl.runtime.actors.engine_replica import EngineReplicaActor
from psrl.runtime.actors.gateway import GatewayActor
from psrl.runtime.actors.parameter_server import ParameterServerActor
from psrl.runtime.actors.train_worker import TrainWorkerActor, TrainWorkerSettings
from psrl.runtime.first_prompts import FirstPrompts
from psrl.runtime.groups import AgentWorkerSettings, Endpoints
from psrl.runtime.loops.validate import Validation
from psrl.runtime.supervision import Supervisor, answer_of
from psrl.sandbox import build_interpreter
from psrl.tools.config import load_tools
from psrl.types import Episode, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The live processes of a run."""

    train_workers: tuple[ray.actor.ActorHandle, ...]
    replicas: tuple[ray.actor.ActorHandle, ...]
    agent_workers: tuple[ray.actor.ActorHandle, ...]
    gateway: ray.actor.ActorHandle | None
    """None where nothing of the run needs sessions."""
    parameter_server: ray.actor.ActorHandle
    data_plane: TransferQueueDataPlane


def make_cluster(config: Config, log_folder: Path, *, with_training: bool = True) -> Cluster:
    """Ask Ray for every process; none of them has done its slow part yet."""
    rollout = config.gen_actor_rollout_ref.rollout
    model = config.train_actor_rollout_ref.model
    num_ranks = config.trainer.num_workers if with_training else 0
    deadline_s = config.psrl.deadlines.data_plane_s
    return Cluster(
        train_workers=tuple(
            TrainWorkerActor.options(name=f"train-worker-{rank}").remote(
                settings=TrainWorkerSettings(
                    model=model,
                    actor=config.train_actor_rollout_ref.actor,
                    ref=config.train_actor_rollout_ref.ref,
                    algorithm=config.algorithm,
                    total_steps=config.trainer.total_training_steps,
                    seed=config.trainer.seed,
                    device=config.trainer.device,
                    rank=rank,
                    world_size=num_ranks,
                    collective_timeout_s=config.psrl.deadlines.train_step_s,
                    data_plane_deadline_s=deadline_s,
                    startup_deadline_s=config.psrl.deadlines.startup_s,
                    import_folder=config.import_folder,
                ),
            )
            for rank in range(num_ranks)
        ),
        replicas=tuple(
            EngineReplicaActor.options(name=f"engine-{index}").remote(index=index, model=model, rollout=rollout, log_folder=log_folder)
            for index in range(rollout.num_replicas)
        ),
        agent_workers=tuple(
            AgentWorkerActor.options(name=f"agent-worker-{index}").remote(agent_worker_settings(config))
            for index in range(rollout.agent.num_workers)
        ),
        gateway=GatewayActor.options(name="gateway").remote(gateway_settings(config, log_folder)) if starts_gateway(config) else None,
        parameter_server=ParameterServerActor.options(name="parameter-server").remote(num_kept=2),
        data_plane=TransferQueueDataPlane(deadline_s=deadline_s, startup_deadline_s=config.psrl.deadlines.startup_s),
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


def gateway_settings(config: Config, log_folder: Path) -> GatewaySettings:
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
    )


async def start_cluster(cluster: Cluster, config: Config, *, progress: Callable[[str], None]) -> Supervisor:
    """Bring every process up; the supervisor watches them from then on.

    Raises:
        PsrlError: The first part that failed, by name, within `psrl.deadlines.startup_s`.
    """
    limit_s = config.psrl.deadlines.startup_s

    async def step(what: str, *awaitables: object) -> list[Any]:
        results: list[Any] = await answer_of(what, asyncio.gather(*awaitables), limit_s)  # type: ignore[call-overload]
        progress(what)
        return results

    async def train_workers() -> None:
        if cluster.train_workers:
            address = await answer_of("train worker 0", cluster.train_workers[0].rendezvous.remote(), limit_s)
            await step("train workers", *(worker.load.remote(address) for worker in cluster.train_workers))

    async def engines_and_gateway() -> Endpoints:
        engines = step("engines", *(replica.start.remote() for replica in cluster.replicas))
        if cluster.gateway is None:
            return Endpoints(generate_urls=await engines)
        urls, (address,) = await asyncio.gather(engines, step("gateway", cluster.gateway.start.remote()))
        await answer_of("engines joining SMG", cluster.gateway.attach.remote(urls), limit_s)
        return Endpoints(generate_urls=[address.smg_url] if config.psrl.rollout_gateway.enable else urls, gateway=address)

    async with asyncio.TaskGroup() as starts:
        endpoints = starts.create_task(engines_and_gateway())
        starts.create_task(train_workers())
        starts.create_task(step("agent workers", *(worker.start.remote() for worker in cluster.agent_workers)))
        starts.create_task(step("TransferQueue", asyncio.to_thread(cluster.data_plane.start, config.transfer_queue)))
    await step(
        "connections",
        *(worker.connect.remote() for worker in cluster.train_workers),
        *(worker.connect.remote(endpoints.result()) for worker in cluster.agent_workers),
    )
    return _supervise(cluster)


def _supervise(cluster: Cluster) -> Supervisor:
    supervisor = Supervisor()
    for kind, actors in (("train worker", cluster.train_workers), ("agent worker", cluster.agent_workers)):
        for index, actor in enumerate(actors):
            supervisor.watch(f"{kind} {index}", actor.stay.remote())
    for index, replica in enumerate(cluster.replicas):
        supervisor.watch(f"engine replica {index}", replica.watch.remote())
    if cluster.gateway is not None:
        supervisor.watch("gateway", cluster.gateway.watch.remote())
    supervisor.watch("parameter server", cluster.parameter_server.stay.remote())
    return supervisor


def make_validation(
    config: Config,
    tasks: Sequence[Task],
    cluster: Cluster,
    *,
    record: Callable[[Episode], None],
    keeps_all: bool = False,
    progress: Callable[[int, int], None] = lambda num_done, num_tasks: None,
) -> Validation:
    """Validation as configured; `record` sees the episodes that are kept, with `keeps_all` those of every task."""
    rollout = config.train_actor_rollout_ref.rollout
    num_episodes = (rollout.n + config.trainer.val_greedy) * len(tasks)
    return Validation(
        tasks=tasks,
        workers=cluster.agent_workers,
        num_sampled=rollout.n,
        is_greedy_too=config.trainer.val_greedy,
        run_seed=config.trainer.seed,
        group_deadline_s=group_deadline_s(config, rollout.agent, num_episodes),
        num_records=len(tasks) if keeps_all else config.trainer.trajectories_per_step or len(tasks),
        record=record,
        progress=progress,
    )


def group_deadline_s(config: Config, agent: AgentConfig, num_episodes: int) -> float:
    """Seconds for a worker to play `num_episodes` at most: every wave of what it plays at once may use its whole time-out."""
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


def _first_prompts(config: Config, renderer: HfRenderer) -> FirstPrompts:
    tool_path = config.gen_actor_rollout_ref.rollout.multi_turn.tool_config_path
    tools = load_tools(tool_path, program_runner=build_interpreter(config.sandbox)) if tool_path else []
    return FirstPrompts(config, renderer, [tool.schema for tool in tools])
