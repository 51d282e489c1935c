"""One rank of the trainer: a plain object that turns the keys of a batch into updated weights.

`TrainRank` knows neither Ray nor which algorithm it runs. It fetches only the rows that it trains on; what every rank must know of
the others' rows (groups, rewards, lengths) is in the tags. All ranks call every method together, with the same arguments.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from psrl.algorithms.advantages import AdvantageBatch, advantage_estimators
from psrl.algorithms.truncation import has_loss
from psrl.config.actor import ActorConfig, RefConfig
from psrl.config.algorithm import AlgorithmConfig
from psrl.config.model import ModelConfig
from psrl.data_plane import DataPlane, KVBatchMeta
from psrl.errors import ConfigError, DataPlaneError, PsrlError, TrainingError
from psrl.parameter_server.layout import lay_out, pieces_of
from psrl.parameter_server.transports.shared_memory import SharedVersion, publish
from psrl.training.checkpoint import load_checkpoint, save_checkpoint
from psrl.training.export import save_hf_folder
from psrl.training.metrics import StepTotals
from psrl.training.mismatch import with_effective_shares
from psrl.training.model import SHARD_AXIS, PolicyModel, full_tensors, load_model, named_full_tensors, shard
from psrl.training.optim import make_optimizer, make_scheduler
from psrl.training.packing import MicroBatch, pack
from psrl.training.scoring import RowRef, TrainRow, make_row, score
from psrl.training.step import OptimizerStep, Reference
from psrl.training.threads import share_of_cores
from psrl.types import PolicyVersion

ROW_COLUMNS = ("input_ids", "loss_mask", "rollout_logprobs", "policy_versions", "turn_indices")
MiniBatch = list[MicroBatch[TrainRow]]
"""This rank's micro-batches of one optimizer update."""


class TrainRank:
    """Policy, optimizer and (optionally) reference of one rank.

    Call `setup` once, then `train_step`, `publish`, `named_full_tensors`, `save`, `load`, `save_hf` in any order, then `close`.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        actor: ActorConfig,
        ref: RefConfig,
        algorithm: AlgorithmConfig,
        total_steps: int,
        seed: int,
        device: str,
        rank: int,
        world_size: int,
        data_plane: DataPlane,
        timeout_s: float = 600.0,
    ) -> None:
        """`device` is `cpu` or `cuda` (or `cuda:1`); `timeout_s` bounds every collective."""
        if actor.old_logprobs not in ("rollout", "recompute"):
            fix = "use `rollout` or `recompute`"
            raise ConfigError(key="actor.old_logprobs", value=actor.old_logprobs, rule="unknown source", fix=fix)
        self._model_settings = model
        self._actor = actor
        self._ref_settings = ref
        self._algorithm = algorithm
        self._total_steps = total_steps
        self._seed = seed
        self._device = torch.device(device)
        self._rank = rank
        self._world_size = world_size
        self._data_plane = data_plane
        self._timeout_s = timeout_s
        self._estimator = advantage_estimators.resolve(algorithm.adv_estimator)()

    def setup(self, init_method: str) -> None:
        """Join the process group at `init_method` (`tcp://127.0.0.1:<port>` or `file://...`) and load the weights.

        With one rank there is no process group and `init_method` is not used.
        """
        torch.manual_seed(self._seed)
        if self._device.type == "cpu":
            torch.set_num_threads(self._actor.num_threads or share_of_cores(self._world_size))
        if self._world_size > 1:
            dist.init_process_group(
                "nccl" if self._device.type == "cuda" else "gloo",
                init_method=init_method,
                rank=self._rank,
                world_size=self._world_size,
                timeout=timedelta(seconds=self._timeout_s),
            )
            self._mesh = init_device_mesh(self._device.type, (self._world_size,), mesh_dim_names=(SHARD_AXIS,))
        self._policy = self._load(self._model_settings)
        if self._actor.gradient_checkpointing:
            # transformers checkpoints only in training mode; none of its dropouts is on by default in supported models.
            self._policy.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self._policy.train()
        self._reference_model = None
        if self._actor.use_kl_loss:
            path = self._ref_settings.path or self._model_settings.path
            self._reference_model = self._load(ModelConfig(path=path, dtype=self._model_settings.dtype)).requires_grad_(False)
        optim = self._actor.optim
        self._optimizer = make_optimizer(
            self._policy.parameters(), lr=optim.lr, weight_decay=optim.weight_decay, betas=(optim.beta1, optim.beta2), eps=optim.eps
        )
        self._scheduler = make_scheduler(
            self._optimizer,
            schedule=optim.lr_scheduler_type,
            warmup_steps=optim.lr_warmup_steps,
            total_steps=self._total_steps,
            min_ratio=optim.min_lr_ratio,
        )
        self._step = OptimizerStep(
            self._policy,
            self._optimizer,
            self._actor,
            self._algorithm.rollout_correction,
            device=self._device,
            world_size=self._world_size,
        )

    def train_step(self, meta: KVBatchMeta, *, version: PolicyVersion) -> dict[str, float]:
        """Train on the rows of `meta` once per epoch and return this step's metrics, the same on every rank.

        `version` is that of the buffer, which the weights are at before this step.

        Raises:
            TrainingError: A row or a gradient is not usable; RowTooLongError among them.
            DataPlaneError: Rows are missing.
        """
        start = time.perf_counter()
        totals = StepTotals(self._device)
        advantages, mini_batches = self._prepared_or_raised_together(meta, version)
        num_updates = len(mini_batches) * self._actor.ppo_epochs
        proximal, ref = self._reference_logprobs(mini_batches, num_updates)
        grad_norms: list[float] = []
        for epoch in range(self._actor.ppo_epochs):
            for batches in mini_batches:
                measures = epoch == 0 if proximal is not None else not grad_norms
                reference = Reference(proximal=proximal, ref=ref, measures_mismatch=measures)
                grad_norms.append(self._step.run(batches, reference, totals))
        lr = float(self._scheduler.get_last_lr()[0])
        self._scheduler.step()
        metrics = with_effective_shares(totals.read(is_distributed=self._world_size > 1))
        metrics["train/loss/value"] /= num_updates
        seconds = time.perf_counter() - start
        num_tokens = sum(tags["num_tokens"] for tags in meta.tags)
        return metrics | {
            "train/grad_norm/mean": sum(grad_norms) / num_updates,
            "train/grad_norm/max": max(grad_norms),
            "train/lr/value": lr,
            "train/updates/count": float(num_updates),
            "train/rows/count": float(len(meta.keys)),
            "train/rows_without_loss/count": float(sum(not self._has_loss(tags) for tags in meta.tags)),
            "train/rows_with_zero_advantage/count": float(sum(not bool(a.any()) for a in advantages.values())),
            "train/tokens/count": float(num_tokens),
            "train/sampled_tokens/count": float(sum(tags["num_sampled"] for tags in meta.tags)),
            "train/tokens/per_second": num_tokens / seconds,
            "train/step/seconds": seconds,
        }

    def named_full_tensors(self) -> dict[str, Tensor]:
        """Copies of all weights on the CPU by Hugging Face parameter name, tied weights once."""
        return named_full_tensors(self._policy)

    def publish(self, version: PolicyVersion) -> SharedVersion | None:
        """Gather the weights tensor by tensor; rank 0 writes them into memory that its node shares. None on other ranks.

        Raises:
            WeightSyncError: Memory is short.
        """
        tensors = full_tensors(self._policy)
        if self._rank != 0:
            for _ in tensors:
                pass
            return None
        manifest = lay_out(self._policy.causal_lm.named_parameters(), version=version)
        return publish(manifest, pieces_of(tensors, manifest))

    def save(self, path: str | Path) -> None:
        """Checkpoint weights, optimizer, schedule and RNG to a folder. Raises CheckpointError."""
        save_checkpoint(path, self._policy, self._optimizer, self._scheduler, is_distributed=self._world_size > 1)

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint; any number of ranks may read it. Raises CheckpointError."""
        load_checkpoint(path, self._policy, self._optimizer, self._scheduler, is_distributed=self._world_size > 1)

    def save_hf(self, path: str | Path) -> None:
        """Write a plain Hugging Face folder, with the tokenizer's files; rank 0 writes. Raises CheckpointError."""
        tensors = self.named_full_tensors()
        if self._rank == 0:
            source = self._model_settings.tokenizer_path or self._model_settings.path
            save_hf_folder(self._policy, tensors, path, source=source)
        if self._world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group; may be called twice."""
        if self._world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _load(self, settings: ModelConfig) -> PolicyModel:
        policy = load_model(settings, device=self._device)
        return shard(policy, self._mesh) if self._world_size > 1 else policy

    def _has_loss(self, tags: Mapping[str, object]) -> bool:
        return has_loss(tags, mask_truncated=self._algorithm.mask_truncated)

    def _advantages(self, meta: KVBatchMeta) -> dict[str, Tensor]:
        needed = self._estimator.needed_columns
        columns = self._data_plane.fetch(meta.keys, needed) if needed else ()
        estimates = self._estimator.estimate(AdvantageBatch(tags=meta.tags, columns=columns), self._algorithm)
        return dict(zip(meta.keys, estimates, strict=True))

    def _prepared_or_raised_together(self, meta: KVBatchMeta, version: PolicyVersion) -> tuple[dict[str, Tensor], list[MiniBatch]]:
        """(advantages by key, mini-batches). A rank whose rows are unusable must not leave the others waiting in a collective."""
        advantages: dict[str, Tensor] = {}
        mini_batches: list[MiniBatch] = []
        error: PsrlError | None = None
        try:
            advantages = self._advantages(meta)
            mini_batches = self._mini_batches(meta, advantages, version)
        except (TrainingError, DataPlaneError) as raised:
            error = raised
        if self._world_size > 1:
            has_failed = torch.tensor(float(error is not None), device=self._device)
            dist.all_reduce(has_failed, op=dist.ReduceOp.MAX)
            if error is None and has_failed:
                error = TrainingError("another rank could not use its rows; its own error names them")
        if error is not None:
            raise error
        return advantages, mini_batches

    def _mini_batches(self, meta: KVBatchMeta, advantages: Mapping[str, Tensor], version: PolicyVersion) -> list[MiniBatch]:
        """Pack every optimizer update the same way on every rank, then fetch only this rank's rows."""
        tags_of = dict(zip(meta.keys, meta.tags, strict=True))
        mine: list[list[MicroBatch[RowRef]]] = []
        for keys in _keys_by_update(meta, self._actor.ppo_mini_batch_size):
            refs = [RowRef(key, tags_of[key]["num_tokens"]) for key in keys if self._has_loss(tags_of[key])]
            if not refs:
                continue
            steps = pack(refs, max_tokens=self._actor.ppo_max_token_len_per_gpu, num_ranks=self._world_size)
            mine.append([micro_batches[self._rank] for micro_batches in steps])
        if not mine:
            raise TrainingError(f"none of the {len(meta.keys)} trajectories has a loss (all cut by a limit, or the batch is empty)")
        refs = [ref for batches in mine for batch in batches for ref in batch.rows]
        fetched = self._data_plane.fetch([ref.key for ref in refs], ROW_COLUMNS) if refs else []
        rows = {
            ref.key: make_row(ref, columns, advantages[ref.key], float(tags_of[ref.key]["temperature"]), version=version)
            for ref, columns in zip(refs, fetched, strict=True)
        }
        return [[MicroBatch(tuple(rows[ref.key] for ref in batch.rows)) for batch in batches] for batches in mine]

    def _reference_logprobs(
        self, mini_batches: Sequence[MiniBatch], num_updates: int
    ) -> tuple[Mapping[str, Tensor] | None, Mapping[str, Tensor] | None]:
        """Proximal and reference logprobs by key; None as `Reference` says.

        With one update, the forward pass of the update itself gives the proximal ones; with several, they are computed once here, before
        the first, for all of them.
        """
        batches = [batch for mini_batch in mini_batches for batch in mini_batch]
        is_recomputed = self._actor.old_logprobs == "recompute" and num_updates > 1
        proximal = score(self._policy, batches, self._device) if is_recomputed else None
        ref = score(self._reference_model, batches, self._device) if self._reference_model is not None else None
        return proximal, ref


def _keys_by_update(meta: KVBatchMeta, groups_per_update: int) -> list[list[str]]:
    """Keys of each optimizer update: whole groups, in the order in which they first appear; 0 takes all."""
    by_group: dict[str, list[str]] = {}
    for key, tags in zip(meta.keys, meta.tags, strict=True):
        by_group.setdefault(tags["group"], []).append(key)
    groups = list(by_group.values())
    size = groups_per_update or max(1, len(groups))
    return [[key for group in groups[start : start + size] for key in group] for start in range(0, len(groups), size)]
