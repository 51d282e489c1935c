"""A program of its own: imports mini-swe-agent once, then forks a process for each episode. Run by `mini_swe_server`, never imported.

The worker's end is the socket on descriptor 0: frames `{"fork": true}` with two descriptors (the episode's channel, its output) and
`{"reap": pid}`, each answered; `{"error": ...}` where there is no process to be had. An episode's process dies with this one, and this one
ends when the worker's end of the socket closes, so nothing is left whoever is killed. It removes no files: its folder is the worker's, and
after the worker's death the reaper's.

In the fork runs mini-swe-agent's DefaultAgent, unmodified, with its own litellm model on the session's URL. Its environment sends each
command up the channel and waits for the answer: nothing that the policy wrote runs in this process.
"""

from __future__ import annotations

import array
import ctypes
import gc
import json
import os
import platform
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

import litellm
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel
from pydantic import BaseModel

PR_SET_PDEATHSIG = 1
SIZE = struct.Struct("!I")
MAX_REQUEST_BYTES = 4096
REAP_TIMEOUT_S = 10.0
MODEL_CLASSES = {"litellm": LitellmModel, "litellm_textbased": LitellmTextbasedModel}
WARM_ANSWERS = (
    {"tool_calls": [{"id": "call-0-0", "type": "function", "function": {"name": "bash", "arguments": '{"command": "true"}'}}]},
    {"content": "```mswea_bash_command\ntrue\n```"},
)
"""In the order of MODEL_CLASSES."""


class SandboxEnvironmentConfig(BaseModel):
    """What templates may use of the environment section."""

    cwd: str
    timeout: int | float
    env: dict[str, str]
    interpreter: list[str]


class SandboxEnvironment(LocalEnvironment):
    """mini-swe-agent's environment with its commands in the worker's sandbox; when an episode is done is its base's rule."""

    def __init__(self, channel: socket.socket, **settings: Any) -> None:
        super().__init__(config_class=SandboxEnvironmentConfig, **settings)
        self._channel = channel

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """One command, run by the worker. Raises Submitted as its base does."""
        assert timeout is None, "DefaultAgent leaves the time to the environment's settings"
        send(self._channel, {"execute": action.get("command", ""), "cwd": cwd or None})
        output = receive(self._channel)
        if output is None:
            os._exit(0)  # The worker has ended the episode: nobody waits for anything.
        self._check_finished(output)
        return output

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        """The section and the system's name; nothing of this process's environment."""
        system = platform.uname()
        names = {"system": system.system, "release": system.release, "version": system.version, "machine": system.machine}
        return {**self.config.model_dump(), **names, **more}


def play(channel: socket.socket) -> None:
    """One episode: settings from the channel, the agent's end to the channel."""
    start = receive(channel)
    if start is None:
        return
    # A session is plain HTTP, and a context of certificates would cost its episode 20 ms; an endpoint of somebody else's may be TLS.
    litellm.ssl_verify = not start["model"]["model_kwargs"]["api_base"].startswith("http://")
    model = MODEL_CLASSES[start["model_class"]](**start["model"])
    agent = DefaultAgent(model, SandboxEnvironment(channel, **start["environment"]), **start["agent"])
    end: dict[str, Any] = {"exit_status": None, "submission": "", "error": None}
    try:
        info = agent.run(start["task"])
        end |= {"exit_status": info.get("exit_status"), "submission": info.get("submission")}
    except Exception as error:  # noqa: BLE001 whatever the agent raised is how it ended
        end |= {"exit_status": type(error).__name__, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    send(channel, {"end": {**end, "num_calls": agent.n_calls, "messages": conversation(agent.messages)}})


def conversation(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was said, without what mini-swe-agent notes beside it."""
    names = ("role", "content", "tool_calls", "tool_call_id")
    return [{name: message[name] for name in names if message.get(name)} for message in messages if message.get("role") != "exit"]


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """One frame: its size, then JSON."""
    body = json.dumps(message).encode()
    channel.sendall(SIZE.pack(len(body)) + body)


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """One frame; None where the other end is gone."""
    size = receive_exactly(channel, SIZE.size)
    body = receive_exactly(channel, SIZE.unpack(size)[0]) if size else None
    return json.loads(body) if body else None


def receive_exactly(channel: socket.socket, size: int) -> bytes | None:
    """So many bytes; None where the other end is gone."""
    parts = bytearray()
    while len(parts) < size:
        chunk = channel.recv(size - len(parts))
        if not chunk:
            return None
        parts += chunk
    return bytes(parts)


def die_with_parent(parent: int) -> None:
    """SIGKILL when the parent ends, also when it has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def fork(control: socket.socket, fds: list[int]) -> int:
    """The pid of a process that plays what comes through `fds[0]` and prints to `fds[1]`."""
    server = os.getpid()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)
        return pid
    try:
        os.setpgid(0, 0)
        die_with_parent(server)
        control.close()
        for target in (1, 2):
            os.dup2(fds[1], target)
        os.close(fds[1])
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        play(socket.socket(fileno=fds[0]))
    except BaseException:  # noqa: BLE001 the fork must never go on as a second server
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def reap(pid: int) -> int | None:
    """The exit code of a fork (negative: the signal that killed it); None while it runs after ten seconds."""
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(REAP_TIMEOUT_S * 1000):
            return None
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def warm_up() -> None:
    """What litellm imports and builds at its first calls, once for all forks; no thread may be left, since forks would lack it."""
    from litellm.litellm_core_utils.thread_pool_executor import executor

    vars(executor)["submit"] = lambda *_, **__: None  # it would start threads to write logs that nobody reads
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer, args=(listener, WARM_ANSWERS))
        answering.start()
        for model_class in MODEL_CLASSES.values():
            address = {"api_base": f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "api_key": "none", "max_retries": 0}
            model = model_class(model_name="openai/policy", model_kwargs=address, cost_tracking="ignore_errors")
            model.query([{"role": "user", "content": "warm"}])
        answering.join()
    del vars(executor)["submit"]


def answer(listener: socket.socket, messages: Sequence[dict[str, Any]]) -> None:
    """A policy of one turn per connection."""
    for message in messages:
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = {"id": "warm", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice], "usage": usage}
        content = json.dumps(body).encode()
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as request:
            size = 0
            while (line := request.readline()) not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                size = int(value) if name.lower() == b"content-length" else size
            request.read(size)
            head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
            connection.sendall(head.encode() + content)


def main() -> None:
    """Consumes requests until the worker's end closes; waits for nothing else but the end of a fork that it is asked to reap."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    litellm.ssl_verify = False
    warm_up()
    assert threading.active_count() == 1, [thread.name for thread in threading.enumerate()]
    gc.collect()
    gc.freeze()
    control.sendall(json.dumps({"ready": True}).encode())
    while True:
        request, ancillary, _, _ = control.recvmsg(MAX_REQUEST_BYTES, socket.CMSG_SPACE(2 * array.array("i").itemsize))
        if not request:
            return
        message = json.loads(request)
        fds = array.array("i")
        for _level, _kind, content in ancillary:
            fds.frombytes(content)
        if "fork" in message:
            try:
                answered: dict[str, Any] = {"pid": fork(control, list(fds))}
            except OSError as error:  # No process or memory is free: this episode fails, those that run go on.
                answered = {"error": str(error)}
        else:
            answered = {"exit_code": reap(message["reap"])}
        for fd in fds:
            os.close(fd)
        control.sendall(json.dumps(answered).encode())


if __name__ == "__main__":
    main()
