"""Containers that carry psrl's label, asked of the Engine over its socket with the standard library alone.

For the reaper, which every run calls: importing the Docker SDK takes longer than all of its work, and where no Engine answers at
once there is nothing to remove. An Engine is never started by this, and waited for QUICK_S a question and REMOVE_ALL_S for all
removals, however slowly it sends its answers; only the name of another machine is looked up in the system's own time.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from urllib.parse import quote, urlsplit

LABEL = "psrl.sandbox"
"""Of a container: the worker's label."""
HOST_LABEL = "psrl.host"
"""Of a container: the boot of the machine whose worker it is, since Engines may serve several."""
QUICK_S = 1.0
REMOVE_S = 10.0
REMOVE_ALL_S = 20.0
"""Of one start; what is left then is for the next one."""
MAX_ANSWER_BYTES = 64 * 2**20
USUAL_SOCKETS = ("/var/run/docker.sock", "/run/docker.sock")
ANSWERS_NOTHING = (OSError, ValueError, LookupError, TypeError)
"""No Engine, not for this user, too slow, or something else that listens there."""


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


def remove_containers(engine_url: str | None, containers: Sequence[str]) -> tuple[str, ...]:
    """Those that are gone now."""
    end = time.monotonic() + REMOVE_ALL_S
    gone = []
    for container in containers:
        try:
            within_s = min(REMOVE_S, end - time.monotonic())
            status, _ = _ask(engine_url, "DELETE", f"/containers/{container}?force=1&v=1", timeout_s=within_s)
        except ANSWERS_NOTHING:
            continue
        if status in (http.client.NO_CONTENT, http.client.NOT_FOUND):
            gone.append(container)
    return tuple(gone)


def _ask(engine_url: str | None, method: str, path: str, *, timeout_s: float) -> tuple[int, bytes]:
    """Status and body, within `timeout_s` in all. By HTTP/1.0, whose answer ends with the connection."""
    end = time.monotonic() + timeout_s
    received = bytearray()
    with _connected(engine_url, end) as connection:
        connection.sendall(f"{method} {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        chunk = b"anything"
        while chunk:
            connection.settimeout(_left(end))
            chunk = connection.recv(1 << 16)
            received += chunk
            if len(received) > MAX_ANSWER_BYTES:
                raise ValueError("an answer without an end")
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), body


def _connected(engine_url: str | None, end: float) -> socket.socket:
    """OSError: no socket lies there."""
    address = urlsplit(engine_url or next((f"unix://{path}" for path in USUAL_SOCKETS if os.path.exists(path)), "unix://missing"))
    if address.scheme in ("tcp", "http") and address.hostname is not None:
        return socket.create_connection((address.hostname, address.port or 2375), timeout=_left(end))
    if address.scheme != "unix" or not stat.S_ISSOCK(os.stat(address.path).st_mode):
        raise OSError(f"no Engine at {engine_url}")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_left(end))
    try:
        connection.connect(address.path)
    except OSError:
        connection.close()
        raise
    return connection


def _left(end: float) -> float:
    """Seconds; TimeoutError: none."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
