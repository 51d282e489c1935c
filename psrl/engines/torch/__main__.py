"""`python -m psrl.engines.torch --model-path FOLDER`: the torch engine as a process."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from psrl.engines.serving import add_engine_arguments, serve
from psrl.errors import EngineError
from psrl.processes.serving import die_with_parent

MEMORY_SHARE = 0.8
"""Of the free memory that the KV cache may take."""


def main() -> int:
    """Load, then serve until told to stop; 1 with one line on stderr when the model cannot be served."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser(prog="psrl.engines.torch")
    parser.add_argument("--model-path", type=Path, required=True, help="Hugging Face folder with config.json and *.safetensors")
    parser.add_argument("--num-cache-slots", type=int, default=None, help="ended turns whose keys are kept; default max-num-seqs")
    parser.add_argument("--max-model-len", type=int, default=None, help="default: the model's own, at most 2048")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    add_engine_arguments(parser)
    arguments = parser.parse_args()
    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    try:
        core = build_core(arguments)
    except EngineError as error:
        print(f"torch engine: {error}", file=sys.stderr, flush=True)
        return 1
    print(f"torch engine: ready after {time.perf_counter() - began:.1f} s", flush=True)
    serve(core, arguments)
    return 0


def build_core(arguments: argparse.Namespace):  # noqa: ANN201 (torch is imported late, after the parent is watched)
    """Read the model and take the cache's memory.

    Raises:
        EngineError: The model is not supported, or the cache does not fit.
    """
    import psutil
    import torch

    from psrl.engines.torch.architecture import read_architecture
    from psrl.engines.torch.core import TorchCore
    from psrl.engines.torch.slots import cache_bytes, num_slots_of
    from psrl.engines.torch.weights import load_folder

    torch.set_num_threads(arguments.num_threads)
    shape = read_architecture(arguments.model_path)
    max_len = arguments.max_model_len or min(shape.max_position_embeddings, 2048)
    if max_len > shape.max_position_embeddings:
        raise EngineError(f"--max-model-len {max_len} is more than the model's {shape.max_position_embeddings} positions")
    dtype, device = getattr(torch, arguments.dtype), torch.device(arguments.device)
    num_cache_slots = arguments.max_num_seqs if arguments.num_cache_slots is None else arguments.num_cache_slots
    num_slots = num_slots_of(arguments.max_num_seqs, num_cache_slots)
    needed = cache_bytes(shape, num_slots=num_slots, max_len=max_len, dtype=dtype)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    print(
        f"torch engine: KV cache {needed / 2**20:.0f} MiB ({num_slots} slots of {max_len} tokens), {free / 2**20:.0f} MiB free", flush=True
    )
    if needed > MEMORY_SHARE * free:
        raise EngineError(
            f"KV cache of {needed / 2**20:.0f} MiB does not fit into {MEMORY_SHARE:.0%} of {free / 2**20:.0f} MiB; "
            "lower --max-num-seqs, --num-cache-slots or --max-model-len"
        )
    weights = load_folder(arguments.model_path, shape, dtype=dtype, device=device)
    return TorchCore(
        weights,
        model_name=arguments.model_path.name,
        max_num_seqs=arguments.max_num_seqs,
        num_cache_slots=num_cache_slots,
        max_model_len=max_len,
        num_threads=arguments.num_threads,
    )


if __name__ == "__main__":
    sys.exit(main())
