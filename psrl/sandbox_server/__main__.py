"""`python -m psrl.sandbox_server`: one server as a process. It answers once its sandboxes are up, and leaves none when it ends."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path

import uvicorn
import uvloop

from psrl.config.sandbox import SandboxConfig
from psrl.errors import PsrlError
from psrl.processes.serving import BACKLOG, KEEP_ALIVE_S, add_serving_arguments, bound_socket, die_with_parent
from psrl.sandbox import build_pool, limits_of
from psrl.sandbox_server.server import SandboxServer, ServerLimits

SHUTDOWN_GRACE_S = 3
"""In which programs that run may end before they are ended."""


def main() -> int:
    """Serve until told to stop; 1 with one line on stderr where no sandbox can be made here."""
    arguments = _arguments()
    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve(arguments))
        except PsrlError as error:
            print(f"sandbox server: {error}", file=sys.stderr, flush=True)
            return 1
    return 0


async def _serve(arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    settings = SandboxConfig(
        backend=arguments.backend,
        num_workers=arguments.num_workers,
        max_starts=arguments.num_workers,
        wall_s=arguments.wall_s,
        cpu_s=arguments.cpu_s,
        memory_mb=arguments.memory_mb,
        num_processes=arguments.num_processes,
        output_kb=arguments.output_kb,
        disk_mb=arguments.disk_mb,
        packages=[name for name in arguments.packages.split(",") if name],
    )
    listener = bound_socket(arguments)
    listener.listen(BACKLOG)
    host, port = listener.getsockname()[:2]
    pool = build_pool(settings, run=arguments.run)
    try:
        await pool.preflight()
        server = SandboxServer(
            pool,
            limits=ServerLimits(num_workers=settings.num_workers, max_queue=arguments.max_queue, max_queue_s=arguments.max_queue_s),
            most=limits_of(settings),
            api_key=None if arguments.api_key_file is None else arguments.api_key_file.read_text().strip(),
            name=f"{host}:{port}",
        )
        config = uvicorn.Config(
            server.app(),
            log_level="warning",
            access_log=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        print(f"sandbox server: http://{host}:{port} after {time.perf_counter() - began:.1f} s", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _heard)
        await uvicorn.Server(config).serve(sockets=[listener])
    finally:
        await pool.stop()


def _heard(*_: object) -> None:
    """uvicorn ends at these signals, and then raises them again, which must not end the process before the sandboxes are gone."""


def _arguments() -> argparse.Namespace:
    defaults = SandboxConfig()
    parser = argparse.ArgumentParser(prog="psrl.sandbox_server")
    parser.add_argument("--backend", default=defaults.backend)
    parser.add_argument("--num-workers", type=int, default=defaults.num_workers, help="programs that run at once")
    parser.add_argument("--max-queue", type=int, default=256, help="requests that wait beside them; further ones are answered 429")
    parser.add_argument("--max-queue-s", type=float, default=60.0, help="longest wait for a place")
    for name in ("wall_s", "cpu_s"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=vars(defaults)[name], help="most of one program")
    for name in ("memory_mb", "num_processes", "output_kb", "disk_mb"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=vars(defaults)[name], help="most of one program")
    parser.add_argument("--packages", default="", help="installed distributions that programs can import, with commas between")
    parser.add_argument("--api-key-file", type=Path, default=None, help="holds the key that requests must bring; none: no key")
    parser.add_argument("--run", default="sandbox-server", help="labels sandboxes")
    add_serving_arguments(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
