"""The engine replicas of a run as instances: loaded, synced, and started again.

Without a gateway each replica is an instance of its own. With one all replicas are instance 0, since SMG chooses among them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Never

from psrl.errors import EngineError
from psrl.runtime.actors.engine_replica import SyncResult
from psrl.runtime.kept_replica import KeptReplica
from psrl.runtime.parameter_server import ParameterServer
from psrl.staleness import InstanceLoad
from psrl.telemetry.flow import Flow
from psrl.types import PolicyVersion

OnDown = Callable[[int], None]
OnUp = Callable[[int, PolicyVersion], None]


class Fleet:
    """The instances. Who plays or routes knows them by index, from 0."""

    def __init__(
        self,
        replicas: Sequence[KeptReplica],
        parameter_server: ParameterServer,
        *,
        validating: Sequence[KeptReplica] = (),
        is_behind_smg: bool,
    ) -> None:
        """`validating` serve validation alone; the coordinator knows nothing of them."""
        self.replicas = tuple(replicas)
        self.validating = tuple(validating)
        self._parameter_server = parameter_server
        self._instances = [self.replicas] if is_behind_smg else [(replica,) for replica in self.replicas]
        self._is_up = [False for _ in self._instances]
        self._on_down: OnDown = lambda instance: None
        self._on_up: OnUp = lambda instance, version: None
        for index, members in enumerate(self._instances):
            for replica in members:
                replica.wanted = lambda members=members: max(member.version for member in members)
                replica.on_change(lambda index=index: self._look_at(index))

    @property
    def all_replicas(self) -> tuple[KeptReplica, ...]:
        """Training's, then those that serve validation alone."""
        return (*self.replicas, *self.validating)

    @property
    def num_instances(self) -> int:
        """1 where there is a gateway, else the number of replicas."""
        return len(self._instances)

    async def sync(self, instance: int, version: PolicyVersion, mode: str) -> SyncResult:
        """Bring all replicas of an instance to `version`; to the newest where the parameter server no longer holds it.

        Args:
            instance: Its index.
            version: One that was pushed.
            mode: What its running requests do: `keep`, `abort` or `wait`.

        Waits for: the replicas' reports. Unblocked by: the replicas, or the deadline.

        Raises:
            EngineError: The instance is down, or went down: `run` tells when it is back, and with which version.
            WeightSyncError: A replica reports another version, fewer tensors or another checksum; the run must stop.
            DeadlineError: It did not end in time.
        """
        server = self._parameter_server
        manifest = server.manifest(version) if server.holds(version) else server.latest
        assert manifest is not None, f"weights {version} were never pushed"
        results = await asyncio.gather(*(replica.sync(manifest, mode) for replica in self._instances[instance]), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EngineError):
                raise result
        done = [result for result in results if not isinstance(result, BaseException)]
        if not done:
            raise EngineError(f"instance {instance} took no weights: {results[0]}")
        return max(done, key=lambda result: result.seconds)

    async def bring_for_validation(self, version: PolicyVersion) -> None:
        """Have the replicas that serve validation alone serve a version.

        Waits for: each of them to be up, then its report; again after one that failed, once it is up again. Unblocked by: the replicas;
        the caller brings the limit.

        Raises:
            WeightSyncError: A replica reports other weights than were pushed.
        """

        async def bring(replica: KeptReplica) -> None:
            while replica.version != version:
                await replica.until_up()
                try:
                    await replica.sync(self._parameter_server.manifest(version), "keep")
                except EngineError:
                    continue  # it is started again

        await asyncio.gather(*(bring(replica) for replica in self.validating))

    def take_brought(self) -> Flow:
        """Weights that came over the network for replicas since the last call."""
        brought = Flow()
        for replica in self.all_replicas:
            brought.join(replica.brought.take())
        return brought

    async def loads(self) -> dict[int, InstanceLoad]:
        """Of the instances that are up and answer; the sum of its replicas' loads, the mean of their cache use."""
        replicas = [(index, replica) for index, members in enumerate(self._instances) for replica in members if replica.is_up]
        loads = await asyncio.gather(*(replica.load() for _, replica in replicas))
        by_instance: dict[int, list[InstanceLoad]] = {}
        for (index, _), load in zip(replicas, loads, strict=True):
            if load is not None:
                by_instance.setdefault(index, []).append(load)
        return {index: joint_load(found) for index, found in by_instance.items()}

    async def run(self, *, on_down: OnDown, on_up: OnUp) -> Never:
        """Tell which instances are up, and then, for ever, which go down and which come up, and with which version.

        Waits for nothing; unblocked by being cancelled at the end of the run. The restarts themselves are the supervisor's.
        """
        self._on_down, self._on_up = on_down, on_up
        for instance, is_up in enumerate(self._is_up):
            if is_up:
                self._tell_up(instance)
        try:
            await asyncio.Event().wait()
            raise AssertionError("unreachable: nobody sets this event")
        finally:
            self._on_down = lambda instance: None
            self._on_up = lambda instance, version: None

    def _look_at(self, instance: int) -> None:
        """Tell of the instance when it went down with its last replica, or came up with its first."""
        up = [replica for replica in self._instances[instance] if replica.is_up]
        was_up, self._is_up[instance] = self._is_up[instance], bool(up)
        if was_up and not up:
            self._on_down(instance)
        elif up and not was_up:
            self._tell_up(instance)

    def _tell_up(self, instance: int) -> None:
        self._on_up(instance, min(replica.version for replica in self._instances[instance] if replica.is_up))


def joint_load(loads: Sequence[InstanceLoad]) -> InstanceLoad:
    """Of an instance of several replicas."""
    return InstanceLoad(
        num_running=sum(load.num_running for load in loads),
        num_waiting=sum(load.num_waiting for load in loads),
        tokens_per_s=sum(load.tokens_per_s for load in loads),
        cache_usage=sum(load.cache_usage for load in loads) / len(loads),
    )
