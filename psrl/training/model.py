"""The trained model: a Hugging Face causal LM that returns logprobs of chosen tokens instead of logits.

`PolicyModel` is what `sharding` divides: its forward covers the output embedding too, so FSDP2 gathers every parameter where it is used.

Legend: B rows, T tokens, H hidden width, V vocabulary, N scored tokens.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from psrl.algorithms.logprobs import chosen_logprobs
from psrl.config.model import ModelConfig
from psrl.errors import ConfigError
from psrl.kernels.products import use_products
from psrl.training.adapter import add_adapter
from psrl.training.attention import RowLayout, hidden_states, use_rows_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Fields of model configs that change logits after the output embedding, which `PolicyModel` does not do."""


class PolicyModel(nn.Module):
    """Scores chosen tokens. The only way in which training code runs the model."""

    def __init__(self, causal_lm: Any) -> None:
        """`causal_lm` is a transformers `...ForCausalLM`; its parameters stay where they are."""
        super().__init__()
        self.causal_lm = causal_lm
        use_products(causal_lm)
        self.can_pack_rows = use_rows_attention(causal_lm)

    def forward(
        self,
        input_ids_BT: Tensor,
        states_N: Tensor,
        chosen_N: Tensor,
        temperatures_N: Tensor,
        *,
        layout: RowLayout | None = None,
        entropy_needs_grad: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(logprobs_N, entropy_N) of tokens `chosen_N`, each predicted by the flat hidden state `states_N` of [B * T].

        Rows are right-padded, and attention is causal, so no mask is needed; or one flat sequence [1, T] with the layout that keeps them
        apart. Without chosen tokens the result is empty, yet still depends on the parameters, so that a rank without work takes part in
        every collective.
        """
        decoder, head = self.causal_lm.base_model, self.causal_lm.get_output_embeddings()
        hidden_NH = hidden_states(decoder, input_ids_BT, layout).index_select(0, states_N)
        logprobs, entropy = chosen_logprobs(
            hidden_NH, head.weight, chosen_N, temperatures_N, bias_V=head.bias, entropy_needs_grad=entropy_needs_grad
        )
        return logprobs, entropy


def checkpoint_activations(model: nn.Module) -> None:
    """Keep only the input of each decoder layer, and compute the layer again in the backward pass; `model.causal_lm` is transformers'."""
    causal_lm: Any = model.causal_lm
    causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # transformers checkpoints only in training mode; none of its dropouts is on by default in supported models.
    model.train()


def load_model(
    settings: ModelConfig, *, device: torch.device | str = "cpu", from_scratch: bool = False, with_weights: bool = True
) -> PolicyModel:
    """Read a Hugging Face folder, and give the model an adapter where the settings ask for one.

    `from_scratch` takes only its architecture, with random weights from torch's global generator. Without weights, parameters are on
    the device `meta` and nothing but config.json is read.

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
        if from_scratch or not with_weights:
            config = AutoConfig.from_pretrained(settings.path)
            with nullcontext() if with_weights else init_empty_weights(include_buffers=False):
                causal_lm: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
            causal_lm.tie_weights()  # accelerate gives each name a parameter of its own
        else:
            causal_lm = AutoModelForCausalLM.from_pretrained(settings.path, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(key="model.path", value=settings.path, rule=f"cannot be loaded ({error})", fix="check the folder") from error
    for name in LOGIT_CHANGES:
        if causal_lm.config.to_dict().get(name) not in (None, 1, 1.0):
            rule = f"{name} changes the logits after the output embedding, which is not supported"
            raise ConfigError(key="model.path", value=settings.path, rule=rule, fix="use a model without it")
    if settings.lora_rank > 0:
        add_adapter(causal_lm, settings, with_weights=with_weights)
    model = PolicyModel(causal_lm.to(device) if with_weights else causal_lm)
    # Dropout would make the trainer's logprobs another distribution than the engine's.
    return model.eval()
