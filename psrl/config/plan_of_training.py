"""What train workers and fine-tuning hold: weights, gradients, optimizer, activations, each from the model's shape and the settings.

Activations are the numbers that a Hugging Face decoder layer keeps for its backward pass, counted with torch's saved-tensor hooks on Llama,
Qwen2 and Qwen3 layers; a test counts them again. Where a rank has a GPU, all of this lies there but what is offloaded; the host holds the
process, and at rank 0 a whole copy of the weights while they are read, and again while they are exported.

Legend: H hidden width, I feed-forward width, Q and K widths of all queries and of all keys, T tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from psrl.config.machine import Machine
from psrl.config.model import ALL_LINEAR, ModelConfig
from psrl.config.model_size import DTYPE_BYTES, ModelSize, read_model_size
from psrl.config.planned_process import MIB, PROCESS_BYTES, PlannedProcess, threads_of
from psrl.config.size_checks import is_sharded
from psrl.config.tree import Config

SFT_MICRO_BATCH_TOKENS = 16384
"""Of `training.sft`; a test holds the two equal."""
MAX_CHUNK_LOGITS = 2**23
"""Of `algorithms.logprobs`; a test holds the two equal."""
LOGIT_COPIES = 3
"""Of a chunk in float32 at once: logits, their softmax, their gradient."""
FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingMemory:
    """Bytes of one rank at the peak of an update, by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    """AdamW's two moments, the critic's too."""
    others: int
    """Reference, and the critic's weights and gradients."""
    gathered: int
    """Layers that are whole for a moment, with their gradients; 0 where nothing is divided."""
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())

    def words(self) -> str:
        """`weights 12 MiB, ...`, without what is not there."""
        return ", ".join(f"{name} {size_bytes / MIB:.0f} MiB" for name, size_bytes in asdict(self).items() if size_bytes)


def train_workers(config: Config, machine: Machine, size: ModelSize) -> PlannedProcess:
    """The ranks of a training run."""
    actor, count, model = config.train_actor_rollout_ref.actor, config.trainer.num_workers, config.train_actor_rollout_ref.model
    memory, tokens = training_memory(config, size), micro_batch_tokens(config)
    # Of rank 0 alone; the plan's rows are equal, so each has its share.
    whole_copy = size.num_parameters * DTYPE_BYTES[model.dtype] // count
    on_gpu = machine.has_gpu_for(config.trainer.device)
    offloaded = _offloaded_bytes(config, memory) if on_gpu else 0
    on_host = PROCESS_BYTES["torch"] + whole_copy + (offloaded if on_gpu else memory.total)
    where = "on its GPU: " if on_gpu else ""
    return PlannedProcess(
        role="train worker",
        count=count,
        num_cores=threads_of(actor.num_threads, machine, count),
        memory_bytes=on_host,
        gpu_bytes=memory.total - offloaded if on_gpu else 0,
        reason=f"{where}{memory.words()} ({tokens} tokens at once); a copy to read and export",
        key="train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    )


def training_memory(config: Config, size: ModelSize) -> TrainingMemory:
    """Of one rank."""
    model, actor = config.train_actor_rollout_ref.model, config.train_actor_rollout_ref.actor
    parts = _ranks_of_a_copy(config)
    param_bytes, compute_bytes = DTYPE_BYTES[model.dtype], DTYPE_BYTES[model.served_dtype]
    weights = size.num_parameters * param_bytes
    trained = adapter_parameters(model, size) * FLOAT32_BYTES if model.lora_rank else weights
    others = critic_weights = 0
    needs_reference = actor.use_kl_loss or config.algorithm.use_kl_in_reward
    if needs_reference and (not model.lora_rank or config.train_actor_rollout_ref.ref.path):
        others += weights
    if config.algorithm.adv_estimator == "gae":
        critic = read_model_size(config.critic.model.path) if config.critic.model.path else size
        critic_weights = critic.num_parameters * param_bytes
        others += 2 * critic_weights
    return TrainingMemory(
        weights=(weights + (trained if model.lora_rank else 0)) // parts,
        gradients=trained // parts,
        optimizer=2 * (trained + critic_weights) // parts,
        others=others // parts,
        gathered=_gathered_bytes(config, size, compute_bytes, is_trained_whole=not model.lora_rank) if is_sharded(config) else 0,
        activations=activation_bytes(
            size, micro_batch_tokens(config), dtype=model.served_dtype, is_checkpointed=actor.gradient_checkpointing
        ),
        logits=_logit_bytes(size, micro_batch_tokens(config)),
    )


def micro_batch_tokens(config: Config) -> int:
    """Most tokens that go through the model at once, padding included."""
    rollout, rows = config.gen_actor_rollout_ref.rollout, config.data.train_batch_size * config.psrl.rollout_n
    most = config.train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    return min(most, rows * (rollout.prompt_length + rollout.response_length))


def fine_tuning(config: Config, machine: Machine) -> PlannedProcess:
    """The ranks of supervised fine-tuning."""
    actor, count, model = config.train_actor_rollout_ref.actor, config.trainer.num_workers, config.train_actor_rollout_ref.model
    size, sft = read_model_size(model.path), config.sft
    whole_copy = size.num_parameters * DTYPE_BYTES[model.dtype] // count  # to save, at rank 0; the plan's rows are equal
    # Weights, gradients and AdamW's two moments.
    states = 4 * size.num_parameters * DTYPE_BYTES[model.dtype] // _ranks_of_a_copy(config)
    tokens = min(max(SFT_MICRO_BATCH_TOKENS, sft.max_length), sft.batch_size * sft.max_length)
    kept = activation_bytes(size, tokens, dtype=model.served_dtype, is_checkpointed=actor.gradient_checkpointing)
    kept += _logit_bytes(size, tokens)
    gathered = " and gathered layers" if is_sharded(config) else ""
    if gathered:
        kept += _gathered_bytes(config, size, DTYPE_BYTES[model.served_dtype], is_trained_whole=not model.lora_rank)
    on_gpu = machine.has_gpu_for(config.trainer.device)
    return PlannedProcess(
        role="fine-tuning",
        count=count,
        num_cores=0,
        memory_bytes=PROCESS_BYTES["torch"] + whole_copy + (0 if on_gpu else states + kept),
        gpu_bytes=states + kept if on_gpu else 0,
        reason=f"weights, gradients, AdamW {states / MIB:.0f} MiB; activations of {tokens} tokens{gathered} {kept / MIB:.0f} MiB",
        key="sft.batch_size" if kept > states else "train_actor_rollout_ref.model.path",
    )


def activation_bytes(size: ModelSize, num_tokens: int, *, dtype: str, is_checkpointed: bool = False) -> int:
    """What the forward pass keeps for the backward pass; checkpointed, the input of each layer and the inside of one.

    Example:
        Llama, H 128, I 384, Q 128, K 64, float32: 4 I + 6 H + 2 (Q + K) = 2,688 numbers per token and layer.
    """
    hidden = size.hidden_size
    layer = _layer_numbers(size, is_half=dtype != "float32")
    per_token = size.num_layers * hidden + layer if is_checkpointed else size.num_layers * layer
    return num_tokens * (per_token + 3 * hidden) * DTYPE_BYTES[dtype]


def adapter_parameters(model: ModelConfig, size: ModelSize) -> int:
    """Of LoRA: rank times (in + out) of each linear layer that has one; layers of other names count nothing."""
    hidden, inner, q, k = size.hidden_size, size.intermediate_size, size.query_width, size.key_width
    widths = {"q_proj": hidden + q, "k_proj": hidden + k, "v_proj": hidden + k, "o_proj": q + hidden}
    widths |= {"gate_proj": hidden + inner, "up_proj": hidden + inner, "down_proj": inner + hidden}
    chosen = widths if model.target_modules == [ALL_LINEAR] else [name for name in widths if name in model.target_modules]
    return model.lora_rank * size.num_layers * sum(widths[name] for name in chosen)


def _ranks_of_a_copy(config: Config) -> int:
    size = config.train_actor_rollout_ref.actor.fsdp_config.fsdp_size
    return config.trainer.num_workers if size == -1 else size


def _layer_numbers(size: ModelSize, *, is_half: bool) -> int:
    """Per token: feed-forward 4 I; two norms 6 H, 8 in half precision; queries, keys, values and attention's output 2 (Q + K)."""
    heads = size.query_width + size.key_width
    numbers = 4 * size.intermediate_size + (8 if is_half else 6) * size.hidden_size + 2 * heads
    return numbers + ((3 if is_half else 2) * heads if size.has_qk_norm else 0)


def _logit_bytes(size: ModelSize, num_tokens: int) -> int:
    return LOGIT_COPIES * FLOAT32_BYTES * min(MAX_CHUNK_LOGITS, num_tokens * size.vocab_size)


def _gathered_bytes(config: Config, size: ModelSize, compute_bytes: int, *, is_trained_whole: bool) -> int:
    """The embedding's unit and two layers (one is fetched ahead), or all; of one layer the gradient, and its copy for the reduction."""
    embedding = size.vocab_size * size.hidden_size
    layer = max(0, size.num_parameters - embedding) // size.num_layers
    keeps_whole = not config.train_actor_rollout_ref.actor.fsdp_config.reshard_after_forward
    whole = size.num_parameters if keeps_whole else embedding + 2 * layer
    largest = max(embedding, layer) if is_trained_whole else 0
    return whole * compute_bytes + largest * (compute_bytes + FLOAT32_BYTES)


def _offloaded_bytes(config: Config, memory: TrainingMemory) -> int:
    fsdp = config.train_actor_rollout_ref.actor.fsdp_config
    if fsdp.offload_policy:
        return memory.weights + memory.gradients + memory.optimizer + memory.others
    return memory.optimizer if fsdp.optimizer_offload else 0
