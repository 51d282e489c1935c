"""The torch engine, through its HTTP API, against transformers' `generate` on the same model and machine.

`python benchmarks/engine.py [--model FOLDER] [--batches 1,16,64] [--prompt 32] [--tokens 128] [--threads 1]` prints one line per
batch size: tokens per second of both, and their ratio. Prompts differ in every row, so no prefix is shared; both sample at
temperature 1 without stop ids, in float32. Without --model a random 0.9M-parameter Qwen3 is made. `--vllm PYTHON` adds vLLM's CPU build,
which wants a virtual environment of its own: PYTHON is that environment's interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from psrl.config.processor import openblas_environment
from psrl.engine_client.client import HttpReplica
from psrl.processes.child import ChildProcess
from psrl.types import GenerateRequest, SamplingParams

VLLM_START_LIMIT_S = 300.0


def make_tiny_model(folder: Path) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=457, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def prompts_of(batch: int, length: int, *, salt: int) -> list[list[int]]:
    chooser = random.Random(1000 * batch + salt)
    return [[chooser.randrange(457) for _ in range(length)] for _ in range(batch)]


async def engine_rate(url: str, batch: int, options: argparse.Namespace) -> float:
    replica = HttpReplica(url, request_timeout_s=600)
    best = 0.0
    for repeat in range(options.repeats + 1):  # the first warms up
        sampling = SamplingParams(max_tokens=options.tokens if repeat else min(options.tokens, 8))
        requests = [
            GenerateRequest(request_id=f"{batch}-{repeat}-{row}", token_ids=ids, session=str(row), sampling=sampling)
            for row, ids in enumerate(prompts_of(batch, options.prompt, salt=repeat))
        ]
        began = time.perf_counter()
        turns = await asyncio.gather(*map(replica.generate, requests))
        seconds = time.perf_counter() - began
        assert sum(turn.cached_tokens for turn in turns) < batch * options.prompt / 4, "prompts were shared"
        if repeat:
            best = max(best, sum(len(turn.token_ids) for turn in turns) / seconds)
    await replica.close()
    return best


def transformers_rate(model, batch: int, options: argparse.Namespace) -> float:
    import torch

    best = 0.0
    for repeat in range(options.repeats + 1):
        ids = torch.tensor(prompts_of(batch, options.prompt, salt=repeat))
        count = options.tokens if repeat else min(options.tokens, 8)
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                max_new_tokens=count, min_new_tokens=count, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        seconds = time.perf_counter() - began
        if repeat:
            best = max(best, (out.shape[1] - ids.shape[1]) * batch / seconds)
    return best


async def vllm_rate(url: str, folder: Path, batch: int, options: argparse.Namespace) -> float:
    best = 0.0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:

        async def turn(ids: list[int], tokens: int) -> int:
            body = {"model": str(folder), "prompt": ids, "max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                return (await answer.json())["usage"]["completion_tokens"]

        for repeat in range(options.repeats + 1):  # the first warms up
            tokens = options.tokens if repeat else min(options.tokens, 8)
            began = time.perf_counter()
            counts = await asyncio.gather(*(turn(ids, tokens) for ids in prompts_of(batch, options.prompt, salt=repeat)))
            if repeat:
                best = max(best, sum(counts) / (time.perf_counter() - began))
    return best


@asynccontextmanager
async def vllm_server(folder: Path, options: argparse.Namespace) -> AsyncIterator[str]:
    """vLLM's CPU build serving the model without its tokenizer; its workers spin, so it runs only while it is measured."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager", "--skip-tokenizer-init", "--dtype", "float32", "--max-num-seqs", "64"]
    command += ["--max-model-len", str(options.prompt + options.tokens)]
    threads = str(options.threads)
    env = dict(os.environ) | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": threads}
    with (folder / "vllm.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=log, stderr=log, start_new_session=True)
    replica = HttpReplica(f"http://127.0.0.1:{port}")
    try:
        await replica.wait_ready(VLLM_START_LIMIT_S)
        yield replica.url
    finally:
        await replica.close()
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--vllm", default=None, help="python of an environment with vllm-cpu")
    options = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or make_tiny_model(Path(temporary) / "tiny")
        argv = [sys.executable, "-m", "psrl.engines.torch", "--model-path", str(folder), "--num-threads", str(options.threads)]
        argv += ["--max-num-seqs", "64", "--max-model-len", str(options.prompt + options.tokens)]
        env = dict(os.environ) | {"OMP_WAIT_POLICY": "PASSIVE"} | openblas_environment()  # as runs start it
        process = ChildProcess("engine", argv, log_path=Path(temporary) / "engine.log", env=env)
        began = time.perf_counter()
        await process.start(120)
        print(
            f"engine start {time.perf_counter() - began:.1f} s; {options.threads} threads, prompt {options.prompt}, {options.tokens} tokens"
        )
        rates_of: dict[int, float] = {}
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            for batch in map(int, options.batches.split(",")):
                theirs = transformers_rate(model, batch, options)
                ours = await engine_rate(process.url, batch, options)
                rates = f"engine {ours:8.1f} tokens/s, transformers generate {theirs:8.1f} tokens/s"
                print(f"batch {batch:3d}: {rates}, ratio {ours / theirs:.2f}")
                rates_of[batch] = ours
        finally:
            process.stop()
        if options.vllm is not None:
            async with vllm_server(folder, options) as url:
                for batch, ours in rates_of.items():
                    theirs = await vllm_rate(url, folder, batch, options)
                    rates = f"engine {ours:8.1f} tokens/s, vLLM (CPU, eager) {theirs:8.1f} tokens/s"
                    print(f"batch {batch:3d}: {rates}, ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
