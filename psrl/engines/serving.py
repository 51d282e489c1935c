"""Serving an engine over HTTP until the process is told to end."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys

import uvicorn

from psrl.engines.contract import EngineCore, PauseMode
from psrl.engines.server import build_app
from psrl.processes.garbage import leave_out_what_is_there
from psrl.processes.serving import BACKLOG, KEEP_ALIVE_S, add_serving_arguments, bound_socket

SWITCH_INTERVAL_S = 0.0005
"""The decode thread must not wait for the HTTP thread's default slice of 5 ms after each kernel."""


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """What every engine takes: `--max-num-seqs`, `--paused`, and what every server process takes."""
    parser.add_argument("--max-num-seqs", type=int, default=64, help="sequences decoded at once; others wait")
    parser.add_argument("--paused", action="store_true", help="begin as after /pause?mode=keep: requests wait until /resume")
    add_serving_arguments(parser)


def serve(core: EngineCore, arguments: argparse.Namespace) -> None:
    """Answer the contract until SIGTERM or SIGINT. `arguments` has those of `add_engine_arguments`."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if arguments.paused:
        core.pause(PauseMode.KEEP, clear_cache=False)
    settings = uvicorn.Config(
        build_app(core),
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    leave_out_what_is_there()
    listener = bound_socket(arguments)
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
