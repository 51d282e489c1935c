"""`psrl serve` as its user has it: a process that prints two lines to paste, and whose children end with it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from psrl.cli.main import main
from psrl.recipes import retool_tiny

MODEL = str(Path(retool_tiny.__file__).parent / "model")


class Served:
    """A running `psrl serve` with its session, and what it printed."""

    def __init__(self, process):
        self.process, self.lines = process, []
        self.base_url = self.wait_for(r"OPENAI_BASE_URL=(\S+)")
        self.api_key = self.wait_for(r"OPENAI_API_KEY=(\S+)")

    def wait_for(self, pattern):
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found[1]
        raise AssertionError("".join(self.lines))

    def ask(self, words, *, key=None, url=None):
        body = json.dumps({"model": "any", "messages": [{"role": "user", "content": words}], "max_tokens": 3}).encode()
        headers = {"authorization": f"Bearer {key or self.api_key}", "content-type": "application/json"}
        request = urllib.request.Request(f"{url or self.base_url}/chat/completions", data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def children(self):
        """Word in their command line -> process."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            line = " ".join(child.cmdline())
            found[next(word for word in ("smg", "psrl.engines", "psrl.gateway") if word in line)] = child
        return found


@contextmanager
def served(folder, *options):
    (folder / "script.json").write_text(json.dumps({"turns": [{"token_ids": [40, 41, 42]}]}))
    argv = [sys.executable, "-m", "psrl", "serve", MODEL, "--port", "0", "--log-dir", str(folder / "logs")]
    argv += ["--engine", "scripted", "--script", str(folder / "script.json"), *options]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield Served(process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.stdout.close()


def test_a_served_model_answers_any_client_outlives_its_engine_and_ends_whole(tmp_path):
    with served(tmp_path) as server:
        answer = server.ask("hello")
        assert answer["usage"]["completion_tokens"] == 3
        with pytest.raises(urllib.error.HTTPError, match="401"):
            server.ask("hello", key="another")
        children = server.children()
        assert set(children) == {"smg", "psrl.engines", "psrl.gateway"}

        os.kill(children["psrl.engines"].pid, signal.SIGKILL)
        assert server.ask("again")["usage"]["completion_tokens"] == 3
        assert server.wait_for(r"(engine 0 ended with code -9; it is started again)")

        children = server.children()
        server.process.send_signal(signal.SIGINT)
        assert server.wait_for("(stopped)")
        assert server.process.wait(30) == 0
        assert not any(child.is_running() for child in children.values())
    assert {file.name for file in (tmp_path / "logs").iterdir()} >= {"engine-0.log", "smg.log", "session-router.log", "gateway-admin.key"}
    assert (tmp_path / "logs" / "gateway-admin.key").stat().st_mode & 0o777 == 0o600


def test_the_end_of_the_router_is_the_end_and_is_named(tmp_path):
    with served(tmp_path) as server:
        children = server.children()
        os.kill(children["psrl.gateway"].pid, signal.SIGKILL)
        assert server.wait_for("(ProcessDiedError: session router ended with code -9)")
        assert server.process.wait(30) == 1
        assert not any(child.is_running() for child in children.values())


def test_a_server_that_is_killed_leaves_no_child(tmp_path):
    with served(tmp_path) as server:
        children = server.children()
        server.process.kill()
        deadline = time.monotonic() + 10
        while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children.values()):
            assert time.monotonic() < deadline, "a child outlived its parent"


def test_the_scripted_engine_asks_for_its_script(capsys):
    with pytest.raises(SystemExit) as end:
        main(["serve", MODEL, "--engine", "scripted"])
    assert end.value.code == 2
    assert "--script FILE" in capsys.readouterr().err


def test_a_model_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        main(["serve", "/nowhere/model"])
    assert end.value.code == 2
    assert "/nowhere/model" in capsys.readouterr().err
