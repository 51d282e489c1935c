"""Rows that are trained on, and logprobs of their sampled tokens under a model that is not being updated.

Legend: T tokens of a row, n trained tokens of a row, N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from psrl.errors import TrainingError
from psrl.training.model import PolicyModel
from psrl.training.packing import MicroBatch, ModelInputs, model_inputs
from psrl.training.sharding import put_away
from psrl.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class RowRef:
    """A row by its key, before its tensors are fetched; what every rank packs."""

    key: str
    num_tokens: int

    def __len__(self) -> int:
        return self.num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRow:
    """One trajectory, as it was fetched: all that its loss needs beside its advantages."""

    key: str
    ids: Tensor  # [T]
    mask: Tensor  # [T]
    """1 where the policy sampled the token."""
    rollout_logprobs: Tensor  # [n]
    turns: Tensor  # [n]
    version_gaps: Tensor  # [n]
    """How many versions older than the weights at the start of the buffer those were that sampled the token."""
    temperature: float

    def __len__(self) -> int:
        return len(self.ids)


def make_row(ref: RowRef, columns: dict[str, Tensor], temperature: float, *, version: PolicyVersion) -> TrainRow:
    """Check a fetched row and pick out its trained tokens.

    Args:
        ref: The row's key and length.
        columns: `input_ids`, `loss_mask`, `rollout_logprobs`, `policy_versions`, `turn_indices`; [T] each.
        temperature: At which the row was sampled.
        version: Of the weights at the start of the buffer.

    Raises:
        TrainingError: Lengths differ, a logprob is not finite, nothing was sampled, the temperature has no distribution, or a token
            was sampled by no version or by a later one.
    """
    mask = columns["loss_mask"].bool()
    lengths = {name: len(column) for name, column in columns.items()}
    if set(lengths.values()) != {ref.num_tokens}:
        raise TrainingError(f"row {ref.key} has {ref.num_tokens} tokens by its tags, its columns have {lengths}")
    if not temperature > 0:
        raise TrainingError(f"row {ref.key} was sampled at temperature {temperature}; only sampled rows can be trained on")
    if not mask.any() or mask[0]:
        raise TrainingError(f"row {ref.key}: no sampled token, or its first token is one (nothing predicts it)")
    rollout = columns["rollout_logprobs"][mask].float()
    if not torch.isfinite(rollout).all():
        raise TrainingError(f"row {ref.key}: the engine reported a logprob that is not finite")
    versions = columns["policy_versions"][mask].long()
    gaps = version - versions
    if versions.min() < 0 or gaps.min() < 0:
        seen = sorted(set(versions.tolist()))
        raise TrainingError(f"row {ref.key}: tokens of policy versions {seen} in the buffer of version {version}")
    return TrainRow(
        key=ref.key,
        ids=columns["input_ids"].long(),
        mask=mask,
        rollout_logprobs=rollout,
        turns=columns["turn_indices"][mask].long(),
        version_gaps=gaps,
        temperature=temperature,
    )


def batch_of(batch: MicroBatch[TrainRow], device: torch.device) -> tuple[ModelInputs, Tensor]:
    """The tensors of a micro-batch and the temperature [N] of each scored token."""
    inputs = model_inputs([(row.ids, row.mask) for row in batch.rows], arrangement=batch.arrangement, device=device)
    temperatures = [torch.full((len(row.turns),), row.temperature) for row in batch.rows]
    return inputs, torch.cat(temperatures).to(device) if batch.rows else torch.ones(0, device=device)


@torch.no_grad()
def score(model: PolicyModel, batches: Sequence[MicroBatch[TrainRow]], device: torch.device) -> dict[str, Tensor]:
    """Logprobs [n] of the sampled tokens of each row, by key, at the row's temperature.

    Every rank must call this with the same number of micro-batches.
    """
    scored = {}
    for batch in batches:
        inputs, temperatures_N = batch_of(batch, device)
        logprobs_N, _ = model(inputs.input_ids, inputs.states, inputs.chosen, temperatures_N, layout=inputs.layout)
        parts = logprobs_N.split([len(row.turns) for row in batch.rows]) if batch.rows else ()
        scored.update({row.key: part for row, part in zip(batch.rows, parts, strict=True)})
    put_away(model)
    return scored
