"""Containers that carry psrl's label, asked of the Engine over its socket with the standard library alone.

For the reaper, which every run calls: importing the Docker SDK takes longer than all of its work, and where no Engine answers at
once there is nothing to remove. An Engine is never started by this, and never waited for longer than QUICK_S a call.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from urllib.parse import quote, urlsplit

LABEL = "psrl.sandbox"
"""Of a container: the worker's label."""
HOST_LABEL = "psrl.host"
"""Of a container: the boot of the machine whose worker it is, since Engines may serve several."""
QUICK_S = 1.0
REMOVE_S = 10.0
USUAL_SOCKETS = ("/var/run/docker.sock", "/run/docker.sock")
ANSWERS_NOTHING = (OSError, http.client.HTTPException, ValueError)
"""No Engine, not for this user, too slow, or something else that listens there."""


class SocketConnection(http.client.HTTPConnection):
    """HTTP over a socket in the file system."""

    def __init__(self, path: str, *, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@cache
def host_id() -> str:
    """Of this machine since it was booted."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def labels_of(worker: str) -> dict[str, str]:
    """What a container of this worker carries."""
    return {LABEL: worker, HOST_LABEL: host_id()}


def engine_answers(engine_url: str | None) -> bool:
    """Whether an Engine can be talked to, at `engine_url` or at the usual socket."""
    try:
        status, _ = _ask(engine_url, "GET", "/_ping", timeout_s=QUICK_S)
    except ANSWERS_NOTHING:
        return False
    return status == http.client.OK


def labelled_containers(engine_url: str | None) -> Mapping[str, str]:
    """Worker's label by id of every container of this machine's workers; none where no Engine answers."""
    filters = json.dumps({"label": [LABEL, f"{HOST_LABEL}={host_id()}"]})
    try:
        status, body = _ask(engine_url, "GET", f"/containers/json?all=1&filters={quote(filters)}", timeout_s=QUICK_S)
        if status != http.client.OK:
            return {}
        return {found["Id"]: found["Labels"][LABEL] for found in json.loads(body)}
    except ANSWERS_NOTHING:
        return {}


def remove_container(engine_url: str | None, container: str) -> bool:
    """Whether it is gone now."""
    try:
        status, _ = _ask(engine_url, "DELETE", f"/containers/{container}?force=1&v=1", timeout_s=REMOVE_S)
    except ANSWERS_NOTHING:
        return False
    return status in (http.client.NO_CONTENT, http.client.NOT_FOUND)


def _ask(engine_url: str | None, method: str, path: str, *, timeout_s: float) -> tuple[int, bytes]:
    connection = _connection(engine_url, timeout_s)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _connection(engine_url: str | None, timeout_s: float) -> http.client.HTTPConnection:
    """OSError: no socket lies there."""
    address = urlsplit(engine_url or next((f"unix://{path}" for path in USUAL_SOCKETS if os.path.exists(path)), "unix://missing"))
    if address.scheme in ("tcp", "http") and address.hostname is not None:
        return http.client.HTTPConnection(address.hostname, address.port or 2375, timeout=timeout_s)
    if address.scheme != "unix" or not stat.S_ISSOCK(os.stat(address.path).st_mode):
        raise OSError(f"no Engine at {engine_url}")
    return SocketConnection(address.path, timeout_s=timeout_s)
