"""What a simulated run has: replicas, agent workers, batch, and the settings of `psrl`."""

from __future__ import annotations

from dataclasses import dataclass

from psrl.config.gateway_checks import starts_gateway
from psrl.config.psrl_section import PsrlConfig
from psrl.config.tree import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedCluster:
    """The numbers of a run that decide how fast it goes."""

    psrl: PsrlConfig
    groups_per_buffer: int
    """`data.train_batch_size`."""
    num_instances: int
    slots_per_instance: int
    replicas_per_instance: int = 1
    """More than one behind a gateway."""
    num_workers: int
    episodes_per_worker: int
    """`agent.max_concurrent_episodes`."""
    episode_timeout_s: float
    request_timeout_s: float = float("inf")
    """`rollout.request_timeout_s`."""
    drops_equal_rewards: bool = False
    """`algorithm.filter_groups.enable`."""
    seed: int = 1

    @classmethod
    def of(cls, config: Config) -> SimulatedCluster:
        """What `psrl train` would start with these settings. Behind a gateway all replicas are one instance."""
        rollout = config.gen_actor_rollout_ref.rollout
        num_instances = 1 if starts_gateway(config) else rollout.num_replicas
        return cls(
            psrl=config.psrl,
            groups_per_buffer=config.data.train_batch_size,
            num_instances=num_instances,
            slots_per_instance=rollout.max_num_seqs * rollout.num_replicas // num_instances,
            replicas_per_instance=rollout.num_replicas // num_instances,
            num_workers=rollout.agent.num_workers,
            episodes_per_worker=rollout.agent.max_concurrent_episodes,
            episode_timeout_s=rollout.agent.episode_timeout_s,
            request_timeout_s=rollout.request_timeout_s,
            drops_equal_rewards=config.algorithm.filter_groups.enable,
            seed=config.trainer.seed,
        )

    @property
    def num_slots(self) -> int:
        """Turns that all instances sample at once."""
        return self.num_instances * self.slots_per_instance

    @property
    def num_replicas(self) -> int:
        """Of all instances."""
        return self.num_instances * self.replicas_per_instance

    @property
    def slots_per_replica(self) -> int:
        """Turns that a replica samples at once."""
        return self.slots_per_instance // self.replicas_per_instance

    @property
    def num_places(self) -> int:
        """Episodes that all agent workers play at once."""
        return self.num_workers * self.episodes_per_worker

    @property
    def episodes_per_group(self) -> int:
        """Redundant ones included."""
        return self.psrl.rollout_n + self.psrl.redundant_episodes

    @property
    def max_groups_in_flight(self) -> int:
        """Groups generated at once."""
        return self.psrl.max_groups_in_flight or max(1, self.num_places // self.episodes_per_group)
