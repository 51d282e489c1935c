"""`python -m psrl.engines.vllm --model-path FOLDER`: vLLM as an engine of psrl, by the Python of vLLM's virtual environment."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from psrl.config.model_size import kv_cache_bytes, read_model_size
from psrl.engines.serving import add_engine_arguments, serve
from psrl.errors import PsrlError
from psrl.processes.guard import start_guard
from psrl.processes.serving import die_with_parent

CPU_BLOCK_TOKENS = 32
"""Tokens of a block of keys, which a prefix is shared by; vLLM's default of 128 on CPUs shares little of a short prompt."""


def main() -> int:
    """Start vLLM, then serve until told to stop; 1 with one line on stderr when it cannot."""
    began = time.perf_counter()
    arguments = _arguments()
    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    if os.getpgid(0) == os.getpid():
        start_guard(of_group=True)
    set_environment(arguments)
    try:
        if arguments.node_rank:
            from psrl.engines.vllm.follower import follow

            return follow(engine_arguments(arguments), arguments)
        core = build_core(arguments)
    except (PsrlError, RuntimeError, ValueError, OSError) as error:  # vLLM's own start raises these
        print(f"vllm engine: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    print(f"vllm engine: ready after {time.perf_counter() - began:.1f} s", flush=True)
    serve(core, arguments)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="psrl.engines.vllm")
    parser.add_argument("--model-path", type=Path, required=True, help="Hugging Face folder with config.json and *.safetensors")
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--num-threads", type=int, default=1, help="of each worker, on CPUs")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--data-parallel-size", type=int, default=1)
    parser.add_argument("--num-nodes", type=int, default=1, help="that this instance spans")
    parser.add_argument("--node-rank", type=int, default=0, help="0 serves; the others hold workers for it")
    parser.add_argument("--node-address", default="127.0.0.1", help="of this node, on a private network: the other nodes connect to it")
    parser.add_argument("--node-interface", default=None, help="network interface with that address")
    parser.add_argument("--meeting-address", default="127.0.0.1", help="the first node's")
    parser.add_argument("--meeting-port", type=int, default=0, help="a free one of the first node")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add_engine_arguments(parser)
    return parser.parse_args()


def set_environment(arguments: argparse.Namespace) -> None:
    """What vLLM and OpenMP read when they are imported, here and in vLLM's own processes."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    if arguments.num_nodes > 1:
        os.environ["VLLM_HOST_IP"] = arguments.node_address
        if arguments.node_interface is not None:
            os.environ.update(GLOO_SOCKET_IFNAME=arguments.node_interface, NCCL_SOCKET_IFNAME=arguments.node_interface)
    if arguments.device != "cpu":
        return
    # Threads are given out by psrl; bound ones of two replicas would share one core, and waiting ones must leave it to others.
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=str(arguments.num_threads), OMP_WAIT_POLICY="PASSIVE")
    if _world_size(arguments) == 1:
        # The worker then lives in the engine's process: one process less, and no two that spin while they wait for each other.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def build_core(arguments: argparse.Namespace):  # noqa: ANN201 (vLLM is imported late, after the parent is watched)
    """Start vLLM with these arguments, and print what it made of them.

    Raises:
        EngineError: The model has no weights.
        ConfigError: Its config.json cannot be read.
    """
    from psrl.engines.vllm.core import VllmCore

    return VllmCore(engine_arguments(arguments), model_path=arguments.model_path)


def engine_arguments(arguments: argparse.Namespace):  # noqa: ANN201 (as above)
    """vLLM's own arguments, the same on all nodes of an instance but for the node's rank.

    Raises:
        ConfigError: The model's config.json cannot be read.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    is_cpu = arguments.device == "cpu"
    given = {
        "model": str(arguments.model_path),
        "dtype": arguments.dtype,
        "max_model_len": arguments.max_model_len,
        "max_num_seqs": arguments.max_num_seqs,
        "max_num_batched_tokens": max(arguments.max_num_batched_tokens, arguments.max_num_seqs),
        "tensor_parallel_size": arguments.tensor_parallel_size,
        "pipeline_parallel_size": arguments.pipeline_parallel_size,
        "data_parallel_size": arguments.data_parallel_size,
        "enforce_eager": arguments.enforce_eager,
        "enable_prefix_caching": arguments.enable_prefix_caching,
        "scheduling_policy": "priority",
        "logprobs_mode": "processed_logprobs",
    }
    if is_cpu:
        given |= {"kv_cache_memory_bytes": cpu_cache_bytes(arguments), "block_size": CPU_BLOCK_TOKENS}
        given |= {"distributed_executor_backend": "uni"} if _world_size(arguments) == 1 else {}
    else:
        given |= {"gpu_memory_utilization": arguments.gpu_memory_utilization}
    if arguments.num_nodes > 1:
        given |= {"distributed_executor_backend": "mp", "nnodes": arguments.num_nodes, "node_rank": arguments.node_rank}
        given |= {"master_addr": arguments.meeting_address, "master_port": arguments.meeting_port}
    print("vllm engine: " + ", ".join(f"{name}={value}" for name, value in given.items()), flush=True)
    return AsyncEngineArgs(
        **given,
        skip_tokenizer_init=True,  # ids in, ids out
        generation_config="vllm",  # sampling is the request's alone, nothing of the model's folder
        worker_extension_cls="psrl.engines.vllm.worker_extension.PsrlWorker",
        disable_log_stats=True,
    )


def cpu_cache_bytes(arguments: argparse.Namespace) -> int:
    """Keys and values of twice as many full-length sequences as run at once, so that prefixes of ended turns stay for a while."""
    length = -(-arguments.max_model_len // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS
    size = read_model_size(str(arguments.model_path))
    num_bytes = kv_cache_bytes(size, num_slots=2 * arguments.max_num_seqs, num_tokens=length, dtype=arguments.dtype)
    return num_bytes // _world_size(arguments)


def _world_size(arguments: argparse.Namespace) -> int:
    return arguments.tensor_parallel_size * arguments.pipeline_parallel_size


if __name__ == "__main__":
    sys.exit(main())
