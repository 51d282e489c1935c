"""The Docker Engine through its SDK: every call has an end and runs in a thread, every failure says what to do.

One object per worker. The SDK is imported when it is first needed: it takes longer than a sandbox of bubblewrap starts.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from psrl.errors import SandboxError, SandboxUnavailableError
from psrl.sandbox.engine_threads import EngineThreads

if TYPE_CHECKING:
    from docker import APIClient

CALL_TIMEOUT_S = 60.0
"""Of one call; a busy Engine that starts many containers at once takes seconds."""
NUM_THREADS = 16
NUM_LONG_THREADS = 5
"""Of pulls and of making an image, which take minutes: starts and removals never wait for them."""
FIX_SDK = "pip install 'docker>=7'"
FIX_START = (
    "start it (`systemctl start docker`, or as root `dockerd`; to install: `apt-get install docker.io`), or name another one with "
    "sandbox.engine_url or DOCKER_HOST"
)
FIX_PERMISSION = "let this user talk to it (`usermod -aG docker USER`, then log in again), or set sandbox.engine_url to a rootless Engine"

Answer = TypeVar("Answer")


class EngineRefusal(SandboxError):
    """The Engine answered that it will not; `status` is HTTP's."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class DockerEngine:
    """See the module."""

    def __init__(self, url: str | None, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """`url` as DOCKER_HOST has it, such as `unix:///run/docker.sock`; None: the usual socket."""
        self._url = url
        self._timeout_s = timeout_s
        self._client: APIClient | None = None
        self._threads = EngineThreads(NUM_THREADS, name="docker")
        self._long_threads = EngineThreads(NUM_LONG_THREADS, name="docker-long")
        self._connecting = threading.Lock()

    async def ask(self, what: str, call: Callable[[APIClient], Answer], *, is_long: bool = False) -> Answer:
        """The answer of `call`, which runs in a thread to its end whoever is cancelled here.

        `what` completes "the Docker Engine did not ..."; `is_long`: it may take longer than CALL_TIMEOUT_S.

        Raises:
            SandboxUnavailableError: There is no Engine to talk to.
            EngineRefusal: It answered with an error.
            SandboxError: It did not answer, or broke off.
        """
        threads = self._long_threads if is_long else self._threads
        return await asyncio.wrap_future(threads.submit(lambda: answer_of(self._connected(), what, call)))

    def _connected(self) -> APIClient:
        with self._connecting:
            if self._client is None:
                self._client = connected(self._url, timeout_s=self._timeout_s)
            return self._client


def answer_of(client: APIClient, what: str, call: Callable[[APIClient], Answer]) -> Answer:
    """`call(client)`, on this thread; errors as `DockerEngine.ask`."""
    import docker.errors
    import requests

    try:
        return call(client)
    except docker.errors.APIError as error:
        status = error.response.status_code if error.response is not None else 0
        raise EngineRefusal(f"the Docker Engine did not {what}: {error.explanation or error}", status=status) from error
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        raise SandboxError(f"the Docker Engine did not {what}: {cause_of(error)}") from error


def connected(url: str | None, *, timeout_s: float) -> APIClient:
    """A client of the SDK that has talked to the Engine.

    Raises:
        SandboxUnavailableError: The SDK is missing; no Engine listens; this user may not talk to it; it cannot be used in this way.
    """
    try:
        import docker
        import docker.errors
        import requests
    except ImportError as error:
        raise SandboxUnavailableError(f"the Docker SDK cannot be imported ({error}). Fix: {FIX_SDK}") from error
    try:
        client = docker.APIClient(base_url=url, timeout=timeout_s)
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        cause = cause_of(error)
        is_refused = isinstance(cause, PermissionError)
        where = url or "the usual socket"
        words = (
            f"this user may not talk to the Docker Engine at {where}" if is_refused else f"no Docker Engine answers at {where} ({cause})"
        )
        raise SandboxUnavailableError(f"{words}. Fix: {FIX_PERMISSION if is_refused else FIX_START}") from error
    # The SDK keeps a connection for each of its last addresses, and each container has its own: none would be used again.
    client.headers["Connection"] = "close"
    if client.base_url != "http+docker://localhost" and not client.base_url.startswith("http://"):
        client.close()
        raise SandboxUnavailableError(
            f"the Docker Engine at {url} is reached by TLS or SSH, which cannot carry the stream to a guest. "
            "Fix: forward its socket (`ssh -L /tmp/engine.sock:/var/run/docker.sock HOST`) and set sandbox.engine_url=unix:///tmp/engine.sock"
        )
    return client


def cause_of(error: BaseException) -> BaseException:
    """The system's error at the bottom of those that the SDK and its HTTP library wrap around it."""
    seen = set()
    while id(error) not in seen:
        seen.add(id(error))
        wrapped = [part for part in error.args if isinstance(part, BaseException)]
        reason = vars(error).get("reason")
        following = error.__cause__ or (wrapped[0] if wrapped else None) or reason or error.__context__
        if not isinstance(following, BaseException):
            break
        error = following
    return error
