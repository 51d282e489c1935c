"""From the rewards of a step's trajectories to the advantages of their tokens, on every rank alike.

Baselines need whole groups and statistics whole batches, so every rank estimates over all trajectories: what it needs of the others' rows
is in tags, in columns that the estimator asks for, and in values that the ranks tell each other.

Legend: T tokens of a row, n sampled tokens of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from psrl.algorithms.advantages import AdvantageBatch, advantage_estimators
from psrl.algorithms.advantages.tokens import TOKEN_COLUMNS, spread_over_tokens
from psrl.algorithms.truncation import has_loss
from psrl.config.algorithm import AlgorithmConfig
from psrl.data_plane import DataPlane, KVBatchMeta
from psrl.errors import ConfigError
from psrl.training.scoring import TrainRow

NOTHING = torch.zeros(0)
"""Values of a trajectory that the critic has not seen, because it has no loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCredit:
    """By trajectory key."""

    advantages: Mapping[str, Tensor]
    """A scalar or [T]."""
    returns: Mapping[str, Tensor]
    """[n]; empty without a critic."""

    def of(self, rows: Iterable[TrainRow]) -> dict[str, Tensor]:
        """Advantages [n] of rows."""
        return {row.key: self.advantages[row.key].float().expand(len(row))[row.mask] for row in rows}


class Credit:
    """The estimator of `algorithm.adv_estimator`, over the data plane."""

    def __init__(self, settings: AlgorithmConfig, data_plane: DataPlane, *, world_size: int) -> None:
        """Raises ConfigError where the name is of nothing, or a KL would be taken from rewards that the estimator does not read."""
        self._settings = settings
        self._data_plane = data_plane
        self._world_size = world_size
        self._estimator = advantage_estimators.resolve(settings.adv_estimator)()
        if settings.use_kl_in_reward and not set(TOKEN_COLUMNS) <= set(self._estimator.needed_columns):
            rule = f"has no effect: {settings.adv_estimator} does not have {' and '.join(TOKEN_COLUMNS)} among its needed_columns"
            raise ConfigError(key="algorithm.use_kl_in_reward", value=True, rule=rule, fix="set it to false, or name these columns")

    @property
    def needs_critic(self) -> bool:
        """Whether `estimate` needs values."""
        return self._estimator.needs_critic

    def columns_of(self, meta: KVBatchMeta) -> Sequence[Mapping[str, Tensor]]:
        """What the estimator needs beside the tags. Raises DataPlaneError."""
        needed = self._estimator.needed_columns
        return self._data_plane.fetch(meta.keys, needed) if needed else ()

    def less_kl(
        self, meta: KVBatchMeta, columns: Sequence[Mapping[str, Tensor]], kl: Mapping[str, Tensor]
    ) -> Sequence[Mapping[str, Tensor]]:
        """The columns with `kl_ctrl.kl_coef` times a token's KL [n] taken from its reward, where `kl` has the trajectory."""
        less: list[Mapping[str, Tensor]] = []
        for key, of_row in zip(meta.keys, columns, strict=True):
            if key not in kl:
                less.append(of_row)
                continue
            (kl_T,) = spread_over_tokens([kl[key]], [of_row])
            less.append({**of_row, "rewards": of_row["rewards"] - self._settings.kl_ctrl.kl_coef * kl_T})
        return less

    def of_all_ranks(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What this rank has by key of its rows, [n] each, and what the others have of theirs; all ranks call it together."""
        if self._world_size == 1:
            return values
        parts: list[Mapping[str, Tensor]] = [{} for _ in range(self._world_size)]
        dist.all_gather_object(parts, dict(values))
        return {key: each for part in parts for key, each in part.items()}

    def estimate(self, meta: KVBatchMeta, columns: Sequence[Mapping[str, Tensor]], values: Mapping[str, Tensor]) -> StepCredit:
        """Advantages of every trajectory of the step; `values` are of all ranks' rows.

        Raises:
            TrainingError: A reward cannot be used.
        """
        has_losses = [has_loss(tags, mask_truncated=self._settings.mask_truncated) for tags in meta.tags]
        per_row = [values[key] if is_trained else NOTHING for key, is_trained in zip(meta.keys, has_losses, strict=True)] if values else ()
        batch = AdvantageBatch(tags=meta.tags, has_loss=has_losses, columns=columns, values=per_row)
        estimates = self._estimator.estimate(batch, self._settings)
        return StepCredit(
            advantages=dict(zip(meta.keys, estimates.advantages, strict=True)),
            returns=dict(zip(meta.keys, estimates.returns, strict=True)) if estimates.returns else {},
        )
