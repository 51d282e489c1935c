"""A policy as an OpenAI API, without a run: engines, SMG and the session router as children of one process. No Ray.

An engine that ends is started again on its port and SMG takes it back; the router's end is the end, since it held the sessions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Never

import aiohttp

from psrl.config.model import ModelConfig
from psrl.config.rollout import RolloutConfig
from psrl.config.rollout_gateway import RolloutGatewayConfig
from psrl.engine_client.prometheus import prometheus_samples
from psrl.errors import GatewayError
from psrl.gateway.gateway import Gateway, GatewayAddress, GatewaySettings
from psrl.processes.child import ChildProcess
from psrl.processes.kept import KeptProcess, RestartLimit
from psrl.runtime.engines import engine_command
from psrl.session_client.client import SessionClient
from psrl.types import EpisodeUid, GroupUid, PolicyVersion, SamplingContract, SessionAddress, SessionLimits, SessionSpec

METRICS_TIMEOUT_S = 5.0
MAX_TURNS = 1_000_000
"""Of the session that is opened for the user: in effect no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """What is served, and where."""

    model: ModelConfig
    rollout: RolloutConfig
    limits: RolloutGatewayConfig
    log_folder: Path
    host: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What the router has done so far."""

    num_sessions: int
    """Open now."""
    num_turns: int
    num_tokens: int
    """Sampled."""
    at_s: float
    """`time.monotonic`."""


class Server:
    """Engines and gateway, from start to stop."""

    def __init__(self, settings: ServeSettings, *, report: Callable[[str], None]) -> None:
        """`report` gets a line for every restart."""
        self._settings = settings
        model, rollout = settings.model, settings.rollout
        self.engines = tuple(self._kept_engine(index, report) for index in range(rollout.num_replicas))
        self._gateway = Gateway(
            GatewaySettings(
                model_path=model.tokenizer_path or model.path,
                tool_format=rollout.multi_turn.format,
                history_thinking=model.history_thinking,
                request_timeout_s=rollout.request_timeout_s,
                startup_timeout_s=rollout.startup_timeout_s,
                limits=settings.limits,
                log_folder=settings.log_folder,
                host=settings.host,
                port=settings.port,
            ),
            report=report,
        )
        self._address: GatewayAddress | None = None

    @property
    def admin_key_file(self) -> Path:
        """Holds the key that opens sessions; only its owner may read it."""
        return self._gateway.admin_key_file

    @property
    def url(self) -> str:
        """Of the session router."""
        assert self._address is not None, "start() comes first"
        return self._address.url

    async def start(self, progress: Callable[[str], None]) -> None:
        """Until sessions can be opened; `progress` hears of each part.

        Raises:
            ProcessDiedError, GatewayError: What did not come up, with its last words; what did still runs until `stop`.
        """

        async def start_engines() -> None:
            await asyncio.gather(*(engine.start() for engine in self.engines))
            progress(f"{len(self.engines)} engine{'s' if len(self.engines) > 1 else ''}")

        async def start_gateway() -> None:
            self._address = await self._gateway.start()
            progress("SMG and session router")

        await asyncio.gather(start_engines(), start_gateway())
        await self._gateway.attach([engine.url for engine in self.engines])

    async def watch(self) -> Never:
        """Keep everything up; never returns.

        Waits for: the end of any part that cannot be mended. Unblocked by: that end, or cancelled.

        Raises:
            ProcessDiedError: Names it, with its last words.
        """
        tasks = [asyncio.create_task(work) for work in (self._gateway.watch(), *(engine.keep() for engine in self.engines))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()

    async def open_session(self, name: str, *, seed: int) -> SessionAddress:
        """A session that may use the whole context."""
        assert self._address is not None, "start() comes first"
        rollout = self._settings.rollout
        spec = SessionSpec(
            uid=EpisodeUid(name),
            group=GroupUid(name),
            admitted_version=PolicyVersion(0),
            is_validation=True,
            contract=SamplingContract(seed=seed, temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k),
            limits=SessionLimits(max_turns=MAX_TURNS, prompt_length=rollout.prompt_length, response_length=rollout.response_length),
        )
        client = SessionClient(self._address.url, admin_key=self._address.admin_key)
        try:
            return await client.open(spec)
        finally:
            await client.aclose()

    async def figures(self) -> Figures:
        """Read from the router's metrics.

        Raises:
            GatewayError: It does not answer.
        """
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=METRICS_TIMEOUT_S)) as http,
                http.get(f"{self.url}/metrics") as answer,
            ):
                samples = prometheus_samples(await answer.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise GatewayError(f"session router {self.url}: {type(error).__name__}: {error}") from error
        counts = {name: int(samples.get(f"psrl_gateway_{name}", 0)) for name in ("sessions_open", "turns_total", "sampled_tokens_total")}
        return Figures(
            num_sessions=counts["sessions_open"],
            num_turns=counts["turns_total"],
            num_tokens=counts["sampled_tokens_total"],
            at_s=time.monotonic(),
        )

    async def stop(self) -> None:
        """End everything; may be called whatever was started. Cancel `watch` first."""
        await self._gateway.stop()
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    def _kept_engine(self, index: int, report: Callable[[str], None]) -> KeptProcess:
        argv = engine_command(self._settings.model, self._settings.rollout)
        log_path = self._settings.log_folder / f"engine-{index}.log"
        return KeptProcess(
            lambda port: ChildProcess(f"engine {index}", argv, log_path=log_path, port=port),
            limit=RestartLimit(),
            startup_timeout_s=self._settings.rollout.startup_timeout_s,
            report=report,
        )
