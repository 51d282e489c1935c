"""Ray: started on this machine or joined, and left again.

Logical CPUs are counted, not bound: what each process may really use is its thread setting. A local start therefore announces as
many as the plan needs, so that no actor waits without a word for a CPU that does not exist.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import ray

from psrl.config.tree import Config
from psrl.errors import ConfigError, ProcessDiedError

OBJECT_STORE_BYTES = 400 * 2**20
"""Room for a few versions of small weights; a local start raises it by `extra_object_store_bytes`."""

CHILD_ENVIRONMENT = {
    # Threads that wait must sleep: trainer and engine share cores and take turns.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    # Nothing is fetched at run time: models and tokenizers are folders.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # TransferQueue warns at every call when it has more threads than cores.
    "TQ_NUM_THREADS": "1",
    "TQ_CLIENT_ZMQ_IO_THREADS": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_usage_stats_enabled": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LogicalCpus:
    """Logical CPUs that the actors of a run ask Ray for, one each."""

    train_workers: int
    replicas: int
    agent_workers: int
    storage_units: int

    @staticmethod
    def of(config: Config) -> LogicalCpus:
        """Count the processes of a run."""
        return LogicalCpus(
            train_workers=config.trainer.num_workers,
            replicas=config.gen_actor_rollout_ref.rollout.num_replicas,
            agent_workers=config.gen_actor_rollout_ref.rollout.agent.num_workers,
            storage_units=config.transfer_queue.num_data_storage_units,
        )

    @property
    def total(self) -> int:
        """With the parameter server and TransferQueue's controller."""
        return self.train_workers + self.replicas + self.agent_workers + self.storage_units + 2


def start_ray(config: Config, *, extra_object_store_bytes: int) -> None:
    """Start or join Ray and check that the run's actors fit.

    Raises:
        ConfigError: `psrl.ray_address=auto` and no cluster runs, or the cluster has too few CPUs.
        ProcessDiedError: Ray did not start.
    """
    os.environ.update(CHILD_ENVIRONMENT)
    needed = LogicalCpus.of(config).total
    if config.psrl.ray_address != "local":
        _join(config.psrl.ray_address, needed)
        return
    try:
        ray.init(
            address="local",
            num_cpus=needed,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES + extra_object_store_bytes,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # noqa: BLE001 - Ray raises plain Exception when one of its processes does not come up
        raise ProcessDiedError(f"Ray did not start on this machine: {error}") from error


def _join(address: str, needed: int) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env={"env_vars": CHILD_ENVIRONMENT})
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


def stop_ray() -> None:
    """Leave Ray; a local one ends with all its processes."""
    ray.shutdown()
