"""A code execution service for tests: `python -m psrl.sandbox_server`, as a process of its own."""

import asyncio
import sys
from contextlib import contextmanager

import pytest

from psrl.processes.child import ChildProcess


@contextmanager
def sandbox_server(folder, *options, port=0):
    """A server that is up, and the process that it is; ended afterwards."""
    argv = [sys.executable, "-m", "psrl.sandbox_server", *map(str, options)]
    child = ChildProcess("sandbox server", argv, log_path=folder / "sandbox-server.log", port=port)
    try:
        asyncio.run(child.start(60.0))
        yield child
    finally:
        child.stop(10.0)


@pytest.fixture(scope="session")
def sandbox_service(tmp_path_factory):
    """URL of a server that all tests of this process share."""
    with sandbox_server(tmp_path_factory.mktemp("sandbox-service"), "--num-workers", 3) as server:
        yield server.url
