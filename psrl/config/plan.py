"""The processes of a run with their cores and memory, worked out before anything starts.

Memory is an estimate from the model's own files: what must be held, plus what an interpreter with its libraries takes (measured
on Linux). Training and generation alternate while psrl.staleness is 0, so each of them may use every core, and cores are checked
per kind of process; memory is held by all of them at once and is checked as a sum.

Legend: P parameters, L layers, K key-value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import psutil

from psrl.config.gateway_checks import starts_gateway
from psrl.config.plan_of_episodes import rows_of_episodes
from psrl.config.tree import Config
from psrl.errors import ConfigError

MIB = 2**20
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
PROCESS_BYTES = {"plain": 150 * MIB, "torch": 450 * MIB, "ray": 300 * MIB, "smg": 100 * MIB}
"""Resident size of an idle process: of Python with aiohttp; with torch and transformers; of Ray's own head processes together; of SMG."""
WEIGHT_VERSIONS_KEPT = 2
"""Of `runtime.parameter_server`; a test holds the two equal."""
SFT_MICRO_BATCH_TOKENS = 16384
"""Of `training.sft`; a test holds the two equal."""
MEMORY_SHARE = 0.95
"""Of the machine's memory; the rest is the operating system's."""
CGROUP_MEMORY_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
CGROUP_CPU_FILE = "/sys/fs/cgroup/cpu.max"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What this machine has for us: the container's limits where there are any."""

    num_cores: int
    memory_bytes: int
    num_gpus: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """What the model's files say of its size."""

    num_parameters: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    hidden_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedProcess:
    """One kind of process."""

    role: str
    count: int
    num_cores: int
    """Threads that each computes with; 0 for one that mostly waits."""
    memory_bytes: int
    """Of each, at its largest."""
    reason: str
    """What the memory is for."""
    key: str
    """Setting that makes it smaller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All processes of a run."""

    machine: Machine
    processes: tuple[PlannedProcess, ...]

    @property
    def memory_bytes(self) -> int:
        """Of all processes together."""
        return sum(process.count * process.memory_bytes for process in self.processes)

    @property
    def num_processes(self) -> int:
        """How many there are."""
        return sum(process.count for process in self.processes)


def read_machine() -> Machine:
    """Cores that this process may use, memory, CUDA GPUs that the driver lists."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _first_words(CGROUP_CPU_FILE)
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    memory = psutil.virtual_memory().total
    for path in CGROUP_MEMORY_FILES:
        words = _first_words(path)
        if words and words[0].isdigit():
            memory = min(memory, int(words[0]))
    gpus = Path("/proc/driver/nvidia/gpus")
    return Machine(num_cores=cores, memory_bytes=memory, num_gpus=len(list(gpus.iterdir())) if gpus.is_dir() else 0)


def read_model_size(path: str) -> ModelSize:
    """Size of a Hugging Face folder, from config.json and the safetensors headers (weights are not read).

    Raises:
        ConfigError: config.json cannot be read or lacks a number.
    """
    folder = Path(path)
    key = "train_actor_rollout_ref.model.path"
    try:
        content = json.loads((folder / "config.json").read_text())
        layers, hidden, heads = content["num_hidden_layers"], content["hidden_size"], content["num_attention_heads"]
        vocab = content["vocab_size"]
    except (OSError, ValueError, KeyError) as error:
        rule = f"config.json cannot be used ({type(error).__name__}: {error})"
        raise ConfigError(key=key, value=path, rule=rule, fix="name the folder of a Hugging Face causal language model") from error
    width = content["head_dim"] if content.get("head_dim") else hidden // heads
    kv_heads = content["num_key_value_heads"] if content.get("num_key_value_heads") else heads
    counted = sum(_safetensors_elements(file) for file in folder.glob("*.safetensors"))
    # Twelve hidden^2 per layer is the classic transformer; only used for models whose weights are not written yet.
    estimate = vocab * hidden + 12 * layers * hidden * hidden
    return ModelSize(
        num_parameters=counted or estimate,
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_dim=width,
        vocab_size=vocab,
        hidden_size=hidden,
    )


def kv_cache_bytes(size: ModelSize, *, num_slots: int, num_tokens: int, dtype: str) -> int:
    """Keys and values of every slot: 2 * L * K * D numbers per token.

    Example:
        2 layers, 2 heads of width 8, 4 slots of 100 tokens in float32: 2 * 2 * 2 * 8 * 4 * 100 * 4 bytes = 102,400.
    """
    return 2 * size.num_layers * size.num_kv_heads * size.head_dim * num_slots * num_tokens * DTYPE_BYTES[dtype]


def make_plan(config: Config, machine: Machine, *, with_training: bool = True) -> Plan:
    """Work out the processes of a training run, or of validation alone, and whether this machine can hold them.

    Raises:
        ConfigError: It cannot; the message names the largest process and the setting that makes it smaller.
    """
    size = read_model_size(config.train_actor_rollout_ref.model.path)
    processes = (
        PlannedProcess(
            role="controller",
            count=1,
            num_cores=0,
            memory_bytes=PROCESS_BYTES["torch"] + PROCESS_BYTES["ray"],
            reason="driver and Ray's own processes",
            key="data.train_batch_size",
        ),
        *((_train_workers(config, machine, size),) if with_training else ()),
        _engine_replicas(config, machine, size),
        _agent_workers(config),
        *_gateway(config),
        *_of_episodes(config, machine),
        _transfer_queue(config),
        _parameter_server(config, size, with_training=with_training),
    )
    _check_devices(config, machine, with_training=with_training)
    return _checked(Plan(machine=machine, processes=processes))


def make_sft_plan(config: Config, machine: Machine) -> Plan:
    """Work out the one process of supervised fine-tuning and whether this machine can hold it.

    Raises:
        ConfigError: As make_plan.
    """
    size, sft = read_model_size(config.train_actor_rollout_ref.model.path), config.sft
    dtype_bytes = DTYPE_BYTES[config.train_actor_rollout_ref.model.dtype]
    # Weights, gradients and AdamW's two moments; a copy of the weights to save.
    states = size.num_parameters * dtype_bytes * 5
    tokens = min(max(SFT_MICRO_BATCH_TOKENS, sft.max_length), sft.batch_size * sft.max_length)
    kept = _activation_bytes(size, tokens, dtype_bytes)
    process = PlannedProcess(
        role="fine-tuning",
        count=1,
        num_cores=0,
        memory_bytes=PROCESS_BYTES["torch"] + states + kept,
        reason=f"weights, gradients, AdamW {states / MIB:.0f} MiB; activations of {tokens} tokens {kept / MIB:.0f} MiB",
        key="sft.batch_size" if kept > states else "train_actor_rollout_ref.model.path",
    )
    return _checked(Plan(machine=machine, processes=(process,)))


def _checked(plan: Plan) -> Plan:
    _check_cores(plan)
    _check_memory(plan)
    return plan


def _threads(given: int, machine: Machine, count: int) -> int:
    """A setting of 0 shares the cores among `count` processes that compute at the same time."""
    return given or max(1, machine.num_cores // count)


def _train_workers(config: Config, machine: Machine, size: ModelSize) -> PlannedProcess:
    actor, count = config.train_actor_rollout_ref.actor, config.trainer.num_workers
    dtype_bytes = DTYPE_BYTES[config.train_actor_rollout_ref.model.dtype]
    # Weights, gradients and AdamW's two moments, divided among the ranks; a copy of the weights to export.
    states = size.num_parameters * dtype_bytes * 4 // count + size.num_parameters * dtype_bytes
    if actor.use_kl_loss:
        states += size.num_parameters * dtype_bytes // count
    rollout = config.gen_actor_rollout_ref.rollout
    rows = config.data.train_batch_size * config.psrl.rollout_n
    tokens = min(actor.ppo_max_token_len_per_gpu, rows * (rollout.prompt_length + rollout.response_length))
    kept = _activation_bytes(size, tokens, dtype_bytes, is_checkpointed=actor.gradient_checkpointing)
    return PlannedProcess(
        role="train worker",
        count=count,
        num_cores=_threads(actor.num_threads, machine, count),
        memory_bytes=PROCESS_BYTES["torch"] + states + kept,
        reason=f"weights, gradients, AdamW {states / MIB:.0f} MiB; activations of {tokens} tokens {kept / MIB:.0f} MiB",
        key="train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    )


def _activation_bytes(size: ModelSize, num_tokens: int, dtype_bytes: int, *, is_checkpointed: bool = False) -> int:
    # Per token and layer a training forward keeps about 16 hidden widths (attention, MLP of four widths, norms); checkpointing keeps one.
    return num_tokens * size.hidden_size * (size.num_layers * (1 if is_checkpointed else 16) + 16) * dtype_bytes


def _engine_replicas(config: Config, machine: Machine, size: ModelSize) -> PlannedProcess:
    rollout, dtype = config.gen_actor_rollout_ref.rollout, config.train_actor_rollout_ref.model.dtype
    if rollout.name == "scripted":
        memory, reason = PROCESS_BYTES["plain"], "answers from a script"
    else:
        val = config.train_actor_rollout_ref.rollout
        longest = max(each.prompt_length + each.response_length for each in (rollout, val))
        cache = kv_cache_bytes(size, num_slots=rollout.max_num_seqs, num_tokens=longest, dtype=dtype)
        weights = 2 * size.num_parameters * DTYPE_BYTES[dtype]
        logits = rollout.max_num_seqs * size.vocab_size * 4 * 3
        memory = PROCESS_BYTES["torch"] + cache + weights + logits
        reason = f"weights twice while they are read from the disk {weights / MIB:.0f} MiB; KV cache {cache / MIB:.0f} MiB"
    return PlannedProcess(
        role=f"{rollout.name} engine",
        count=rollout.num_replicas,
        num_cores=_threads(rollout.num_threads, machine, rollout.num_replicas),
        memory_bytes=memory,
        reason=reason,
        key="gen_actor_rollout_ref.rollout.max_num_seqs",
    )


def _agent_workers(config: Config) -> PlannedProcess:
    agent = config.gen_actor_rollout_ref.rollout.agent
    graders = config.reward.num_processes * PROCESS_BYTES["plain"]
    return PlannedProcess(
        role="agent worker",
        count=agent.num_workers,
        num_cores=0,
        memory_bytes=PROCESS_BYTES["torch"] + graders,
        reason=f"episodes, tokenizer, {config.reward.num_processes} grading processes",
        key="gen_actor_rollout_ref.rollout.agent.num_workers",
    )


def _gateway(config: Config) -> tuple[PlannedProcess, ...]:
    """SMG, the session router, and the Ray process that keeps them."""
    if not starts_gateway(config):
        return ()
    rollout = config.gen_actor_rollout_ref.rollout
    num_episodes = rollout.agent.num_workers * rollout.agent.max_concurrent_episodes
    # Per token of a session: Python's integers and floats of ids, logprobs and versions.
    sessions = num_episodes * (rollout.prompt_length + rollout.response_length) * 64
    key = "gen_actor_rollout_ref.rollout.agent.max_concurrent_episodes"
    rows = (
        ("gateway", PROCESS_BYTES["plain"], "keeps SMG and the session router"),
        ("SMG", PROCESS_BYTES["smg"], "sends turns to the engines"),
        ("session router", PROCESS_BYTES["torch"] + sessions, f"tokenizer; tokens of {num_episodes} sessions {sessions / MIB:.0f} MiB"),
    )
    return tuple(
        PlannedProcess(role=role, count=1, num_cores=0, memory_bytes=memory, reason=reason, key=key) for role, memory, reason in rows
    )


def _of_episodes(config: Config, machine: Machine) -> tuple[PlannedProcess, ...]:
    """Sandboxes, and what a black-box agent brings for each episode."""
    return tuple(
        PlannedProcess(role=row.role, count=row.count, num_cores=0, memory_bytes=row.memory_bytes, reason=row.reason, key=row.key)
        for row in rows_of_episodes(config, num_cores=machine.num_cores)
    )


def _transfer_queue(config: Config) -> PlannedProcess:
    queue, rollout = config.transfer_queue, config.gen_actor_rollout_ref.rollout
    rows = config.data.train_batch_size * config.psrl.rollout_n
    # Per token: ids and versions 8 bytes each, logprobs and turn indices 4 each, the mask 1.
    row_bytes = (rollout.prompt_length + rollout.response_length) * (8 + 8 + 4 + 4 + 1)
    return PlannedProcess(
        role="TransferQueue",
        count=queue.num_data_storage_units + 1,
        num_cores=0,
        memory_bytes=PROCESS_BYTES["torch"] + rows * row_bytes // queue.num_data_storage_units,
        reason=f"controller and storage of {rows} trajectories",
        key="data.train_batch_size",
    )


def _parameter_server(config: Config, size: ModelSize, *, with_training: bool) -> PlannedProcess:
    versions = weight_versions_at_once(config) if with_training else 0
    shared = versions * size.num_parameters * DTYPE_BYTES[config.train_actor_rollout_ref.model.dtype]
    return PlannedProcess(
        role="parameter server",
        count=1,
        num_cores=0,
        memory_bytes=PROCESS_BYTES["plain"] + shared,
        reason=f"{versions} versions of the weights in shared memory {shared / MIB:.0f} MiB",
        key="train_actor_rollout_ref.model.path",
    )


def weight_versions_at_once(config: Config) -> int:
    """Most versions in the memory that trainer and replicas share: those kept, one that is written, older ones that replicas serve.

    Example:
        staleness 3 and 8 replicas, 7 being written: 6 and 5 are kept, 4 and 3 may still be served: 5 versions.
    """
    served = min(config.gen_actor_rollout_ref.rollout.num_replicas, max(0, config.psrl.staleness - 1))
    return WEIGHT_VERSIONS_KEPT + 1 + served


def _check_devices(config: Config, machine: Machine, *, with_training: bool) -> None:
    wanted = {"gen_actor_rollout_ref.rollout.device": config.gen_actor_rollout_ref.rollout.device}
    if with_training:
        wanted["trainer.device"] = config.trainer.device
    for key, device in wanted.items():
        if device == "cuda" and machine.num_gpus == 0:
            raise ConfigError(key=key, value=device, rule="this machine has no CUDA GPU", fix=f"set {key}=cpu or {key}=auto")


def _check_cores(plan: Plan) -> None:
    for process in plan.processes:
        needed = process.count * process.num_cores
        if needed > plan.machine.num_cores:
            key = "trainer.num_workers" if process.role == "train worker" else "gen_actor_rollout_ref.rollout.num_replicas"
            rule = f"{process.count} x {process.role} of {process.num_cores} threads needs {needed} cores of {plan.machine.num_cores}"
            fix = f"set {key} to at most {max(1, plan.machine.num_cores // process.num_cores)}, or num_threads of that section lower"
            raise ConfigError(key=key, value=process.count, rule=rule, fix=fix)


def _check_memory(plan: Plan) -> None:
    available = int(plan.machine.memory_bytes * MEMORY_SHARE)
    if plan.memory_bytes <= available:
        return
    largest = max(plan.processes, key=lambda process: process.count * process.memory_bytes)
    rule = (
        f"the plan needs {plan.memory_bytes / 2**30:.1f} GiB, this machine has {available / 2**30:.1f}; "
        f"most of it for {largest.count} x {largest.role} ({largest.reason})"
    )
    raise ConfigError(key=largest.key, value=f"{largest.memory_bytes / 2**30:.1f} GiB each", rule=rule, fix=f"lower {largest.key}")


def _first_words(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except OSError:
        return []


def _safetensors_elements(path: Path) -> int:
    """Elements of a safetensors file: an 8-byte little-endian header length, then JSON."""
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
