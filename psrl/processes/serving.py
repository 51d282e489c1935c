"""What every server process does beside its work: listen where told, and die with its parent."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
PARENT_POLL_S = 0.5
BACKLOG = 1024
KEEP_ALIVE_S = 75
"""Longer than psrl's clients keep an idle connection, so that none is closed under a request."""


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """`--host`, `--port`, `--fd`, `--parent-pid`."""
    parser.add_argument("--host", default="127.0.0.1", help="loopback unless the network is private: the control routes have no key")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--fd", type=int, default=None, help="an already bound socket, instead of host and port")
    parser.add_argument("--parent-pid", type=int, default=None, help="end when this process is gone")


def bound_socket(arguments: argparse.Namespace) -> socket.socket:
    """The socket that the parent has bound, else one on `--host` and `--port`. It does not listen yet."""
    if arguments.fd is not None:
        bound = socket.socket(fileno=arguments.fd)
    else:
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((arguments.host, arguments.port))
    # Connections inherit it. Without it an answer's body can wait 40 ms for the ACK of its head, where the event loop is not uvloop.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def die_with_parent(parent_pid: int) -> None:
    """End this process when its parent ends, however that happens. Where it has processes of its own, a guard ends them with it.

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
