"""SMG in front of the engine replicas: health, sticky sessions, metrics. The released program, as a child that is kept up.

Invariant: a request that went into SMG is generated at most once for it: SMG does not retry, psrl's clients do. The workers of a
new process after a restart are those of the old one.

What a replica's death costs its sessions: errors until `HEALTH_FAILURES` checks have failed; then they move to other replicas, and come
back with it. Those who retry for longer than that do not notice.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

import aiohttp
import orjson

from psrl.engine_client.prometheus import prometheus_samples
from psrl.errors import GatewayError
from psrl.processes.child import PORT_WAIT_S, ChildProcess, free_port
from psrl.processes.kept import KeptProcess, RestartLimit

HEALTH_INTERVAL_S = 1
HEALTH_FAILURES = 2
"""In a row, until a replica's sessions move."""
HEALTH_TIMEOUT_S = 5
"""An engine that computes on all cores may take its time to answer."""
SHUTDOWN_GRACE_S = 2
STARTUP_TIMEOUT_S = 30.0
POLL_S = 0.05
CALL_TIMEOUT_S = 10.0
REMOVAL_TIMEOUT_S = 30.0
"""SMG lets a worker that leaves end its requests first, for five seconds."""
FLAGS = (
    *("--backend", "vllm", "--policy", "manual", "--assignment-mode", "min_group"),
    # A retry inside SMG generates twice and rewrites bodies; its circuit breaker keeps a replica out long after it is back.
    *("--disable-retries", "--disable-circuit-breaker", "--disable-load-monitoring", "--disable-tokenizer-autoload"),
    *("--enable-rl", "--log-level", "warn", "--shutdown-grace-period-secs", str(SHUTDOWN_GRACE_S)),
    *("--health-check-interval-secs", str(HEALTH_INTERVAL_S), "--health-check-timeout-secs", str(HEALTH_TIMEOUT_S)),
    *("--health-failure-threshold", str(HEALTH_FAILURES), "--health-success-threshold", "1"),
    # Deadlines and bounds are the clients': SMG's own would cut a long turn, or answer 429 to more than some thousand at once.
    *("--request-timeout-secs", "86400", "--max-concurrent-requests", "0"),
    *("--worker-startup-check-interval", "1", "--prometheus-host", "127.0.0.1"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SmgWorker:
    """A replica as SMG sees it."""

    id: str
    url: str
    is_healthy: bool


class Smg:
    """SMG, its workers, and its restarts. Its control routes need a key that only this object has."""

    def __init__(
        self, log_path: Path, *, limit: RestartLimit, host: str = "127.0.0.1", report: Callable[[str], None] = lambda _: None
    ) -> None:
        """`report` gets a line for every restart."""
        self._log_path = log_path
        self._host = host
        self._key = secrets.token_urlsafe(32)
        self._metrics_url = ""
        self._worker_urls: list[str] = []
        self._kept = KeptProcess(self._make, limit=limit, startup_timeout_s=STARTUP_TIMEOUT_S, report=report)
        self._http: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """Where `/generate` is; the same after a restart."""
        return self._kept.url

    @property
    def pid(self) -> int:
        """Of the process that serves now."""
        return self._kept.process.pid

    @property
    def num_restarts(self) -> int:
        """So far."""
        return self._kept.num_restarts

    async def start(self, worker_urls: Sequence[str], *, port: int = 0, timeout_s: float = STARTUP_TIMEOUT_S) -> None:
        """Until every worker takes requests. `port`: of an SMG that died, whose place this one takes.

        Raises:
            ProcessDiedError: SMG ended or is not ready; with its last words.
            GatewayError: A worker is not ready in time.
        """
        self._worker_urls = list(worker_urls)
        await self._kept.start(port=port)
        for url in worker_urls:
            await self._until_healthy(url, timeout_s)

    async def keep(self) -> Never:
        """Start SMG again whenever it ends; see `KeptProcess.keep`."""
        return await self._kept.keep()

    async def add_worker(self, url: str, *, timeout_s: float = STARTUP_TIMEOUT_S) -> None:
        """Let a replica join; returns when it takes requests.

        Raises:
            GatewayError: It does not within `timeout_s`, or SMG refuses it.
        """
        if url not in self._worker_urls:
            await self._call("POST", "/workers", {"url": url})
            self._worker_urls.append(url)
        await self._until_healthy(url, timeout_s)

    async def remove_worker(self, url: str) -> None:
        """Let a replica leave: its sessions go elsewhere from now on, its running requests end first.

        Raises:
            GatewayError: SMG does not know it, or keeps it longer than REMOVAL_TIMEOUT_S.
        """
        known = {worker.url: worker.id for worker in await self.workers()}
        if url not in known:
            raise GatewayError(f"SMG has no worker {url}; it has {sorted(known)}")
        self._worker_urls.remove(url)
        await self._call("DELETE", f"/workers/{known[url]}")
        deadline = time.monotonic() + REMOVAL_TIMEOUT_S
        while url in {worker.url for worker in await self.workers()}:
            if time.monotonic() > deadline:
                raise GatewayError(f"SMG still has worker {url} after {REMOVAL_TIMEOUT_S:.0f} s")
            await asyncio.sleep(POLL_S)

    async def workers(self) -> list[SmgWorker]:
        """All of them, also those that are not healthy."""
        answer = await self._call("GET", "/workers")
        try:
            return [SmgWorker(id=raw["id"], url=raw["url"], is_healthy=raw["is_healthy"]) for raw in answer["workers"]]
        except (KeyError, TypeError) as error:
            raise GatewayError(f"SMG's workers cannot be read: {answer!r:.300}") from error

    async def control(self, path: str) -> None:
        """One engine route on every replica at once, through SMG's RL control plane.

        Example:
            `control("pause?mode=keep")`, `control("resume")`.

        Raises:
            GatewayError: A replica failed or answered with an error; it names them.
        """
        joint = "&" if "?" in path else "?"
        answer = await self._call("POST", f"/v1/rl/engine/{path}{joint}selector=engine%3Dvllm", {})
        if answer["failed"]:
            raise GatewayError(f"{path}: {len(answer['failed'])} of {answer['total']} replicas failed: {answer['failed']!r:.500}")

    async def metrics(self) -> dict[str, float]:
        """SMG's Prometheus samples by name, summed over labels: `smg_router_requests_total`, `smg_worker_errors_total`, ..."""
        return prometheus_samples(await self._read("GET", f"{self._metrics_url}/metrics"))

    async def stop(self) -> None:
        """End SMG; may be called twice. Cancel `keep` first."""
        if self._http is not None:
            await self._http.close()
        await self._kept.stop()

    def _make(self, port: int) -> ChildProcess:
        metrics_port = free_port()
        self._metrics_url = f"http://127.0.0.1:{metrics_port}"
        key_file = self._log_path.with_name(f"{self._log_path.stem}.key")
        key_file.parent.mkdir(parents=True, exist_ok=True)
        key_file.touch(mode=0o600)
        key_file.write_text(self._key)
        argv = [
            *(sys.executable, "-m", "psrl.gateway.smg_launch", "--control-key-file", str(key_file)),
            *(*FLAGS, "--prometheus-port", str(metrics_port)),
            *(("--worker-urls", *self._worker_urls) if self._worker_urls else ()),
        ]
        return ChildProcess("SMG", argv, log_path=self._log_path, host=self._host, port=port, port_wait_s=PORT_WAIT_S if port else 0.0)

    async def _until_healthy(self, url: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(worker.url == url and worker.is_healthy for worker in await self.workers()):
            if time.monotonic() > deadline:
                raise GatewayError(
                    f"SMG does not take worker {url} after {timeout_s:.0f} s; SMG's log: {self._kept.process.last_words()[-500:]}"
                )
            await asyncio.sleep(POLL_S)

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        raw = await self._read(method, self.url + path, body)
        try:
            return orjson.loads(raw)
        except ValueError as error:
            raise GatewayError(f"SMG {method} {path}: the answer is no JSON: {raw[:200]!r}") from error

    async def _read(self, method: str, url: str, body: Any = None) -> bytes:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S), headers={"authorization": f"Bearer {self._key}"}
            )
        try:
            async with self._http.request(method, url, json=body) as answer:
                status, content = answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise GatewayError(f"SMG {method} {url}: {type(error).__name__}: {error}") from error
        if status >= 300:
            raise GatewayError(f"SMG {method} {url}: {status}: {content[:500].decode(errors='replace')}")
        return content
