"""Names of images that say which image: a tag may mean another one tomorrow, a digest never does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from psrl.config.sandbox import SandboxConfig, engine_url_of
from psrl.errors import SandboxError, SandboxUnavailableError
from psrl.sandbox.docker_engine import EngineRefusal, answer_of, connected

if TYPE_CHECKING:
    from docker import APIClient

DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
ASK_TIMEOUT_S = 20.0


class ImagePins:
    """Looks digests up in the Docker Engine of this machine; each image once. Nothing is pulled."""

    def __init__(self, settings: SandboxConfig | None = None) -> None:
        """The Engine of `settings`, else of DOCKER_HOST or the usual socket; it is not asked before the first name without a digest."""
        self._url = engine_url_of(settings or SandboxConfig())
        self._client: APIClient | None = None
        self._pins: dict[str, str | None] = {}
        self.why_not: str | None = None
        """Why the engine cannot be asked; None while it can."""

    def pinned(self, name: str) -> str | None:
        """`name@sha256:...`; None where the engine does not hold the image, or holds one that no registry knows."""
        if DIGEST.search(name):
            return name
        if name not in self._pins:
            self._pins[name] = self._look_up(name)
        return self._pins[name]

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()

    def _look_up(self, name: str) -> str | None:
        if self.why_not is not None:
            return None
        try:
            if self._client is None:
                self._client = connected(self._url, timeout_s=ASK_TIMEOUT_S)
            held = answer_of(self._client, f"look up {name}", lambda client: client.inspect_image(name))
        except EngineRefusal:
            return None
        except (SandboxUnavailableError, SandboxError) as error:
            self.why_not = str(error)
            return None
        return digest_of(name, held.get("RepoDigests") or [])


def digest_of(name: str, digests: list[str]) -> str | None:
    """The one of an image's digests that belongs to its name; any, where none does.

    Example:
        `docker.io/swebench/x:latest` with [`mirror/x@sha256:a`, `swebench/x@sha256:b`] -> `swebench/x@sha256:b`.
    """
    whole = [digest for digest in digests if DIGEST.search(digest)]
    repository = re.sub(r":[^/:]*$", "", name).removeprefix("docker.io/").removeprefix("library/")
    return next((digest for digest in whole if digest.split("@")[0] == repository), whole[0] if whole else None)
