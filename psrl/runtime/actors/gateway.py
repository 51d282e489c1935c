"""Ray shell of the gateway: SMG and the session router are children of this process."""

from __future__ import annotations

from datetime import datetime

import ray

from psrl.gateway.gateway import Gateway, GatewayAddress, GatewaySettings
from psrl.runtime.actors.pinged import Pinged


@ray.remote(num_cpus=0, max_restarts=0)
class GatewayActor(Pinged):
    """The run's gateway. Its processes die with this one, whatever ends it."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._log = settings.log_folder / "gateway.log"
        self._gateway = Gateway(settings, report=self._write)

    async def start(self, successor_of: GatewayAddress | None = None) -> GatewayAddress:
        """Until sessions can be opened; at the addresses of a gateway that died, if there was one."""
        return await self._gateway.start(successor_of=successor_of)

    async def attach(self, engine_urls: list[str]) -> None:
        """Let engines that are up take turns."""
        await self._gateway.attach(engine_urls)

    async def readdress(self, old: str, new: str) -> None:
        """An engine was started again at another URL."""
        await self._gateway.readdress(old, new)

    async def watch(self) -> None:
        """Never returns; starts SMG again when it ends, and raises when the gateway is lost."""
        await self._gateway.watch()

    async def stop(self) -> None:
        """End both processes."""
        await self._gateway.stop()

    def _write(self, line: str) -> None:
        with open(self._log, "a") as log:
            log.write(f"{datetime.now().isoformat(timespec='seconds')} {line}\n")
