"""The further nodes of an engine replica that spans several, for the process on its first node.

Invariant: a follower belongs to one start of one replica. Its actor is made for it, owned by the process that makes it, and so ends with
that process, however that ends. What of an instance is lost makes the whole of it lost.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from psrl.config.model import ModelConfig
from psrl.config.rollout import RolloutConfig
from psrl.errors import EngineError, ProcessDiedError, PsrlError
from psrl.processes.child import free_port
from psrl.protocols import WeightManifest
from psrl.runtime.actors.engine_follower import EngineFollowerActor
from psrl.runtime.engines import NodeOfInstance
from psrl.runtime.placement import FollowerPlace
from psrl.runtime.supervision import end_of, first_done, look_of
from psrl.telemetry.flow import Flow

STOP_S = 15.0
"""For one to end its process; then its actor's end ends it."""


class Followers:
    """Those of one replica. Of one that lies on one node there are none, and everything here does nothing."""

    def __init__(
        self, replica: str, places: Sequence[FollowerPlace], *, model: ModelConfig, rollout: RolloutConfig, log_path: Path
    ) -> None:
        """Make them; nothing is started. `log_path` is the replica's own."""
        self._hosts = [place.host for place in places]
        self._names = [f"{replica}'s follower on {host}" for host in self._hosts]
        self._startup_s = rollout.startup_timeout_s
        self._actors = [
            EngineFollowerActor.options(**place.options).remote(
                name, model=model, rollout=rollout, log_path=log_path.with_stem(f"{log_path.stem}-node-{rank}")
            )
            for rank, (name, place) in enumerate(zip(self._names, places, strict=True), start=1)
        ]

    def nodes(self, host: str) -> list[NodeOfInstance | None]:
        """The instance's nodes for the start that is ahead, this one, at `host`, first. They meet at a port that is free here now."""
        if not self._actors:
            return [None]
        port, hosts = free_port(host), [host, *self._hosts]
        return [
            NodeOfInstance(num_nodes=len(hosts), rank=rank, address=address, meeting_address=host, meeting_port=port)
            for rank, address in enumerate(hosts)
        ]

    def starts(self, nodes: Sequence[NodeOfInstance | None]) -> list[Coroutine[Any, Any, None]]:
        """Each ends when all nodes of the instance have met, or raises ProcessDiedError or DeadlineError."""
        return [
            look_of(f"start of {name}", actor.start.remote(node), self._startup_s)
            for name, actor, node in zip(self._names, self._actors, nodes[1:], strict=True)
        ]

    async def bring(self, manifest: WeightManifest, writer: str) -> list[tuple[WeightManifest, Flow]]:
        """A version to each of their nodes, and what came over the network for it; see `NodeWeights.local`.

        Raises:
            EngineError: One of them died.
        """
        bringing = [actor.bring.remote(manifest, writer) for actor in self._actors]
        try:
            return [await look_of(name, one, None) for name, one in zip(self._names, bringing, strict=True)]
        except ProcessDiedError as error:
            raise EngineError(str(error)) from error

    def losses(self) -> list[Coroutine[Any, Any, str]]:
        """Each ends, with the cause, when the follower or its process ended or answers nothing."""
        return [first_done((_lost(name, actor), _silent(name, actor))) for name, actor in zip(self._names, self._actors, strict=True)]

    async def stop(self) -> None:
        """End their processes."""
        for name, stopping in [(name, actor.stop.remote()) for name, actor in zip(self._names, self._actors, strict=True)]:
            await look_of(f"stop of {name}", stopping, STOP_S)


def with_followers(manifest: WeightManifest, others: Sequence[WeightManifest]) -> WeightManifest:
    """The version as this node finds it, with the places at which the followers do."""
    return replace(manifest, follower_locations=tuple(one.location for one in others))


async def _lost(name: str, actor: ray.actor.ActorHandle) -> str:
    try:
        await look_of(name, actor.watch.remote(), None)
    except PsrlError as error:
        return str(error)
    raise AssertionError(f"watch() of {name} returns only by raising")


async def _silent(name: str, actor: ray.actor.ActorHandle) -> str:
    return f"{name}: {await end_of(actor)}"
