"""Supervised fine-tuning on token ids with a loss mask: the cold start. One process, or one for each rank of FSDP2; no Ray.

The loss of a step is the mean over all its trained tokens, whatever the micro-batches. Rows are taken in the order given; when they end,
further epochs are shuffled by `sft.seed`.

Legend: N trained tokens of a micro-batch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from psrl.config.actor import FsdpConfig
from psrl.config.model import ModelConfig
from psrl.config.sft import SftConfig
from psrl.errors import RowTooLongError, TrainingError
from psrl.training.export import save_hf_folder
from psrl.training.gradients import add_gradients, clip_gradients
from psrl.training.model import DTYPES, PolicyModel, checkpoint_activations, load_model
from psrl.training.optim import make_optimizer, make_scheduler
from psrl.training.packing import MicroBatch, model_inputs, pack
from psrl.training.sharding import Sharding
from psrl.training.whole_weights import kept_by_first, merged

MAX_MICRO_BATCH_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class SftRow:
    """One demonstration, already in tokens."""

    ids: list[int]  # [T]
    loss_mask: list[int]  # [T]
    """1 where the token is learned; the first token has no predictor and counts as 0."""

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.loss_mask), f"{len(self.ids)} ids, {len(self.loss_mask)} mask values"

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class SftRank:
    """Where a rank of fine-tuning runs, and how the ranks hold the model together."""

    device: str = "cpu"
    rank: int = 0
    world_size: int = 1
    init_method: str = ""
    """Where ranks meet, such as `tcp://127.0.0.1:29500`; not used by one alone."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    gradient_checkpointing: bool = False
    timeout_s: float = 1800.0
    """Of meeting, and of waiting for the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SftProgress:
    """What one optimizer step did."""

    step: int
    """From 1."""
    num_steps: int
    loss: float
    """Nats per trained token."""
    lr: float
    grad_norm: float
    num_tokens: int
    """Without padding."""
    seconds: float
    """Since the start of training."""


def train_sft(
    settings: SftConfig,
    model: ModelConfig,
    rows: Iterable[SftRow],
    *,
    on_step: Callable[[SftProgress], None] | None = None,
    rank: SftRank | None = None,
) -> PolicyModel:
    """Train for `settings.num_steps` and save a Hugging Face folder at `settings.output_path`.

    Every rank calls this with the same arguments, its own `rank` aside; rank 0 saves.

    Args:
        settings: Steps, batch, schedule (linear), seed, output.
        model: Where weights (or, with `from_scratch`, only the architecture) and dtype come from.
        rows: May be a generator: no more are taken than the steps need.
        on_step: Called after every optimizer step.
        rank: Where the model lies; None: in this process alone, on the CPU.

    Returns:
        The trained model.

    Raises:
        RowTooLongError: A row exceeds settings.max_length.
        TrainingError: There are no rows, or a loss or gradient is not finite.
    """
    rank = rank or SftRank()
    torch.manual_seed(settings.seed)
    sharding = Sharding(rank.fsdp, model, device=torch.device(rank.device), rank=rank.rank, world_size=rank.world_size)
    sharding.join(rank.init_method, timeout_s=rank.timeout_s)
    try:
        return _train(settings, model, rows, on_step, rank, sharding)
    finally:
        sharding.leave()


def _train(
    settings: SftConfig,
    model: ModelConfig,
    rows: Iterable[SftRow],
    on_step: Callable[[SftProgress], None] | None,
    rank: SftRank,
    sharding: Sharding,
) -> PolicyModel:
    policy = sharding.load(lambda with_weights: load_model(model, from_scratch=settings.from_scratch, with_weights=with_weights))
    if rank.gradient_checkpointing:
        checkpoint_activations(policy)
    optimizer = make_optimizer(
        policy.parameters(),
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        betas=(0.9, settings.beta2),
        eps=1e-8,
        is_offloaded=rank.fsdp.optimizer_offload,
    )
    scheduler = make_scheduler(
        optimizer, schedule="linear", warmup_steps=settings.warmup_steps, total_steps=settings.num_steps, min_ratio=settings.min_lr_ratio
    )
    start = time.perf_counter()
    for step, batch in enumerate(_batches(rows, settings), start=1):
        loss = _backward(policy, batch, rank)
        grad_norm = clip_gradients(policy, settings.grad_clip)
        if not (torch.isfinite(torch.tensor([loss, grad_norm])).all()):
            raise TrainingError(f"SFT step {step}: loss {loss}, gradient norm {grad_norm}; lower sft.lr")
        lr = float(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        if on_step is not None:
            num_tokens = sum(len(row) for row in batch)
            seconds = time.perf_counter() - start
            on_step(
                SftProgress(
                    step=step, num_steps=settings.num_steps, loss=loss, lr=lr, grad_norm=grad_norm, num_tokens=num_tokens, seconds=seconds
                )
            )

    tensors = kept_by_first(merged(policy, DTYPES[model.dtype]), rank=rank.rank)
    if rank.rank == 0:
        save_hf_folder(policy, tensors, settings.output_path, source=model.tokenizer_path or model.path)
    return policy


def _backward(policy: PolicyModel, batch: list[SftRow], rank: SftRank) -> float:
    """Mean loss of the batch over all ranks, its gradient added to the parameters."""
    total = sum(sum(row.loss_mask[1:]) for row in batch)
    if total == 0:
        raise TrainingError("an SFT batch has no token to learn: every loss mask is 0")
    steps = pack(batch, max_tokens=max(MAX_MICRO_BATCH_TOKENS, max(map(len, batch))), num_ranks=rank.world_size)

    def loss_of(micro_batch: MicroBatch[SftRow]) -> torch.Tensor:
        tensors = [(torch.tensor(row.ids), torch.tensor([0, *row.loss_mask[1:]])) for row in micro_batch.rows]
        inputs = model_inputs(tensors, device=rank.device)
        temperatures_N = torch.ones(len(inputs.chosen), device=rank.device)
        logprobs_N: torch.Tensor = policy(inputs.input_ids, inputs.states, inputs.chosen, temperatures_N)[0]
        return -logprobs_N.sum() / total

    mine = [of_ranks[rank.rank] for of_ranks in steps]
    loss_sum = add_gradients(policy, mine, loss_of, device=rank.device, world_size=rank.world_size)
    if rank.world_size > 1:
        dist.all_reduce(loss_sum)
    return float(loss_sum)


def _batches(rows: Iterable[SftRow], settings: SftConfig) -> Iterator[list[SftRow]]:
    stream = _epochs(rows, settings)
    for _ in range(settings.num_steps):
        yield [next(stream) for _ in range(settings.batch_size)]


def _epochs(rows: Iterable[SftRow], settings: SftConfig) -> Iterator[SftRow]:
    """The rows in order, then again and again in an order drawn from the seed."""
    kept: list[SftRow] = []
    for index, row in enumerate(rows):
        if len(row) > settings.max_length:
            raise RowTooLongError(f"SFT row {index} has {len(row)} tokens, sft.max_length is {settings.max_length}")
        kept.append(row)
        yield row
    if not kept:
        raise TrainingError("SFT has no rows")
    shuffle = random.Random(settings.seed)
    while True:
        shuffle.shuffle(kept)
        yield from kept
