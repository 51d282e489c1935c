"""What a new version of SmolLM2's weights costs the vllm engine, and how near its logprobs are to the trainer's.

    python benchmarks/vllm_engine.py [--rounds 5] [--threads 2] [--url http://127.0.0.1:PORT]

Starts the engine (scripts/setup.sh vllm makes its environment), or takes one that serves SmolLM2-135M-Instruct in float32 already.

Update: all weights change by a thousandth, are published once, staged (checked and mapped, vLLM decodes on) and served (vLLM stands still:
pause, load, pack, resume). The base is a plain copy of as many bytes in memory, in the same run; printed are the ratios to it.

Gap: turns sampled with the last version, at temperature 1 and 0.7, scored by psrl's trainer model (transformers) on the same weights.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from psrl.config.model import ModelConfig
from psrl.config.rollout import RolloutConfig
from psrl.engine_client.client import HttpReplica
from psrl.errors import ConfigError
from psrl.parameter_server.push import publish_tensors
from psrl.processes.child import ChildProcess
from psrl.recipes.retool.smollm2 import make_smollm2_folder
from psrl.runtime.engines import engine_command, vllm_python
from psrl.types import GenerateRequest, Generation, PolicyVersion, SamplingParams

START_S = 900.0
CALL_S = 600.0
NUM_TURNS, PROMPT_TOKENS, TURN_TOKENS = 8, 64, 32
VOCABULARY = 49152
TEMPERATURES = (1.0, 0.7)


def plain_copy_s(num_bytes: int) -> float:
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


async def measure_updates(replica: HttpReplica, tensors: dict[str, torch.Tensor], rounds: int) -> None:
    stages, stills = [], []
    for _ in range(rounds + 1):
        for tensor in tensors.values():
            tensor.mul_(1.001)
        version = PolicyVersion(await replica.version() + 1)
        shared = publish_tensors(tensors, version)
        began = time.perf_counter()
        await replica.stage_weights(shared.manifest)
        staged = time.perf_counter()
        await replica.pause("keep")
        report = await replica.finish_weights(version)
        await replica.resume()
        stages.append(staged - began)
        stills.append(time.perf_counter() - staged)
        assert (report.version, report.checksum) == (version, shared.manifest.checksum)
        shared.close()
    copy_s = plain_copy_s(shared.manifest.total_bytes)
    stage_s, still_s = statistics.median(stages[1:]), statistics.median(stills[1:])
    print(
        f"update of {shared.manifest.total_bytes / 1e6:.0f} MB, {report.num_matched} of {report.num_expected} tensors: staged in "
        f"{stage_s:.3f} s, vLLM stood still for {still_s:.3f} s; a plain copy takes {copy_s:.3f} s; update / copy = "
        f"{(stage_s + still_s) / copy_s:.1f}, standing still / copy = {still_s / copy_s:.1f}"
    )


async def measure_gap(replica: HttpReplica, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(tensors, strict=False)
    draw = random.Random(1)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_TURNS)]
    for temperature in TEMPERATURES:
        began = time.perf_counter()
        turns = await asyncio.gather(*(sample(replica, index, prompt, temperature) for index, prompt in enumerate(prompts)))
        seconds = time.perf_counter() - began
        gaps = [gap for prompt, turn in zip(prompts, turns, strict=True) for gap in gaps_of(model, prompt, turn, temperature)]
        print(
            f"temperature {temperature}: {len(gaps)} tokens of {NUM_TURNS} turns at once, {len(gaps) / seconds:.1f} tokens/s; logprobs of "
            f"engine and trainer differ by {statistics.mean(gaps):.2e} on average, {max(gaps):.2e} at most"
        )


async def sample(replica: HttpReplica, index: int, prompt: list[int], temperature: float) -> Generation:
    sampling = SamplingParams(max_tokens=TURN_TOKENS, temperature=temperature, seed=index)
    return await replica.generate(GenerateRequest(request_id=f"g{index}", token_ids=prompt, session=f"g{index}", sampling=sampling))


def gaps_of(model: torch.nn.Module, prompt: list[int], turn: Generation, temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *turn.token_ids]])).logits[0, len(prompt) - 1 : -1] / temperature
    own = logits.log_softmax(-1).gather(1, torch.tensor(turn.token_ids)[:, None])[:, 0]
    return (own - torch.tensor(turn.logprobs)).abs().tolist()


async def measure(url: str, folder: Path, rounds: int) -> None:
    replica = HttpReplica(url, request_timeout_s=CALL_S, control_timeout_s=CALL_S)
    tensors = load_file(folder / "model.safetensors")
    try:
        await measure_updates(replica, tensors, rounds)
        await measure_gap(replica, tensors, folder)
    finally:
        await replica.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of the engine")
    parser.add_argument("--url", default=None, help="of an engine that runs already")
    options = parser.parse_args()
    try:
        vllm_python(RolloutConfig(name="vllm"))
    except ConfigError as error:
        print(f"not measured: {error}")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_smollm2_folder(Path(temporary) / "SmolLM2-135M-Instruct")
        if options.url is not None:
            asyncio.run(measure(options.url, folder, options.rounds))
        else:
            rollout = RolloutConfig(name="vllm", num_threads=options.threads, max_num_seqs=NUM_TURNS, device="cpu")
            engine = ChildProcess("engine", engine_command(ModelConfig(path=str(folder)), rollout), log_path=Path(temporary) / "engine.log")
            try:
                began = time.perf_counter()
                asyncio.run(engine.start(START_S))
                print(f"vLLM started in {time.perf_counter() - began:.0f} s")
                asyncio.run(measure(engine.url, folder, options.rounds))
            finally:
                engine.stop()
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
