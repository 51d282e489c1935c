"""What it costs to bring a new version of the weights from the trainer to the replicas, and how long decoding stands still for it.

    python benchmarks/weight_sync.py [--shapes tiny,smollm2] [--rounds 5] [--threads 1]

Shapes have random weights: `tiny` as in engine.py (0.9M parameters), `smollm2` that of SmolLM2-135M, in float32.

Sync: a real train worker, parameter server and one or two engine replicas on local Ray. A push writes the version once; a sync brings
it to every replica. Bytes are those that the machine's shared memory and the replicas' own memory grew by. The base is a plain copy of
as many bytes into fresh memory, in the same run: what one receiver with a copy of its own would need at the least.

Gap: one engine in this process decodes eight sequences while versions are staged and swapped with `keep`. Printed is the longest time
between the ends of two steps: undisturbed, while a version is staged, and at the swap, which computes all keys again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

SHAPES = {
    "tiny": {
        "vocab_size": 457, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 32,
    },
    "smollm2": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64,
    },
}  # fmt: skip
WAIT_S = 300.0
NUM_SEQUENCES = 8
PROMPT_TOKENS = 100


def make_model(folder: Path, shape: str) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=2048, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


# ---------------------------------------------------------------- sync


def shared_memory_bytes() -> int:
    """Of the whole machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Shmem:"))


def own_bytes_of_engines() -> int:
    """Memory of the engine processes that nobody shares with them."""
    import psutil

    engines = [child for child in psutil.Process().children(recursive=True) if "psrl.engines.torch" in child.cmdline()]
    return sum(memory.rss - memory.shared for memory in (engine.memory_info() for engine in engines))


def plain_copy_s(num_bytes: int) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        source.clone()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def measure_syncs(folder: Path, shape: str, *, num_replicas: int, rounds: int, threads: int) -> None:
    import ray

    from psrl.config.actor import ActorConfig, RefConfig
    from psrl.config.algorithm import AlgorithmConfig
    from psrl.config.critic import CriticConfig
    from psrl.config.model import ModelConfig
    from psrl.config.rollout import RolloutConfig
    from psrl.runtime.actors.engine_replica import EngineReplicaActor
    from psrl.runtime.actors.parameter_server import ParameterServerActor
    from psrl.runtime.actors.train_worker import TrainWorkerActor, TrainWorkerSettings
    from psrl.types import PolicyVersion

    model = ModelConfig(path=str(folder))
    rollout = RolloutConfig(num_replicas=num_replicas, num_threads=threads, max_num_seqs=NUM_SEQUENCES)
    settings = TrainWorkerSettings(
        model=model, actor=ActorConfig(), ref=RefConfig(), algorithm=AlgorithmConfig(), critic=CriticConfig(), critic_warmup=0,
        total_steps=1, seed=0, device="cpu", rank=0,
        world_size=1, collective_timeout_s=WAIT_S, data_plane_deadline_s=WAIT_S, startup_deadline_s=WAIT_S, export_dtype=None,
        import_folder=str(folder),
    )  # fmt: skip
    server = ParameterServerActor.remote(num_kept=2)
    trainer = TrainWorkerActor.options(name=f"train-worker-of-{num_replicas}-{shape}").remote(settings=settings)
    replicas = [
        EngineReplicaActor.remote(index=n, model=model, rollout=rollout, log_folder=folder, weight_sync_s=WAIT_S)
        for n in range(num_replicas)
    ]
    try:
        ray.get(trainer.load.remote(ray.get(trainer.rendezvous.remote(), timeout=WAIT_S)), timeout=WAIT_S)
        ray.get([replica.start.remote() for replica in replicas], timeout=WAIT_S)
        total = 0
        pushes, syncs, pauses, shared, own = [], [], [], [], []
        for version in range(1, rounds + 4):  # at the first three, memory is taken that is then taken again and again
            before = shared_memory_bytes(), own_bytes_of_engines()
            began = time.perf_counter()
            manifest = ray.get(trainer.push.remote(server, PolicyVersion(version)), timeout=WAIT_S)
            pushed = time.perf_counter()
            results = ray.get([replica.sync.remote(server, PolicyVersion(version), "keep") for replica in replicas], timeout=WAIT_S)
            synced = time.perf_counter()
            assert all(result.report.checksum == manifest.checksum for result in results)
            total = manifest.total_bytes
            pushes.append(pushed - began)
            syncs.append(synced - pushed)
            pauses.append(max(result.paused_s for result in results))
            shared.append(shared_memory_bytes() - before[0])
            own.append(own_bytes_of_engines() - before[1])
        copy_s = plain_copy_s(total)
        push_s, sync_s = statistics.median(pushes[3:]), statistics.median(syncs[3:])
        print(
            f"{shape}, {num_replicas} replica(s), {total / 1e6:.1f} MB: push {push_s:.3f} s, sync {sync_s:.3f} s, paused "
            f"{1e3 * statistics.median(pauses[3:]):.1f} ms; plain copy {copy_s:.3f} s; (push + sync) / copy = "
            f"{(push_s + sync_s) / copy_s:.2f}; first push {pushes[0]:.2f} s, first sync {syncs[0]:.2f} s"
        )
        print(
            f"    memory of the first two versions: shared {sum(shared[:2]) / total / 2:.2f} of a version each, replicas' own "
            f"{sum(own[:2]) / total / 2:+.2f}; of each later one: shared {statistics.mean(shared[2:]) / total:+.2f}, own "
            f"{statistics.mean(own[2:]) / total:+.2f}"
        )
    finally:
        ray.get([replica.stop.remote() for replica in replicas], timeout=WAIT_S)
        for actor in (*replicas, trainer, server):
            ray.kill(actor)


# ---------------------------------------------------------------- gap


def measure_gaps(folder: Path, shape: str, *, rounds: int, threads: int) -> None:
    from psrl.engines.contract import PauseMode, TurnRequest
    from psrl.engines.torch.architecture import read_architecture
    from psrl.engines.torch.core import TorchCore
    from psrl.engines.torch.weights import load_folder
    from psrl.parameter_server.push import publish_tensors
    from psrl.types import PolicyVersion, SamplingParams

    class TimedCore(TorchCore):
        """Notes when each step ended."""

        def _step(self) -> None:
            began = time.thread_time()
            super()._step()
            cpu.append(time.thread_time() - began)
            ends.append(time.perf_counter())

    ends: list[float] = []
    cpu: list[float] = []
    architecture = read_architecture(folder)
    weights = load_folder(folder, architecture, dtype=torch.float32, device=torch.device("cpu"))
    tensors = tensors_of(folder)
    core = TimedCore(weights, model_name="m", max_num_seqs=NUM_SEQUENCES, num_cache_slots=0, max_model_len=2048, num_threads=threads)
    del weights
    draw = random.Random(1)
    ended = threading.Event()
    for index in range(NUM_SEQUENCES):
        prompt = [draw.randrange(400) for _ in range(PROMPT_TOKENS)]
        core.submit(TurnRequest(request_id=str(index), token_ids=prompt, sampling=SamplingParams(max_tokens=1900)), lambda _: ended.set())
    quiet, staging, swap, seconds, mapped = [], [], [], [], []
    wait_for_steps(ends, 12)
    own_step_s = statistics.median(cpu[2:])
    for version in range(1, rounds + 1):
        shared = publish_tensors(tensors, PolicyVersion(version))
        count = len(ends)
        wait_for_steps(ends, count + 10)
        quiet.append(longest_gap(ends, ends[count], time.perf_counter()))
        mapped += cpu[count:] if version > 1 else []
        began = time.perf_counter()
        core.stage_weights(shared.manifest).result(WAIT_S)
        staged = time.perf_counter()
        core.pause(PauseMode.KEEP, clear_cache=False).result(WAIT_S)
        core.commit_weights(PolicyVersion(version)).result(WAIT_S)
        core.resume().result(WAIT_S)
        resumed = time.perf_counter()
        shared.close()
        count = len(ends)
        wait_for_steps(ends, count + 2)
        staging.append(longest_gap(ends, began, staged))
        swap.append(longest_gap(ends, staged, ends[-1]))
        seconds.append((staged - began, resumed - staged))
    assert not ended.is_set(), "sequences ended while gaps were measured"
    core.close()
    shown = {"undisturbed": quiet, "while staging": staging, "at the swap (keys computed again)": swap}
    print(
        f"{shape}, longest time between two steps of {NUM_SEQUENCES} sequences: "
        + ", ".join(f"{name} {1e3 * statistics.median(gaps):.1f} ms (worst {1e3 * max(gaps):.1f})" for name, gaps in shown.items())
        + f"; staging took {statistics.median(one for one, _ in seconds):.3f} s, pause to resume "
        f"{1e3 * statistics.median(two for _, two in seconds):.1f} ms; a step takes {1e3 * own_step_s:.1f} ms of the engine thread's CPU "
        f"with weights in its own memory, {1e3 * statistics.median(mapped):.1f} ms with mapped ones"
    )


def longest_gap(ends: list[float], since: float, until: float) -> float:
    """Between two steps, of those of which a part lies between the two times."""
    return max(later - earlier for earlier, later in itertools.pairwise(ends) if later >= since and earlier <= until)


def wait_for_steps(ends: list[float], count: int) -> None:
    limit = time.monotonic() + WAIT_S
    while len(ends) <= count:
        assert time.monotonic() < limit, "the engine stands still"
        time.sleep(0.001)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="tiny,smollm2")
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    options = parser.parse_args()
    import ray

    with tempfile.TemporaryDirectory() as temporary:
        folders = {shape: make_model(Path(temporary) / shape, shape) for shape in options.shapes.split(",")}
        for shape, folder in folders.items():
            measure_gaps(folder, shape, rounds=options.rounds, threads=options.threads)
        if not options.replicas:
            return
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
        try:
            for shape, folder in folders.items():
                for num_replicas in map(int, options.replicas.split(",")):
                    measure_syncs(folder, shape, num_replicas=num_replicas, rounds=options.rounds, threads=options.threads)
        finally:
            ray.shutdown()
        print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
