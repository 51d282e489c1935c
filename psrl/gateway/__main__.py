"""`python -m psrl.gateway --model-path FOLDER --engine-url URL --admin-key-file FILE`: the session router as a process."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import uvicorn

from psrl.chat import load_renderer
from psrl.engine_client.client import HttpGenerator
from psrl.errors import PsrlError
from psrl.gateway.session_router import SessionRouter
from psrl.gateway.sessions import SessionTable
from psrl.gateway.turns import TurnTaker
from psrl.processes.serving import BACKLOG, KEEP_ALIVE_S, add_serving_arguments, bound_socket, die_with_parent
from psrl.protocols import Generator, Renderer

SHUTDOWN_GRACE_S = 2


def main() -> int:
    """Load the tokenizer, then serve until told to stop; 1 with one line on stderr when the model's tokenizer cannot be used."""
    began = time.perf_counter()
    arguments = _arguments()
    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    try:
        renderer = load_renderer(str(arguments.model_path), tool_format=arguments.tool_format, history_thinking=arguments.history_thinking)
    except PsrlError as error:
        print(f"session router: {error}", file=sys.stderr, flush=True)
        return 1
    generator = HttpGenerator(arguments.engine_url, request_timeout_s=arguments.request_timeout_s, retry_for_s=arguments.retry_for_s)
    router = build_router(
        renderer,
        generator,
        admin_key=arguments.admin_key_file.read_text().strip(),
        model_name=arguments.model_name or arguments.model_path.name,
        max_sessions=arguments.max_sessions,
        idle_timeout_s=arguments.session_idle_timeout_s,
        turn_timeout_s=2 * arguments.request_timeout_s + arguments.retry_for_s,
    )
    settings = uvicorn.Config(
        router.app(),
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    listener = bound_socket(arguments)
    listener.listen(BACKLOG)
    host, port = listener.getsockname()[:2]
    print(f"session router: http://{host}:{port} after {time.perf_counter() - began:.1f} s", flush=True)
    uvicorn.Server(settings).run(sockets=[listener])
    return 0


def build_router(
    renderer: Renderer,
    generator: Generator,
    *,
    admin_key: str,
    model_name: str,
    max_sessions: int,
    idle_timeout_s: float,
    turn_timeout_s: float,
) -> SessionRouter:
    """A router in front of `generator`; `turn_timeout_s`, how long a close waits, is the most that a turn takes without resumes."""
    table = SessionTable(renderer, max_sessions=max_sessions, idle_timeout_s=idle_timeout_s, turn_timeout_s=turn_timeout_s)
    return SessionRouter(table, TurnTaker(renderer, generator), admin_key=admin_key, model_name=model_name)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="psrl.gateway")
    parser.add_argument("--model-path", type=Path, required=True, help="folder with the tokenizer and its chat template")
    parser.add_argument("--model-name", default="", help="as /v1/models tells it; default: the folder's name")
    parser.add_argument("--tool-format", default="hermes", help="a name of chat.parsers")
    parser.add_argument("--history-thinking", choices=("keep", "strip"), default="keep")
    parser.add_argument("--engine-url", action="append", required=True, help="SMG, or an engine replica; may be given several times")
    parser.add_argument("--admin-key-file", type=Path, required=True, help="holds the key that opens sessions")
    parser.add_argument("--request-timeout-s", type=float, default=120.0, help="of one attempt to sample a turn")
    parser.add_argument("--retry-for-s", type=float, default=30.0, help="how long a turn is tried again when engines fail")
    parser.add_argument("--max-sessions", type=int, default=4096)
    parser.add_argument("--session-idle-timeout-s", type=float, default=3600.0)
    add_serving_arguments(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
