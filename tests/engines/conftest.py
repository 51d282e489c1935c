"""Engines under test as real child processes, started once per session."""

import asyncio
import json
import sys

import pytest

from psrl.config.rollout import RolloutConfig
from psrl.processes.child import ChildProcess
from psrl.runtime.engines import vllm_python
from tests.engines.tiny_models import save_tiny_llama, save_tiny_qwen3

SCRIPT = {"vocab_size": 64, "max_model_len": 256, "turns": [{"token_ids": [5, 6, 7, 8, 9, 10, 11, 12], "per_token_s": 0.002}]}
VLLM_START_S = 600
"""It imports for a minute of CPU, and twice as long on a machine that has other work."""


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


@pytest.fixture(scope="session")
def vllm_url(qwen3_folder, tmp_path_factory):
    """Needs `scripts/setup.sh vllm`."""
    python = vllm_python(RolloutConfig(name="vllm"))
    argv = [python, "-m", "psrl.engines.vllm", "--model-path", str(qwen3_folder), "--max-model-len", "2048", "--max-num-seqs", "8"]
    yield from serve(argv, tmp_path_factory.mktemp("vllm_engine"), start_s=VLLM_START_S)


@pytest.fixture(params=["torch", "scripted", pytest.param("vllm", marks=pytest.mark.slow)])
def engine_url(request):
    return request.getfixturevalue(f"{request.param}_url")


def serve(argv, folder, *, start_s=60):
    process = ChildProcess("engine", argv, log_path=folder / "engine.log")
    try:
        asyncio.run(process.start(start_s))
        yield process.url
    finally:
        process.stop()
