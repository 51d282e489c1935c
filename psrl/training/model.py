"""The trained model: a Hugging Face causal LM that returns logprobs of chosen tokens instead of logits.

`PolicyModel` is what is sharded: its forward covers the output embedding too, so FSDP2 gathers every parameter where it is used.
With one rank nothing is sharded, because there is nothing to shard and gathering would only copy.

Legend: B rows, T tokens, H hidden width, V vocabulary, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from psrl.algorithms.logprobs import chosen_logprobs
from psrl.config.model import ModelConfig
from psrl.errors import ConfigError

SHARD_AXIS = "shard"
"""Name of the mesh dimension over which parameters and rows are divided."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Fields of model configs that change logits after the output embedding, which `PolicyModel` does not do."""


class PolicyModel(nn.Module):
    """Scores chosen tokens. The only way in which training code runs the model."""

    def __init__(self, causal_lm: Any) -> None:
        """`causal_lm` is a transformers `...ForCausalLM`; its parameters stay where they are."""
        super().__init__()
        self.causal_lm = causal_lm

    def forward(
        self, input_ids_BT: Tensor, states_N: Tensor, chosen_N: Tensor, temperatures_N: Tensor, *, entropy_needs_grad: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(logprobs_N, entropy_N) of tokens `chosen_N`, each predicted by the flat hidden state `states_N` of [B * T].

        Rows are right-padded; attention is causal, so no mask is needed. Without chosen tokens the result is empty, yet still
        depends on the parameters, so that a rank without work takes part in every collective.
        """
        decoder, head = self.causal_lm.base_model, self.causal_lm.get_output_embeddings()
        hidden_BTH = decoder(input_ids=input_ids_BT, use_cache=False)[0]
        hidden_NH = hidden_BTH.flatten(0, 1)[states_N]
        logprobs, entropy = chosen_logprobs(
            hidden_NH, head.weight, chosen_N, temperatures_N, bias_V=head.bias, entropy_needs_grad=entropy_needs_grad
        )
        return logprobs, entropy


def load_model(settings: ModelConfig, *, device: torch.device | str = "cpu", from_scratch: bool = False) -> PolicyModel:
    """Read a Hugging Face folder.

    `from_scratch` takes only its architecture, with random weights from torch's global generator.

    Raises:
        ConfigError: The folder cannot be read, or the model changes its logits in a way that scoring does not know.
    """
    if settings.dtype not in DTYPES:
        raise ConfigError(key="model.dtype", value=settings.dtype, rule="unknown dtype", fix=f"use one of {', '.join(DTYPES)}")
    if not (Path(settings.path) / "config.json").is_file():
        raise ConfigError(
            key="model.path", value=settings.path, rule="no folder with a config.json", fix="name a Hugging Face model folder"
        )
    dtype = DTYPES[settings.dtype]
    try:
        if from_scratch:
            causal_lm: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                AutoConfig.from_pretrained(settings.path), dtype=dtype
            )
        else:
            causal_lm = AutoModelForCausalLM.from_pretrained(settings.path, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(key="model.path", value=settings.path, rule=f"cannot be loaded ({error})", fix="check the folder") from error
    for name in LOGIT_CHANGES:
        if causal_lm.config.to_dict().get(name) not in (None, 1, 1.0):
            rule = f"{name} changes the logits after the output embedding, which is not supported"
            raise ConfigError(key="model.path", value=settings.path, rule=rule, fix="use a model without it")
    model = PolicyModel(causal_lm.to(device))
    # Dropout would make the trainer's logprobs another distribution than the engine's.
    return model.eval()


def shard(model: PolicyModel, mesh: DeviceMesh) -> PolicyModel:
    """Divide every parameter over the mesh: one unit per decoder layer, one for the rest. Tied weights stay tied."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in model.causal_lm.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def full_tensors(model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Full tensors by Hugging Face parameter name, tied weights once; use each before the next update, which may change it.

    With shards, every rank must go through all of them.
    """
    for name, parameter in model.causal_lm.named_parameters():
        tensor = parameter.detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def named_full_tensors(model: PolicyModel) -> dict[str, Tensor]:
    """Copies of them on the CPU."""
    return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in full_tensors(model)}
