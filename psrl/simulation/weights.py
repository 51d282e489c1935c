"""Instances taking newer weights: staged while they play, then a pause in the way that `psrl.partial_rollout` asks for.

The keys of turns that a sync interrupts are computed again with the newer weights; the instance decodes nothing meanwhile, and this is
counted into its pause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psrl.config.asynchrony import PartialRolloutConfig
from psrl.simulation.events import EventQueue
from psrl.simulation.instance import Instance
from psrl.simulation.workload import Workload, rng_of
from psrl.types import PolicyVersion


class InstanceSyncs:
    """Syncs under way, at most one per instance."""

    def __init__(
        self,
        events: EventQueue,
        instances: Sequence[Instance],
        *,
        partial_rollout: PartialRolloutConfig,
        workload: Workload,
        seed: int,
        on_synced: Callable[[int, PolicyVersion], None],
    ) -> None:
        """`on_synced(instance, version)` is called when an instance serves a version."""
        self._events = events
        self._instances = instances
        self._partial_rollout = partial_rollout
        self._workload = workload
        self._on_synced = on_synced
        self._seed = seed
        self._under_way: dict[int, object] = {}

    def begin(self, index: int, version: PolicyVersion) -> None:
        """Stage, pause, swap, resume."""
        assert index not in self._under_way, f"instance {index} takes weights already"
        self._under_way[index] = ticket = object()
        sync_s = self._workload.sync.draw(rng_of(self._seed, f"sync {version}"))  # the same weights take all instances as long
        pause_s = min(sync_s, self._workload.pause.draw(rng_of(self._seed, f"pause {version}")))
        instance = self._instances[index]

        def is_still_on() -> bool:
            return self._under_way.get(index) is ticket

        def staged() -> None:
            if not is_still_on():
                return
            if not self._partial_rollout.enable:
                instance.drain(drained)
            else:
                recompute_s = self._workload.recompute_s * instance.num_running / instance.num_replicas
                (instance.pause_and_give_back if self._partial_rollout.interrupt_as_prompt else instance.pause)()
                self._events.after(pause_s + recompute_s, swapped)

        def drained() -> None:
            if is_still_on():
                instance.pause()
                self._events.after(pause_s, swapped)

        def swapped() -> None:
            if is_still_on():
                del self._under_way[index]
                instance.version = version
                instance.resume()
                self._on_synced(index, version)

        self._events.after(sync_s - pause_s, staged)

    def forget(self, index: int) -> None:
        """The instance died."""
        self._under_way.pop(index, None)
