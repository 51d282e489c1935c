"""One rank of the trainer: a plain object that turns the keys of a batch into updated weights.

`TrainRank` knows neither Ray nor which algorithm it runs. It fetches only the rows that it trains on; what every rank must know of
the others' rows (groups, rewards, lengths) is in the tags. All ranks call every method together, with the same arguments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from psrl.algorithms.kl import kl_estimator
from psrl.algorithms.truncation import has_loss
from psrl.config.actor import ActorConfig, RefConfig
from psrl.config.algorithm import AlgorithmConfig
from psrl.config.critic import CriticConfig
from psrl.config.model import ModelConfig
from psrl.data_plane import DataPlane, KVBatchMeta
from psrl.errors import ConfigError, DataPlaneError, PsrlError, TrainingError
from psrl.parameter_server.layout import lay_out, pieces_of
from psrl.parameter_server.transports.shared_memory import SharedVersion, publish
from psrl.training.adapter import lora_config, without_adapter
from psrl.training.checkpoint import load_checkpoint, save_checkpoint
from psrl.training.credit import Credit, StepCredit
from psrl.training.critic import Critic, ValueModel, ValueTargets, load_value_model, with_explained_variance
from psrl.training.export import Adapter, save_hf_folder
from psrl.training.gradients import joined
from psrl.training.heap import Heap
from psrl.training.metrics import StepTotals
from psrl.training.mismatch import with_effective_shares
from psrl.training.model import DTYPES, PolicyModel, checkpoint_activations, load_model
from psrl.training.optim import make_optimizer, make_scheduler
from psrl.training.packing import MicroBatch, arrangement_of, pack
from psrl.training.scoring import RowRef, TrainRow, make_row, score
from psrl.training.sharding import Sharding
from psrl.training.step import OptimizerStep, Reference
from psrl.training.threads import share_of_cores
from psrl.training.whole_weights import adapter, kept_by_first, merged, named_full_tensors, published, published_shapes
from psrl.types import PolicyVersion

ROW_COLUMNS = ("input_ids", "loss_mask", "rollout_logprobs", "policy_versions", "turn_indices")
MiniBatch = list[MicroBatch[TrainRow]]
"""This rank's micro-batches of one optimizer update."""
Result = TypeVar("Result")


class TrainRank:
    """Policy, optimizer and (where the algorithm needs them) reference and critic of one rank.

    Call `setup` once, then `train_step`, `publish`, `named_full_tensors`, `save`, `load`, `save_hf` in any order, then `close`.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        actor: ActorConfig,
        ref: RefConfig,
        algorithm: AlgorithmConfig,
        critic: CriticConfig,
        critic_warmup: int = 0,
        total_steps: int,
        seed: int,
        device: str,
        rank: int,
        world_size: int,
        data_plane: DataPlane,
        timeout_s: float = 600.0,
    ) -> None:
        """`device` is `cpu` or `cuda` (or `cuda:1`); `timeout_s` bounds every collective.

        `critic` counts for advantage estimators that need one; the policy and its schedule stand still in the first `critic_warmup` steps.
        """
        if actor.old_logprobs not in ("rollout", "recompute"):
            fix = "use `rollout` or `recompute`"
            raise ConfigError(key="actor.old_logprobs", value=actor.old_logprobs, rule="unknown source", fix=fix)
        self._model_settings = model
        self._actor = actor
        self._ref_settings = ref
        self._algorithm = algorithm
        self._critic_settings = critic
        self._critic_warmup = critic_warmup
        self._total_steps = total_steps
        self._seed = seed
        self._device = torch.device(device)
        self._rank = rank
        self._world_size = world_size
        self._data_plane = data_plane
        self._timeout_s = timeout_s
        self._arrangement = arrangement_of(use_remove_padding=actor.use_remove_padding, use_prefix_grouper=actor.use_prefix_grouper)
        self._sharding = Sharding(actor.fsdp_config, model, device=self._device, rank=rank, world_size=world_size)
        self._credit = Credit(algorithm, data_plane, world_size=world_size)
        self._needs_reference = actor.use_kl_loss or algorithm.use_kl_in_reward
        self._heap = Heap()

    def setup(self, init_method: str) -> None:
        """Join the process group at `init_method` (`tcp://127.0.0.1:<port>` or `file://...`) and load the weights.

        With one rank there is no process group and `init_method` is not used.
        """
        torch.manual_seed(self._seed)
        if self._device.type == "cpu":
            torch.set_num_threads(self._actor.num_threads or share_of_cores(self._world_size))
        self._sharding.join(init_method, timeout_s=self._timeout_s)
        self._policy = self._load(self._model_settings)
        if self._actor.gradient_checkpointing:
            checkpoint_activations(self._policy)
        self._reference_model = None
        has_own_weights = self._ref_settings.path is not None or self._model_settings.lora_rank == 0
        if self._needs_reference and has_own_weights:
            path = self._ref_settings.path or self._model_settings.path
            self._reference_model = self._load(ModelConfig(path=path, dtype=self._model_settings.dtype)).requires_grad_(False)
        self._critic = self._make_critic() if self._credit.needs_critic else None
        optim = self._actor.optim
        self._optimizer = make_optimizer(
            self._policy.parameters(),
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            is_offloaded=self._actor.fsdp_config.optimizer_offload,
        )
        self._scheduler = make_scheduler(
            self._optimizer,
            schedule=optim.lr_scheduler_type,
            warmup_steps=optim.lr_warmup_steps,
            total_steps=self._total_steps - (self._critic_warmup if self._critic else 0),
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
        columns, mini_batches = self._agreed(lambda: (self._credit.columns_of(meta), self._mini_batches(meta, version)))
        ref = self._reference_logprobs(mini_batches) if self._needs_reference else None
        if ref is not None and self._algorithm.use_kl_in_reward:
            columns = self._less_kl(meta, columns, mini_batches, ref, totals)
        credit, metrics = self._credited(meta, columns, mini_batches, totals)
        if self._critic is None or version >= self._critic_warmup:
            metrics |= self._learn(mini_batches, credit, ref if self._actor.use_kl_loss else None, totals)
        metrics |= with_explained_variance(with_effective_shares(totals.read(is_distributed=self._world_size > 1)))
        if "train/loss/value" in metrics:
            metrics["train/loss/value"] /= metrics["train/updates/count"]
        seconds = time.perf_counter() - start
        num_tokens = sum(tags["num_tokens"] for tags in meta.tags)
        self._heap.give_back()
        return metrics | {
            "train/rows/count": float(len(meta.keys)),
            "train/rows_without_loss/count": float(sum(not self._has_loss(tags) for tags in meta.tags)),
            "train/rows_with_zero_advantage/count": float(sum(not bool(a.any()) for a in credit.advantages.values())),
            "train/tokens/count": float(num_tokens),
            "train/sampled_tokens/count": float(sum(tags["num_sampled"] for tags in meta.tags)),
            "train/tokens/per_second": num_tokens / seconds,
            "train/step/seconds": seconds,
        }

    def named_full_tensors(self) -> dict[str, Tensor]:
        """Copies of all weights on the CPU by Hugging Face parameter name, tied weights once, adapters merged."""
        return named_full_tensors(self._policy)

    def publish(self, version: PolicyVersion) -> SharedVersion | None:
        """Gather the weights tensor by tensor; rank 0 writes them into memory that its node shares. None on other ranks.

        Raises:
            WeightSyncError: Memory is short.
        """
        tensors = published(self._policy, self._model_settings)
        if self._rank != 0:
            for _ in tensors:
                pass
            return None
        manifest = lay_out(published_shapes(self._policy, self._model_settings), version=version)
        return publish(manifest, pieces_of(tensors, manifest))

    def save(self, path: str | Path) -> None:
        """Checkpoint weights, optimizer, schedule and RNG to a folder, the critic's too. Raises CheckpointError."""
        save_checkpoint(path, self._policy, self._optimizer, self._scheduler, is_distributed=self._sharding.is_sharded)
        if self._critic is not None:
            self._critic.save(Path(path))

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint; any number of ranks may read it. Raises CheckpointError."""
        if self._critic is not None:
            self._critic.load(Path(path))
        load_checkpoint(path, self._policy, self._optimizer, self._scheduler, is_distributed=self._sharding.is_sharded)

    def save_hf(self, path: str | Path, *, dtype: str | None = None) -> None:
        """Write a plain Hugging Face folder, by default in `model.dtype`, with the tokenizer's files; rank 0 writes.

        With an adapter the weights are merged, and the adapter alone lies in `adapter/`, as peft reads it.

        Raises:
            CheckpointError: The disk refused.
        """
        settings = self._model_settings
        whole = kept_by_first(merged(self._policy, DTYPES[dtype or settings.dtype]), rank=self._rank)
        low_rank = kept_by_first(adapter(self._policy), rank=self._rank)
        if self._rank == 0:
            source = settings.tokenizer_path or settings.path
            save_hf_folder(self._policy, whole, path, source=source, adapter=Adapter(lora_config(settings), low_rank) if low_rank else None)
        if self._world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group; may be called twice."""
        self._sharding.leave()

    def _make_critic(self) -> Critic:
        settings = self._critic_settings, self._model_settings
        model = self._sharding.load(lambda with_weights: load_value_model(*settings, with_weights=with_weights))
        self._check_rows(model, self._critic_settings.model.path or self._model_settings.path)
        if self._actor.gradient_checkpointing:
            checkpoint_activations(model)
        return Critic(
            model,
            self._critic_settings,
            self._actor,
            total_steps=self._total_steps,
            device=self._device,
            world_size=self._world_size,
            is_sharded=self._sharding.is_sharded,
        )

    def _load(self, settings: ModelConfig) -> PolicyModel:
        policy = self._sharding.load(lambda with_weights: load_model(settings, with_weights=with_weights))
        self._check_rows(policy, settings.path)
        return policy

    def _check_rows(self, model: PolicyModel | ValueModel, path: str) -> None:
        """Raises ConfigError where rows would be packed and the model cannot keep them apart."""
        if self._actor.use_remove_padding and not model.can_pack_rows:
            key, rule = "train_actor_rollout_ref.actor.use_remove_padding", f"the layers of {path} are not plain attention"
            raise ConfigError(key=key, value=True, rule=rule, fix="set it to false")

    def _has_loss(self, tags: Mapping[str, object]) -> bool:
        return has_loss(tags, mask_truncated=self._algorithm.mask_truncated)

    def _agreed(self, prepare: Callable[[], Result]) -> Result:
        """What `prepare` gives. A rank whose rows are unusable must not leave the others waiting in a collective: all raise together."""
        result: Result | None = None
        error: PsrlError | None = None
        try:
            result = prepare()
        except (TrainingError, DataPlaneError) as raised:
            error = raised
        if self._world_size > 1:
            has_failed = torch.tensor(float(error is not None), device=self._device)
            dist.all_reduce(has_failed, op=dist.ReduceOp.MAX)
            if error is None and has_failed:
                error = TrainingError("another rank could not use its rows; its own error names them")
        if error is not None:
            raise error
        assert result is not None
        return result

    def _credited(
        self, meta: KVBatchMeta, columns: Sequence[Mapping[str, Tensor]], mini_batches: Sequence[MiniBatch], totals: StepTotals
    ) -> tuple[StepCredit, dict[str, float]]:
        """Advantages of the step; a critic says its values first, and learns afterwards."""
        if self._critic is None:
            return self._agreed(lambda: self._credit.estimate(meta, columns, {})), {}
        values = self._critic.values([batch for batches in mini_batches for batch in batches])
        all_values = self._credit.of_all_ranks(values)
        credit = self._agreed(lambda: self._credit.estimate(meta, columns, all_values))
        return credit, self._critic.learn(mini_batches, ValueTargets(old_values=values, returns=credit.returns), totals)

    def _less_kl(
        self,
        meta: KVBatchMeta,
        columns: Sequence[Mapping[str, Tensor]],
        mini_batches: Sequence[MiniBatch],
        ref: Mapping[str, Tensor],
        totals: StepTotals,
    ) -> Sequence[Mapping[str, Tensor]]:
        """The columns with the KL between the policy that sampled and the reference taken from the rewards."""
        rows = [row for batches in mini_batches for batch in batches for row in batch.rows]
        estimate = kl_estimator(self._algorithm.kl_penalty)
        kl = {row.key: estimate(row.rollout_logprobs, ref[row.key].cpu()) for row in rows}
        totals.add_mean("train/reward_kl/mean", joined(list(kl.values()), self._device))
        return self._credit.less_kl(meta, columns, self._credit.of_all_ranks(kl))

    def _learn(
        self, mini_batches: Sequence[MiniBatch], credit: StepCredit, ref: Mapping[str, Tensor] | None, totals: StepTotals
    ) -> dict[str, float]:
        """The policy's updates, and metrics that are no sums over tokens."""
        num_updates = len(mini_batches) * self._actor.ppo_epochs
        proximal = self._proximal_logprobs(mini_batches, num_updates)
        advantages = credit.of(row for batches in mini_batches for batch in batches for row in batch.rows)
        grad_norms: list[float] = []
        for epoch in range(self._actor.ppo_epochs):
            for batches in mini_batches:
                measures = epoch == 0 if proximal is not None else not grad_norms
                reference = Reference(advantages=advantages, proximal=proximal, ref=ref, measures_mismatch=measures)
                grad_norms.append(self._step.run(batches, reference, totals))
        lr = float(self._scheduler.get_last_lr()[0])
        self._scheduler.step()
        return {
            "train/grad_norm/mean": sum(grad_norms) / num_updates,
            "train/grad_norm/max": max(grad_norms),
            "train/lr/value": lr,
            "train/updates/count": float(num_updates),
        }

    def _mini_batches(self, meta: KVBatchMeta, version: PolicyVersion) -> list[MiniBatch]:
        """Pack every optimizer update the same way on every rank, then fetch only this rank's rows."""
        tags_of = dict(zip(meta.keys, meta.tags, strict=True))
        mine: list[list[MicroBatch[RowRef]]] = []
        for keys in _keys_by_update(meta, self._actor.ppo_mini_batch_size):
            refs = [RowRef(key, tags_of[key]["num_tokens"]) for key in keys if self._has_loss(tags_of[key])]
            if not refs:
                continue
            steps = pack(
                refs,
                max_tokens=self._actor.ppo_max_token_len_per_gpu,
                num_ranks=self._world_size,
                arrangement=self._arrangement,
                groups=[tags_of[ref.key]["group"] for ref in refs],
            )
            mine.append([micro_batches[self._rank] for micro_batches in steps])
        if not mine:
            raise TrainingError(f"none of the {len(meta.keys)} trajectories has a loss (all cut by a limit, or the batch is empty)")
        refs = [ref for batches in mine for batch in batches for ref in batch.rows]
        fetched = self._data_plane.fetch([ref.key for ref in refs], ROW_COLUMNS) if refs else []
        rows = {
            ref.key: make_row(ref, columns, float(tags_of[ref.key]["temperature"]), version=version)
            for ref, columns in zip(refs, fetched, strict=True)
        }
        return [[MicroBatch(tuple(rows[ref.key] for ref in batch.rows), batch.arrangement) for batch in batches] for batches in mine]

    def _proximal_logprobs(self, mini_batches: Sequence[MiniBatch], num_updates: int) -> Mapping[str, Tensor] | None:
        """Logprobs by key; None as `Reference` says.

        With one update, its own forward pass gives them; with several, they are computed once here, before the first, for all of them.
        """
        if self._actor.old_logprobs != "recompute" or num_updates == 1:
            return None
        return score(self._policy, [batch for mini_batch in mini_batches for batch in mini_batch], self._device)

    def _reference_logprobs(self, mini_batches: Sequence[MiniBatch]) -> Mapping[str, Tensor]:
        """Logprobs by key of the frozen reference: a model of its own, or the policy without its adapter."""
        batches = [batch for mini_batch in mini_batches for batch in mini_batch]
        if self._reference_model is not None:
            return score(self._reference_model, batches, self._device)
        with without_adapter(self._policy):
            return score(self._policy, batches, self._device)


def _keys_by_update(meta: KVBatchMeta, groups_per_update: int) -> list[list[str]]:
    """Keys of each optimizer update: whole groups, in the order in which they first appear; 0 takes all."""
    by_group: dict[str, list[str]] = {}
    for key, tags in zip(meta.keys, meta.tags, strict=True):
        by_group.setdefault(tags["group"], []).append(key)
    groups = list(by_group.values())
    size = groups_per_update or max(1, len(groups))
    return [[key for group in groups[start : start + size] for key in group] for start in range(0, len(groups), size)]
