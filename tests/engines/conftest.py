"""Engines under test as real child processes, started once per session."""

import asyncio
import json
import sys

import pytest

from psrl.processes.child import ChildProcess
from tests.engines.tiny_models import save_tiny_llama, save_tiny_qwen3

SCRIPT = {"vocab_size": 64, "max_model_len": 256, "turns": [{"token_ids": [5, 6, 7, 8, 9, 10, 11, 12], "per_token_s": 0.002}]}


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory):
    return save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), seed=1)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("llama"), seed=1)


@pytest.fixture(scope="session")
def torch_url(qwen3_folder, tmp_path_factory):
    argv = [sys.executable, "-m", "psrl.engines.torch", "--model-path", str(qwen3_folder), "--max-model-len", "2048", "--max-num-seqs", "8"]
    yield from serve(argv, tmp_path_factory.mktemp("torch_engine"))


@pytest.fixture(scope="session")
def scripted_url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripted_engine")
    (folder / "script.json").write_text(json.dumps(SCRIPT | {"max_model_len": 2048}))
    argv = [sys.executable, "-m", "psrl.engines.scripted", "--script", str(folder / "script.json"), "--max-num-seqs", "8"]
    yield from serve(argv, folder)


@pytest.fixture(params=["torch", "scripted"])
def engine_url(request):
    return request.getfixturevalue(f"{request.param}_url")


def serve(argv, folder):
    process = ChildProcess("engine", argv, log_path=folder / "engine.log")
    try:
        asyncio.run(process.start(60))
        yield process.url
    finally:
        process.stop()
