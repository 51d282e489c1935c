"""A further node of one vLLM that spans several: workers that the first node's engine drives, and nothing that samples by itself.

What vLLM's headless mode does (`vllm serve --headless`), from its public pieces. The process serves `/health` alone, from the moment on
at which all nodes have met; it ends when one of its workers does.
"""

from __future__ import annotations

import argparse
import threading
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from psrl.processes.serving import BACKLOG, bound_socket

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs


def follow(vllm_arguments: AsyncEngineArgs, arguments: argparse.Namespace) -> int:
    """Start this node's workers and wait for their end, or to be told to stop; the exit code.

    Waits for: the other nodes, without a limit of its own (the parent ends it); then SIGTERM or the end of a worker.
    """
    executor = MultiprocExecutor(vllm_arguments.create_engine_config(headless=True), monitor_workers=False)
    listener = bound_socket(arguments)
    listener.listen(BACKLOG)
    app = Starlette(routes=[Route("/health", _health)])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2))

    def end_with_workers() -> None:
        executor.start_worker_monitor(inline=True)
        server.should_exit = True

    threading.Thread(target=end_with_workers, name="worker-watch", daemon=True).start()
    print(f"vllm engine: node {arguments.node_rank} has met the others", flush=True)
    try:
        server.run(sockets=[listener])
    finally:
        executor.shutdown()
    return 1 if executor.is_failed else 0


async def _health(_: Request) -> Response:
    return Response(status_code=200)
