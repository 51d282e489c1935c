"""HTTP client of the engine contract: one replica, and the choice among several.

Invariant: all turns of a session go to the replica that it was placed on, unless that one fails or the session is moved; every call
has an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson

from psrl.engine_client.bodies import generate_body, manifest_to_json, parse_generation, parse_weight_report
from psrl.engine_client.prometheus import prometheus_samples
from psrl.errors import EngineError, EngineRequestError
from psrl.protocols import WeightManifest, WeightReport
from psrl.telemetry.flow import Flow
from psrl.types import GenerateRequest, Generation, PolicyVersion

MAX_CONNECTIONS = 512
"""Per replica; more requests than an engine decodes at once wait in the engine, not in the pool."""
CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_S = 60.0
READY_POLL_S = 0.1
MAX_SESSIONS = 65536
"""Sessions remembered; the oldest is forgotten and would be placed anew."""
JSON_HEADERS = {"content-type": "application/json"}
ROUTING_KEY_HEADER = "x-smg-routing-key"
MAX_ROUTING_KEY = 128
"""Bytes; SMG takes no longer one."""
NOT_NOW = (404, 408, 429)
"""Refusals that say nothing of the request. 404 is SMG's where no replica has joined, as just after SMG was started again."""
MAX_RETRY_PAUSE_S = 1.0
GIVE_BACK_TIMEOUT_S = 10.0
"""A replica that does not give turns back by then answers nothing."""


class HttpReplica:
    """One engine replica: control and generation. Implements `protocols.ReplicaControl`."""

    def __init__(self, url: str, *, request_timeout_s: float = 120.0, control_timeout_s: float = 120.0) -> None:
        """`request_timeout_s` bounds one generation, `control_timeout_s` one control call (a pause with `wait`, an update)."""
        self.url = url.rstrip("/")
        self._request_timeout_s = request_timeout_s
        self._control_timeout_s = control_timeout_s
        self.num_in_flight = 0
        self.flow = Flow()
        """Of turns: requests and answers, from the one to the other."""
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn.

        Raises:
            EngineRequestError: The engine refused the request as wrong.
            EngineError: It could not be reached, failed, broke the contract or took longer than request_timeout_s.
        """
        began, body = time.perf_counter(), generate_body(request)
        self.num_in_flight += 1
        try:
            raw = await self._call(
                "POST",
                "/generate",
                content=body,
                timeout_s=self._request_timeout_s,
                headers=JSON_HEADERS | {ROUTING_KEY_HEADER: routing_key(request.session)},
            )
        finally:
            self.num_in_flight -= 1
        latency_s = time.perf_counter() - began
        self.flow.add(len(body) + len(raw), latency_s)
        return parse_generation(raw, latency_s=latency_s)

    async def wait_ready(self, timeout_s: float) -> None:
        """Poll `/health` until it answers 200."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await self._call("GET", "/health", timeout_s=CONNECT_TIMEOUT_S)
                return
            except EngineError as error:
                if time.monotonic() >= deadline:
                    raise EngineError(f"engine {self.url} is not ready after {timeout_s:.0f} s: {error}") from error
            await asyncio.sleep(READY_POLL_S)

    async def pause(self, mode: str = "keep", *, clear_cache: bool = True) -> None:
        """See `protocols.ReplicaControl`; returns when the replica stands still."""
        await self._call("POST", f"/pause?mode={mode}&clear_cache={'true' if clear_cache else 'false'}", timeout_s=self._control_timeout_s)

    async def resume(self) -> None:
        """Go on after a pause."""
        await self._call("POST", "/resume", timeout_s=self._control_timeout_s)

    async def abort(self, request_ids: Sequence[str] = ()) -> None:
        """End requests with what they have; none named means all."""
        body = orjson.dumps({"request_ids": list(request_ids)} if request_ids else {"abort_all": True})
        await self._call("POST", "/abort_requests", content=body, timeout_s=self._control_timeout_s)

    async def stage_weights(self, manifest: WeightManifest) -> WeightReport:
        """Have a version found and checked; what is served stays, and turns go on.

        Raises:
            EngineError: The replica could not load the version.
        """
        await self._call("POST", "/start_weight_update", content=b"{}", timeout_s=self._control_timeout_s)
        body = orjson.dumps({"update_info": manifest_to_json(manifest)})
        return parse_weight_report(await self._call("POST", "/update_weights", content=body, timeout_s=self._control_timeout_s))

    async def finish_weights(self, version: PolicyVersion) -> WeightReport:
        """Serve the staged version from the next token on. The caller compares the report with the manifest.

        Raises:
            EngineError: Another version is staged, or none; it still serves the old one.
        """
        finish = orjson.dumps({"weight_version": str(version)})
        return parse_weight_report(await self._call("POST", "/finish_weight_update", content=finish, timeout_s=self._control_timeout_s))

    async def version(self) -> PolicyVersion:
        """The weights that it serves."""
        return PolicyVersion(int((await self.weight_info())["weight_version"]))

    async def weight_info(self) -> dict[str, Any]:
        """The answer of `/weight_info`: weight_version, num_matched, num_expected, checksum."""
        raw = await self._call("GET", "/weight_info", timeout_s=self._control_timeout_s)
        try:
            body = orjson.loads(raw)
            int(body["weight_version"])
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"engine {self.url} broke the contract: weight_info {raw[:300]!r}") from error
        return body

    async def metrics(self) -> dict[str, float]:
        """Prometheus samples by name, summed over labels: `psrl_engine_running`, `psrl_engine_waiting`, `psrl_engine_cache_usage`, ..."""
        raw = await self._call("GET", "/metrics", timeout_s=self._control_timeout_s)
        return prometheus_samples(raw)

    async def reset_prefix_cache(self) -> None:
        """Forget the keys of ended turns."""
        await self._call("POST", "/reset_prefix_cache", timeout_s=self._control_timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _call(
        self, method: str, path: str, *, timeout_s: float, content: bytes | None = None, headers: dict[str, str] = JSON_HEADERS
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._connections().request(method, self.url + path, data=content, headers=headers, timeout=timeout) as answer:
                status, body = answer.status, await answer.read()
        except TimeoutError as error:
            raise EngineError(f"engine {self.url}{path}: no answer within {timeout_s:.0f} s") from error
        except aiohttp.ClientError as error:
            raise EngineError(f"engine {self.url}{path}: {type(error).__name__}: {error}") from error
        if status < 300:
            return body
        text = f"engine {self.url}{path}: {status}: {body[:500].decode(errors='replace')}"
        is_wrong_request = 400 <= status < 500 and status not in NOT_NOW
        raise EngineRequestError(text) if is_wrong_request else EngineError(text)

    def _connections(self) -> aiohttp.ClientSession:
        """Made by the first call, because it belongs to the event loop that runs then. No proxy of the environment is used."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session


class HttpGenerator:
    """Sends turns to replicas (or to SMG in front of them), sticky by session. Implements `protocols.Generator`.

    An instance is the index of a URL. A session begins at the instance that it was placed on, or that its first request names, or else
    where the fewest turns are in flight.
    """

    def __init__(self, urls: Sequence[str], *, request_timeout_s: float = 120.0, retry_for_s: float = 2.0) -> None:
        """After its first failure a turn is sent again for `retry_for_s`; each attempt has `request_timeout_s`."""
        assert urls, "HttpGenerator needs at least one URL"
        self._request_timeout_s = request_timeout_s
        self.replicas = tuple(self._replica_of_url(url) for url in urls)
        self._retry_for_s = retry_for_s
        self._replica_of: OrderedDict[str, HttpReplica] = OrderedDict()
        self._num_sessions = dict.fromkeys(self.replicas, 0)
        self._in_flight: dict[str, dict[str, HttpReplica]] = {}
        """Request ids by session, and where they are."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn on the session's replica; a replica that fails is left for another, in turn while none answers.

        Raises:
            EngineRequestError: The request is wrong; it is not sent again.
            EngineError: Every attempt failed, for `retry_for_s`; the message names the last cause.
        """
        failed: set[HttpReplica] = set()
        began_to_fail: float | None = None
        for attempt in itertools.count(1):
            replica = self._replica_for(request, avoid=failed)
            try:
                return await self._sent(request, replica)
            except EngineRequestError:
                raise
            except EngineError as error:
                now, pause_s = time.monotonic(), min(0.05 * 2**attempt, MAX_RETRY_PAUSE_S)
                began_to_fail = began_to_fail or now
                if now + pause_s - began_to_fail > self._retry_for_s:
                    words = f"{attempt} attempts failed in {now - began_to_fail:.1f} s"
                    raise EngineError(f"request {request.request_id}: {words}, the last: {error}") from error
                # When all have failed, the others are tried once more: they may have been started again meanwhile.
                failed = {replica} if len(failed | {replica}) == len(self.replicas) else failed | {replica}
                await asyncio.sleep(pause_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def place(self, session: str, instance: int) -> None:
        """Turns of the session that begin from here on go to this instance."""
        self._remember(session, self._replica_at(instance))

    async def move(self, sessions: Sequence[str], instance: int) -> int:
        """Place sessions anew and have their running turns given back, so that they go on there; how many there were.

        A turn that its old replica does not give back (it has just ended, or the replica is gone) ends there or fails by itself.
        """
        target = self._replica_at(instance)
        given_back: defaultdict[HttpReplica, list[str]] = defaultdict(list)
        for session in sessions:
            self._remember(session, target)
            for request_id, replica in self._in_flight.get(session, {}).items():
                if replica is not target:
                    given_back[replica].append(request_id)
        await asyncio.gather(*(_give_back(replica, ids) for replica, ids in given_back.items()))
        return sum(map(len, given_back.values()))

    def forget(self, session: str) -> None:
        """The session has ended: its next turn would be placed anew."""
        replica = self._replica_of.pop(session, None)
        if replica is not None:
            self._num_sessions[replica] -= 1

    async def readdress(self, old: str, new: str) -> None:
        """An instance has another URL: its sessions go on there. Turns under way at the old one fail and are sent again."""
        left = next((replica for replica in self.replicas if replica.url == old), None)
        if left is None:
            return
        found = self._replica_of_url(new)
        self.replicas = tuple(found if replica is left else replica for replica in self.replicas)
        self._num_sessions[found] = self._num_sessions.pop(left)
        for session, replica in self._replica_of.items():
            if replica is left:
                self._replica_of[session] = found
        await left.close()

    async def close(self) -> None:
        """Close the connections of all replicas."""
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    async def _sent(self, request: GenerateRequest, replica: HttpReplica) -> Generation:
        running = self._in_flight.setdefault(request.session, {})
        running[request.request_id] = replica
        try:
            return await replica.generate(request)
        finally:
            del running[request.request_id]
            if not running:
                self._in_flight.pop(request.session, None)

    def _replica_of_url(self, url: str) -> HttpReplica:
        return HttpReplica(url, request_timeout_s=self._request_timeout_s, control_timeout_s=GIVE_BACK_TIMEOUT_S)

    def _replica_at(self, instance: int) -> HttpReplica:
        assert 0 <= instance < len(self.replicas), f"there is no instance {instance}, only {len(self.replicas)}"
        return self.replicas[instance]

    def _replica_for(self, request: GenerateRequest, *, avoid: set[HttpReplica]) -> HttpReplica:
        """The session's replica; else the one that the request names; else that with the fewest turns in flight, then sessions."""
        known = self._replica_of.get(request.session)
        if known is None and request.instance is not None:
            known = self._replica_at(request.instance)
            self._remember(request.session, known)
        if known is not None and known not in avoid:
            return known
        choices = [replica for replica in self.replicas if replica not in avoid] or list(self.replicas)
        chosen = min(choices, key=lambda replica: (replica.num_in_flight, self._num_sessions[replica]))
        self._remember(request.session, chosen)
        return chosen

    def _remember(self, session: str, replica: HttpReplica) -> None:
        if len(self.replicas) == 1:
            return  # There is nothing to choose: behind SMG, which keeps sessions where they are by itself.
        self.forget(session)
        self._replica_of[session] = replica
        self._num_sessions[replica] += 1
        if len(self._replica_of) > MAX_SESSIONS:
            self._num_sessions[self._replica_of.popitem(last=False)[1]] -= 1


async def _give_back(replica: HttpReplica, request_ids: Sequence[str]) -> None:
    with contextlib.suppress(EngineError):  # It is gone, and so are its turns: they fail by themselves and are sent to another.
        await replica.abort(request_ids)


def routing_key(session: str) -> str:
    """What SMG pins a session by: its name, or a hash where that is no legal key."""
    if 0 < len(session) <= MAX_ROUTING_KEY and session.isascii() and session.isprintable() and " " not in session:
        return session
    return hashlib.sha256(session.encode()).hexdigest()
