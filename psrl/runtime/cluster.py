"""Ray: started on this machine or joined, and left again.

Logical CPUs are counted, not bound: what each process may really use is its thread setting. A local start therefore announces as
many as the plan needs, so that no actor waits without a word for a CPU that does not exist.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import ray

from psrl.config.tree import Config
from psrl.errors import ConfigError, ProcessDiedError
from psrl.runtime import PROCESS_ENVIRONMENT

OBJECT_STORE_BYTES = 400 * 2**20
"""For what calls carry: groups with their episodes. Weights and rows travel beside it."""
NEEDED_OF_RAY = ("gcs_server", "raylet")
LOOK_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class LogicalCpus:
    """Logical CPUs that the actors of a run ask Ray for, one each."""

    train_workers: int
    replicas: int
    agent_workers: int
    storage_units: int

    @staticmethod
    def of(config: Config, *, with_training: bool) -> LogicalCpus:
        """Count the processes of a run."""
        return LogicalCpus(
            train_workers=config.trainer.num_workers if with_training else 0,
            replicas=config.gen_actor_rollout_ref.rollout.num_replicas,
            agent_workers=config.gen_actor_rollout_ref.rollout.agent.num_workers,
            storage_units=config.transfer_queue.num_data_storage_units,
        )

    @property
    def total(self) -> int:
        """With the parameter server and TransferQueue's controller."""
        return self.train_workers + self.replicas + self.agent_workers + self.storage_units + 2


class RayProcesses:
    """The processes of Ray itself on this machine. All others of the run need them, and end with them."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._processes = {process: process.name() for process in processes}

    def dead(self) -> str | None:
        """What to say of one that ended; None while all live."""
        for process, name in self._processes.items():
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return f"its process {name} (pid {process.pid}) ended"
        return None

    async def ended(self) -> str:
        """Why Ray cannot be used any more. Waits for: the end of one of its processes, looked at twice a second. Never returns before."""
        while (words := self.dead()) is None:  # noqa: ASYNC110 - a process that is not ours has no event to wait for
            await asyncio.sleep(LOOK_S)
        return words


@contextmanager
def ray_of(config: Config, *, with_training: bool = True) -> Iterator[RayProcesses]:
    """Ray while the body runs; a local one ends after it with all its processes.

    Must be entered by the main thread: the kernel ends Ray's processes when the thread that started them ends.

    Raises:
        ConfigError: `psrl.ray_address=auto` and no cluster runs, or the cluster has too few CPUs.
        ProcessDiedError: Ray did not start.
    """
    _start_or_join(config, LogicalCpus.of(config, with_training=with_training).total)
    try:
        yield RayProcesses(_processes_of_ray(config))
    finally:
        ray.shutdown()


def _processes_of_ray(config: Config) -> list[psutil.Process]:
    """Those that this process started, or, in a cluster that it joined, the raylets of its user on this machine."""
    if config.psrl.ray_address == "local":
        return [child for child in psutil.Process().children() if child.name() in NEEDED_OF_RAY]
    ours = os.getuid()
    return [
        process
        for process in psutil.process_iter(["name", "uids"])
        if process.info["name"] == "raylet" and process.info["uids"].real == ours
    ]


def _start_or_join(config: Config, needed: int) -> None:
    if config.psrl.ray_address != "local":
        _join(config.psrl.ray_address, needed)
        return
    try:
        ray.init(
            address="local",
            num_cpus=needed,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        raise ProcessDiedError(f"Ray did not start on this machine: {error}") from error


def _join(address: str, needed: int) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env={"env_vars": PROCESS_ENVIRONMENT})
    except ConnectionError as error:
        raise ConfigError(
            key="psrl.ray_address",
            value=address,
            rule=f"no Ray cluster answers ({error})",
            fix="start one with `ray start --head`, or set local",
        ) from error
    available = int(ray.cluster_resources()["CPU"])
    if available < needed:
        raise ConfigError(
            key="psrl.ray_address",
            value=address,
            rule=f"the cluster has {available} CPUs and the run's processes need {needed}",
            fix="add nodes, or lower num_workers and num_replicas",
        )
