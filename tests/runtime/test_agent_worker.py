"""The plain object of an agent worker, without Ray."""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

from psrl.agent_loops.mini_swe_server import agent_server
from psrl.config.load import load_config
from psrl.runtime.build import agent_worker_settings
from psrl.runtime.groups import AgentWorker
from psrl.sandbox.reaper import FOLDER_PREFIX, worker_label


def test_a_worker_that_starts_removes_what_a_dead_one_left_and_nothing_of_a_live_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "from psrl.sandbox.reaper import worker_label; print(worker_label('run'))"
    dead = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    left, held = (tmp_path / f"{FOLDER_PREFIX}{label}-x" for label in (dead, worker_label("run")))
    left.mkdir()
    held.mkdir()
    worker = AgentWorker(agent_worker_settings(load_config("retool_tiny")))

    async def start_and_stop() -> None:
        try:
            await worker.start()
        finally:
            await worker.stop()

    asyncio.run(start_and_stop())
    assert not left.exists()
    assert held.exists()


def test_a_worker_that_stops_leaves_neither_warm_process_nor_folder(tmp_path, monkeypatch):
    agent_server().close()  # of another test
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    agent_server().start()
    assert [path.name.startswith(FOLDER_PREFIX) for path in tmp_path.iterdir()] == [True]
    pid = agent_server()._process.pid
    asyncio.run(AgentWorker(agent_worker_settings(load_config("retool_tiny"))).stop())
    assert list(tmp_path.iterdir()) == []
    assert not Path(f"/proc/{pid}").exists()
