"""Low-rank adapters (LoRA, Hu et al. 2021): W x becomes W x + scale B A x, and only A [r, in] and B [out, r] are trained.

peft puts them into the model; it is imported only where there are some, which saves every other process 0.8 s of CPU at its start.
Adapters are float32 whatever the model is: they are small, and their updates are smaller still.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from psrl.config.model import ALL_LINEAR, ModelConfig
from psrl.errors import ConfigError

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

ADAPTER = "default"
"""peft's name of the one adapter."""


def lora_config(settings: ModelConfig) -> LoraConfig:
    """As peft writes and reads it."""
    from peft import LoraConfig

    names = settings.target_modules
    return LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=ALL_LINEAR if names == [ALL_LINEAR] else list(names),
        task_type="CAUSAL_LM",
    )


def add_adapter(causal_lm: Any, settings: ModelConfig, *, with_weights: bool = True) -> None:
    """Put adapters into a transformers model, in place; all other parameters are frozen. B begins at 0, so nothing changes yet.

    Raises:
        ConfigError: No layer has such a name, or one of them is an embedding.
    """
    from peft import inject_adapter_in_model

    key = "train_actor_rollout_ref.model.target_modules"
    try:
        inject_adapter_in_model(lora_config(settings), causal_lm, adapter_name=ADAPTER, low_cpu_mem_usage=not with_weights)
    except ValueError as error:
        rule, fix = f"cannot be given adapters ({error})", f"name linear layers, or use [{ALL_LINEAR}]"
        raise ConfigError(key=key, value=settings.target_modules, rule=rule, fix=fix) from error
    embeddings = (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())
    if any(map(_is_adapted, embeddings)):
        rule = "one of them is an embedding, which scoring and engines read without an adapter"
        raise ConfigError(key=key, value=settings.target_modules, rule=rule, fix=f"name linear layers, or use [{ALL_LINEAR}]")
    for name, parameter in causal_lm.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """The layers that were given adapters, by name; empty where the model has none."""
    return {name: module for name, module in model.named_modules() if _is_adapted(module)}


def scale_of(layer: LoraLayer) -> float:
    """What the product counts: lora_alpha / lora_rank."""
    return float(layer.scaling[ADAPTER])


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """The frozen model alone: the reference of a KL term needs no second copy of it."""
    layers = list(adapted_layers(model).values())
    scales = [scale_of(layer) for layer in layers]
    for layer in layers:
        layer.scaling[ADAPTER] = 0.0
    try:
        with torch.no_grad():
            yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[ADAPTER] = scale


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A")
