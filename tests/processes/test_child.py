"""A child server: found to be lost when it ends and when it falls silent, and followed on its own port."""

import asyncio
import os
import signal
import sys

import pytest

from psrl.errors import ProcessDiedError
from psrl.processes.child import ChildProcess

SERVER = """
import argparse
from http.server import BaseHTTPRequestHandler, HTTPServer
from psrl.processes.serving import add_serving_arguments, bound_socket, die_with_parent

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass

parser = argparse.ArgumentParser()
add_serving_arguments(parser)
arguments = parser.parse_args()
die_with_parent(arguments.parent_pid)
server = HTTPServer(("127.0.0.1", 0), Answer, bind_and_activate=False)
server.socket.close()
server.socket = bound_socket(arguments)
server.server_activate()
print("serving", flush=True)
server.serve_forever()
"""


def child(folder, *, port: int = 0, port_wait_s: float = 0.0) -> ChildProcess:
    return ChildProcess("server", [sys.executable, "-c", SERVER], log_path=folder / "log", port=port, port_wait_s=port_wait_s)


def test_a_server_that_ends_is_lost_with_its_code_and_last_words(tmp_path):
    async def run():
        server = child(tmp_path)
        await server.start(30)
        os.kill(server.pid, signal.SIGKILL)
        return await asyncio.wait_for(server.lost(), 10)

    assert asyncio.run(run()) == "server ended with code -9; last words: serving"


def test_a_server_that_stands_still_is_lost_though_it_lives(tmp_path):
    async def run():
        server = child(tmp_path)
        await server.start(30)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            return await asyncio.wait_for(server.lost(silent_after_s=0.5), 20)
        finally:
            await asyncio.to_thread(server.stop, 0.0)

    assert asyncio.run(run()).startswith("server answers no /health for 0.5 s")


def test_a_successor_waits_for_the_port_of_a_server_that_is_on_its_way_out(tmp_path):
    async def run():
        first = child(tmp_path)
        await first.start(30)
        with pytest.raises(ProcessDiedError, match=f"cannot listen on 127.0.0.1:{first.port}"):
            await child(tmp_path, port=first.port).start(30)
        second = child(tmp_path, port=first.port, port_wait_s=10)
        starting = asyncio.create_task(second.start(30))
        await asyncio.to_thread(first.stop)
        await starting
        await asyncio.to_thread(second.stop)
        return first.url, second.url

    first_url, second_url = asyncio.run(run())
    assert first_url == second_url
