"""HTTP client of the session contract. Implements `protocols.Sessions`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import orjson

from psrl.errors import GatewayError, GatewayUnreachableError
from psrl.session_client.bodies import record_from_json, spec_to_json
from psrl.types import SessionAddress, SessionId, SessionRecord, SessionSpec

CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_S = 60.0
CLOSE_TIMEOUT_S = 3600.0
"""Of a close that waits for turns: the gateway's own deadline for them ends it long before."""
MAX_CONNECTIONS = 512
RETRY_PAUSE_S = 0.2


class SessionClient:
    """Opens, reads and closes sessions of one gateway; also sends chat completions for loops of psrl's own."""

    def __init__(self, url: str, *, admin_key: str, control_timeout_s: float = 60.0, retry_for_s: float = 0.0) -> None:
        """`admin_key` opens and closes sessions; `control_timeout_s` bounds every call but chat completions, which bring their own.

        A gateway that is started again has lost its sessions but opens new ones: opening is tried again for `retry_for_s`.
        """
        self.url = url.rstrip("/")
        self._admin_key = admin_key
        self._control_timeout_s = control_timeout_s
        self._retry_for_s = retry_for_s
        self._http: aiohttp.ClientSession | None = None

    async def open(self, spec: SessionSpec) -> SessionAddress:
        """See `protocols.Sessions`."""
        raw = await self._opened(spec_to_json(spec))
        try:
            return SessionAddress(id=SessionId(raw["id"]), url=f"{self.url}/sessions/{raw['id']}", api_key=raw["api_key"])
        except (KeyError, TypeError) as error:
            raise GatewayError(f"gateway {self.url} broke the contract: {raw!r:.300}") from error

    async def record(self, address: SessionAddress) -> SessionRecord:
        """See `protocols.Sessions`."""
        return record_from_json(await self._call("GET", address.url, key=address.api_key))

    async def close(self, address: SessionAddress, *, abort: bool) -> SessionRecord:
        """See `protocols.Sessions`."""
        query = "?abort=true" if abort else ""
        timeout_s = self._control_timeout_s if abort else CLOSE_TIMEOUT_S
        return record_from_json(await self._call("DELETE", address.url + query, key=self._admin_key, timeout_s=timeout_s))

    async def chat(self, address: SessionAddress, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """One chat completion.

        Raises:
            GatewayError: It was answered with an error; `code` in the message is the session's.
        """
        raw: dict[str, Any] = await self._call(
            "POST", f"{address.base_url}/chat/completions", key=address.api_key, body=body, timeout_s=timeout_s
        )
        return raw

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()

    async def _opened(self, body: dict[str, Any]) -> Any:
        """The answer to an opening. Waits for: the gateway. Unblocked by: its answer, or `retry_for_s` after the first failure."""
        gives_up_at: float | None = None
        while True:
            try:
                return await self._call("POST", f"{self.url}/sessions", key=self._admin_key, body=body)
            except GatewayUnreachableError:
                gives_up_at = gives_up_at or time.monotonic() + self._retry_for_s
                if time.monotonic() + RETRY_PAUSE_S > gives_up_at:
                    raise
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _call(self, method: str, url: str, *, key: str, body: Any = None, timeout_s: float | None = None) -> Any:
        total_s = self._control_timeout_s if timeout_s is None else timeout_s
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_TIMEOUT_S)
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        data = None if body is None else orjson.dumps(body)
        try:
            async with self._connections().request(method, url, data=data, headers=headers, timeout=timeout) as answer:
                status, content = answer.status, await answer.read()
        except TimeoutError as error:
            raise GatewayError(f"gateway: {method} {url}: no answer within {total_s:.0f} s") from error
        except aiohttp.ClientError as error:
            raise GatewayUnreachableError(f"gateway: {method} {url}: {type(error).__name__}: {error}") from error
        if status >= 300:
            raise GatewayError(f"gateway: {method} {url}: {status}: {content[:500].decode(errors='replace')}")
        try:
            return orjson.loads(content)
        except ValueError as error:
            raise GatewayError(f"gateway: {method} {url}: the answer is no JSON: {content[:200]!r}") from error

    def _connections(self) -> aiohttp.ClientSession:
        """Made by the first call, because it belongs to the event loop that runs then. No proxy of the environment is used."""
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=KEEPALIVE_S)
            self._http = aiohttp.ClientSession(connector=connector)
        return self._http
