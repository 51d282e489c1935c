"""What every engine process does beside its engine: listen where told, and die with its parent."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import socket
import sys
import threading
import time

import uvicorn

from psrl.engines.contract import EngineCore
from psrl.engines.server import build_app

PR_SET_PDEATHSIG = 1
PARENT_POLL_S = 0.5
SWITCH_INTERVAL_S = 0.0005
"""The decode thread must not wait for the HTTP thread's default slice of 5 ms after each kernel."""
BACKLOG = 1024


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """`--host`, `--port`, `--fd`, `--parent-pid`."""
    parser.add_argument("--host", default="127.0.0.1", help="loopback unless the network is private: the control routes have no key")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--fd", type=int, default=None, help="an already bound socket, instead of host and port")
    parser.add_argument("--parent-pid", type=int, default=None, help="end when this process is gone")


def die_with_parent(parent_pid: int) -> None:
    """End this process when its parent ends, however that happens.

    The kernel's signal is sent when the parent's *thread* ends, so it only prompts a look at who the parent is; a thread looks
    too, for when the main thread is busy.
    """

    def look(*_: object) -> None:
        if os.getppid() != parent_pid:
            os._exit(1)

    def watch() -> None:
        while True:
            look()
            time.sleep(PARENT_POLL_S)

    signal.signal(signal.SIGUSR2, look)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR2)
    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def serve(core: EngineCore, arguments: argparse.Namespace) -> None:
    """Answer the contract until SIGTERM or SIGINT."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    settings = uvicorn.Config(
        build_app(core), log_level="warning", access_log=False, proxy_headers=False, backlog=BACKLOG, timeout_graceful_shutdown=2
    )
    if arguments.fd is None:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((arguments.host, arguments.port))
    else:
        listener = socket.socket(fileno=arguments.fd)
    listener.listen(BACKLOG)
    host, port = listener.getsockname()[:2]
    print(f"psrl engine {core.model_name}: http://{host}:{port}", flush=True)
    try:
        EngineServer(settings, core).run(sockets=[listener])
    finally:
        core.close()


class EngineServer(uvicorn.Server):
    """Ends the engine before the connections, so that turns under way are answered (500) instead of cut."""

    def __init__(self, settings: uvicorn.Config, core: EngineCore) -> None:
        super().__init__(settings)
        self._core = core

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called once by uvicorn, after SIGTERM or SIGINT."""
        await asyncio.to_thread(self._core.close)
        await super().shutdown(sockets)
