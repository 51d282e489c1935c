"""The gateway of a run: SMG in front of the engines, the session router in front of SMG. Two child processes, one object.

SMG holds nothing that cannot be made again, so it is started again when it ends. The router holds the sessions' tokens: when it ends,
they are lost, and the gateway with them; a new one may take its addresses and its key, so that nobody need be told.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Never

from psrl.config.rollout_gateway import RolloutGatewayConfig
from psrl.errors import ProcessDiedError
from psrl.gateway.smg import Smg
from psrl.processes.child import PORT_WAIT_S, ChildProcess
from psrl.processes.kept import RestartLimit


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySettings:
    """What the gateway is made of."""

    model_path: str
    """Folder with the tokenizer and its chat template."""
    tool_format: str
    history_thinking: str
    request_timeout_s: float
    startup_timeout_s: float
    limits: RolloutGatewayConfig
    log_folder: Path
    host: str = "127.0.0.1"
    """Of router and SMG."""
    port: int = 0
    """Of the router; 0 takes a free one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayAddress:
    """How a run reaches its gateway."""

    url: str
    """Of the session router."""
    admin_key: str
    """Opens sessions."""
    smg_url: str
    """Takes token ids, as an engine does."""


class Gateway:
    """SMG and the session router, from start to stop."""

    def __init__(self, settings: GatewaySettings, *, report: Callable[[str], None] = lambda _: None) -> None:
        """`report` gets a line for every restart of SMG."""
        self._settings = settings
        limit = RestartLimit(max_restarts=settings.limits.max_restarts, window_s=settings.limits.restart_window_s)
        self.smg = Smg(settings.log_folder / "smg.log", limit=limit, host=settings.host, report=report)
        self.admin_key_file = settings.log_folder / "gateway-admin.key"
        self._router: ChildProcess | None = None

    async def start(self, *, successor_of: GatewayAddress | None = None) -> GatewayAddress:
        """Until sessions can be opened; their turns wait for `attach`, so that engines may start meanwhile.

        `successor_of` is the address of a gateway that died: this one takes its place.

        Raises:
            ProcessDiedError, GatewayError: SMG or the router did not come up; with its last words.
        """
        admin_key = successor_of.admin_key if successor_of else secrets.token_urlsafe(32)
        self.admin_key_file.parent.mkdir(parents=True, exist_ok=True)
        self.admin_key_file.touch(mode=0o600)
        self.admin_key_file.write_text(admin_key)
        await self.smg.start([], port=_port_of(successor_of.smg_url) if successor_of else 0)
        self._router = ChildProcess(
            "session router",
            self._router_command(),
            log_path=self._settings.log_folder / "session-router.log",
            host=self._settings.host,
            port=_port_of(successor_of.url) if successor_of else self._settings.port,
            port_wait_s=PORT_WAIT_S if successor_of else 0.0,
        )
        await self._router.start(self._settings.startup_timeout_s)
        return GatewayAddress(url=self._router.url, admin_key=admin_key, smg_url=self.smg.url)

    async def attach(self, engine_urls: Sequence[str]) -> None:
        """Let engines that are up take turns.

        Raises:
            GatewayError: SMG does not take one in time.
        """
        await asyncio.gather(*(self.smg.add_worker(url) for url in engine_urls))

    async def readdress(self, old: str, new: str) -> None:
        """An engine was started again at another URL: its sessions go on there.

        Raises:
            GatewayError: SMG does not take it in time, or does not let the old one go.
        """
        await self.smg.add_worker(new)
        await self.smg.remove_worker(old)

    async def watch(self) -> Never:
        """Keep SMG up; never returns.

        Waits for: the end of SMG or of the router, or their silence. Unblocked by: these, or cancelled.

        Raises:
            ProcessDiedError: The router ended, or SMG too often; with its last words.
        """
        assert self._router is not None, "start() comes first"
        keeping, ending = asyncio.create_task(self.smg.keep()), asyncio.create_task(self._router.lost())
        try:
            await asyncio.wait({keeping, ending}, return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()
            raise ProcessDiedError(ending.result())
        finally:
            keeping.cancel()
            ending.cancel()

    async def stop(self) -> None:
        """End both; may be called twice, and without a start. Cancel `watch` first."""
        if self._router is not None:
            await asyncio.to_thread(self._router.stop)
        await self.smg.stop()

    def _router_command(self) -> list[str]:
        settings = self._settings
        return [
            *(sys.executable, "-m", "psrl.gateway"),
            *("--model-path", settings.model_path),
            *("--tool-format", settings.tool_format),
            *("--history-thinking", settings.history_thinking),
            *("--engine-url", self.smg.url),
            *("--admin-key-file", str(self.admin_key_file)),
            *("--request-timeout-s", str(settings.request_timeout_s)),
            *("--retry-for-s", str(settings.limits.retry_for_s)),
            *("--max-sessions", str(settings.limits.max_sessions)),
            *("--session-idle-timeout-s", str(settings.limits.session_idle_timeout_s)),
        ]


def _port_of(url: str) -> int:
    return int(url.rpartition(":")[2])
