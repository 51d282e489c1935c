"""How the ranks hold a model: FSDP2 over a mesh of copies (`replicate`) and, within a copy, of parts (`shard`).

With one rank there is nothing to divide, and the model stays a plain one, unless its numbers are mixed or it lies in the host's memory:
both are FSDP2's work, on a mesh of one. Weights are read from the disk by rank 0 alone; the others get their parts from it, so that a
node's memory never holds the model once per rank.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from psrl.config.actor import FsdpConfig
from psrl.config.model import ModelConfig
from psrl.errors import ConfigError
from psrl.training.model import DTYPES

REPLICATE_AXIS, SHARD_AXIS = "replicate", "shard"
"""Dimensions of the mesh; rows are divided over both."""
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By device; on CUDA what lies in the host's memory is reduced too (offloaded parameters, checkpoints)."""

Model = TypeVar("Model", bound=nn.Module)


class Sharding:
    """Of one rank. Make it, `join`, then `load` each model; `leave` at the end. All ranks call every method together."""

    def __init__(self, settings: FsdpConfig, model: ModelConfig, *, device: torch.device, rank: int, world_size: int) -> None:
        """`settings` are the actor's; `model` says which numbers are computed with.

        Raises:
            ConfigError: The ranks cannot be divided so, or offload is asked for where there is nothing to offload from.
        """
        size = world_size if settings.fsdp_size == -1 else settings.fsdp_size
        if size < 1 or world_size % size:
            fix = "use -1, or a divisor of trainer.num_workers"
            raise ConfigError(key="actor.fsdp_config.fsdp_size", value=size, rule=f"does not divide {world_size} ranks", fix=fix)
        if device.type == "cpu" and (settings.offload_policy or settings.optimizer_offload):
            key = "actor.fsdp_config." + ("offload_policy" if settings.offload_policy else "optimizer_offload")
            raise ConfigError(key=key, value=True, rule="has no effect where training runs on the CPU", fix="leave it out")
        self._settings = settings
        self._compute_dtype = DTYPES[model.served_dtype]
        self._device = device
        self._rank, self._world_size = rank, world_size
        self._shape = (world_size // size, size)
        self.is_sharded = settings.holds(model, num_ranks=world_size)
        """Whether FSDP2 holds the models, so that there is a process group."""
        self._mesh: DeviceMesh | None = None

    def join(self, init_method: str, *, timeout_s: float) -> None:
        """Meet the other ranks at `init_method` (`tcp://127.0.0.1:<port>` or `file://...`); alone, it is not used."""
        if not self.is_sharded:
            return
        backend, timeout = BACKENDS[self._device.type], timedelta(seconds=timeout_s)
        if self._world_size == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(backend, init_method=init_method, rank=self._rank, world_size=self._world_size, timeout=timeout)
        self._mesh = init_device_mesh(self._device.type, self._shape, mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS))

    def leave(self) -> None:
        """Leave the process group; may be called twice."""
        if self._mesh is not None and dist.is_initialized():
            dist.destroy_process_group()
        self._mesh = None

    def load(self, read: Callable[[bool], Model]) -> Model:
        """A model in its place.

        Args:
            read: `read(with_weights)` gives the model in the host's memory; without weights its parameters are on the device `meta`.
                Its `causal_lm` is a transformers model.
        """
        if self._mesh is None:
            return read(True).to(self._device)
        model = read(self._rank == 0)
        return self._divided(model)

    def _divided(self, model: Model) -> Model:
        """One unit per decoder layer, one for the rest. Tied weights stay tied."""
        whole: dict[str, Tensor] = {name: tensor.detach() for name, tensor in model.state_dict().items()} if self._rank == 0 else {}
        settings = self._settings
        # Inputs are not cast: temperatures are exact, and hidden states have the weights' dtype anyway.
        numbers = MixedPrecisionPolicy(param_dtype=self._compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        offload = CPUOffloadPolicy() if settings.offload_policy else OffloadPolicy()
        assert self._mesh is not None, "join() comes first"
        mesh = self._mesh if self._shape[0] > 1 else self._mesh[SHARD_AXIS]
        causal_lm: Any = model.causal_lm
        for layer in causal_lm.base_model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=numbers, offload_policy=offload, reshard_after_forward=settings.reshard_after_forward)
        fully_shard(model, mesh=mesh, mp_policy=numbers, offload_policy=offload)
        _materialise(model, parameters_on=torch.device("cpu") if settings.offload_policy else self._device, buffers_on=self._device)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, whole, options=options)
        return model


def reduce_over_copies(model: nn.Module, *, is_last: bool) -> None:
    """Before a backward pass: whether the copies of the model average their gradients after it. Once per update is enough."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(is_last)


def put_away(model: nn.Module) -> None:
    """After forward passes that no backward pass follows: give up what was gathered and would stay whole, in the compute dtype."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _materialise(model: nn.Module, *, parameters_on: torch.device, buffers_on: torch.device) -> None:
    """Memory for parameters on `meta`, whose values come next; tied ones stay one. Buffers go to their device with their values."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta:
                if parameter not in made:
                    made[parameter] = nn.Parameter(torch.empty_like(parameter, device=parameters_on), requires_grad=parameter.requires_grad)
                setattr(module, name, made[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(buffers_on))
