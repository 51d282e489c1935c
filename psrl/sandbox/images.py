"""Images of a worker: found on the Engine, or pulled once with progress and an end."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from psrl.errors import SandboxError, SandboxUnavailableError
from psrl.sandbox.docker_engine import DockerEngine, EngineRefusal, cause_of
from psrl.sandbox.local_image import local_image

if TYPE_CHECKING:
    from docker import APIClient

TELL_EVERY_S = 5.0
QUIET_S = 300.0
"""An Engine that says nothing for so long, of layers that it fetches and unpacks, is stuck."""
NOT_THERE = ("not found", "manifest unknown", "does not exist", "access denied", "denied", "unauthorized", "no basic auth credentials")
NO_ROOM = ("no space left on device", "disk quota exceeded")
MAX_PULLS = 4
"""At once in a worker."""
logger = logging.getLogger(__name__)


class Images:
    """See the module. Names that were found once are not asked for again until `forget`."""

    def __init__(self, engine: DockerEngine, *, pull_timeout_s: float, packages: Sequence[str]) -> None:
        """`packages` go into the local image, never into another one."""
        self._engine = engine
        self._pull_timeout_s = pull_timeout_s
        self._packages = tuple(packages)
        self._found: dict[str | None, str] = {}
        self._making: dict[str | None, asyncio.Task[str]] = {}
        """One for each image that is looked for, pulled or made now, whoever waits for it still."""
        self._pulls = asyncio.Semaphore(MAX_PULLS)

    async def ensure(self, reference: str | None) -> str:
        """The id of an image, pulled where the Engine lacks it; None: the one made from this machine's files.

        All that ask at the same time wait for the same pull, which goes on when they are cancelled: it holds its place until it has ended,
        and the next one that asks finds it.

        Raises:
            SandboxUnavailableError: There is no such image, or no room for it.
            SandboxError: The registry could not be reached, or was too slow; another time it may be there.
        """
        if reference in self._found:
            return self._found[reference]
        if reference not in self._making:
            self._making[reference] = asyncio.create_task(self._local() if reference is None else self._found_or_pulled(reference))
            self._making[reference].add_done_callback(lambda task: self._made(reference, task))
        return await asyncio.shield(self._making[reference])

    def _made(self, reference: str | None, task: asyncio.Task[str]) -> None:
        del self._making[reference]
        if not task.cancelled() and task.exception() is None:  # else those who wait are told
            self._found[reference] = task.result()

    def forget(self, reference: str | None) -> None:
        """Ask the Engine again: it says that the image is gone."""
        self._found.pop(reference, None)

    async def _local(self) -> str:
        return await self._engine.ask("make the local image", lambda client: local_image(client, self._packages, tell=tell), is_long=True)

    async def _found_or_pulled(self, reference: str) -> str:
        try:
            return await self._id_of(reference)
        except EngineRefusal as refusal:
            if refusal.status != HTTPStatus.NOT_FOUND:
                raise
        async with self._pulls:
            return await self._pulled(reference)

    async def _id_of(self, reference: str) -> str:
        found: dict[str, Any] = await self._engine.ask(f"look for the image {reference}", lambda client: client.inspect_image(reference))
        return str(found["Id"])

    async def _pulled(self, reference: str) -> str:
        def pull(client: APIClient) -> str | None:
            return pull_image(client, reference, timeout_s=self._pull_timeout_s, tell=tell)

        try:
            fault = await self._engine.ask(f"pull the image {reference}", pull, is_long=True)
        except EngineRefusal as refusal:
            fault = str(refusal)
        if fault is not None:
            raise pull_error(reference, fault)
        found: dict[str, Any] = await self._engine.ask(f"look for the image {reference}", lambda client: client.inspect_image(reference))
        if "@sha256:" not in reference and found["RepoDigests"]:
            tell(f"image {reference} was pulled by its tag, which may move; pin it in rows as {found['RepoDigests'][0]}")
        return str(found["Id"])


def pull_error(reference: str, fault: str) -> SandboxError:
    """What to do about a pull that failed, by the Engine's words."""
    words = fault.lower()
    if any(sign in words for sign in NO_ROOM):
        return SandboxUnavailableError(f"no room for the image {reference}: {fault}. Fix: `docker system prune`, or a larger disk")
    if any(sign in words for sign in NOT_THERE):
        fix = "check its name; pull or load it by hand (`docker pull`, `docker load`), after `docker login` where it is private"
        return SandboxUnavailableError(f"there is no image {reference} to be had: {fault}. Fix: {fix}")
    fix = "check the network and the registry; or bring the image by `docker save` and `docker load`"
    return SandboxError(f"the image {reference} could not be pulled: {fault}. Fix: {fix}")


def pull_image(client: APIClient, reference: str, *, timeout_s: float, tell: Callable[[str], None]) -> str | None:
    """Pull, with a line every few seconds; the Engine's words where it failed. Blocks: for a thread.

    Not by the SDK's `pull`, which waits for an Engine that says nothing for ever.
    """
    import docker.auth
    import requests

    began = told = time.monotonic()
    registry, _ = docker.auth.resolve_repository_name(reference)
    header = docker.auth.get_config_header(client, registry)
    # Without a tag the Engine would pull every one.
    is_exact = "@" in reference or ":" in reference.rpartition("/")[2]
    answer = client.post(
        f"{client.base_url}/v{client.api_version}/images/create",
        params={"fromImage": reference if is_exact else f"{reference}:latest"},
        headers={"X-Registry-Auth": header} if header else {},
        stream=True,
        timeout=min(timeout_s, QUIET_S),
    )
    late = f"not done within sandbox.pull_timeout_s={timeout_s:g}"
    layers: dict[str, tuple[int, int]] = {}
    with answer:
        if answer.status_code != HTTPStatus.OK:
            return str(answer.json()["message"])
        try:
            for line in answer.iter_lines():
                event = json.loads(line)
                if "error" in event:
                    return str(event["error"])
                detail = event.get("progressDetail", {})
                if "id" in event and "total" in detail and event["status"] == "Downloading":
                    layers[event["id"]] = (detail["current"], detail["total"])
                now = time.monotonic()
                if now - began > timeout_s:
                    return late
                if now - told > TELL_EVERY_S:
                    told = now
                    done, total = (sum(part[index] for part in layers.values()) for index in (0, 1))
                    tell(f"pulling {reference}: {done / 1e6:.0f} of {total / 1e6:.0f} MB, {now - began:.0f} s")
        except requests.ConnectionError as error:  # the HTTP library's name for a stream that fell silent, too
            return late if time.monotonic() - began >= timeout_s else f"the Engine broke off or said nothing for long ({cause_of(error)})"
    tell(f"pulled {reference} in {time.monotonic() - began:.0f} s")
    return None


def tell(line: str) -> None:
    """One line of the run's log."""
    logger.warning(line)
