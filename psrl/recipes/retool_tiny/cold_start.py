"""Makes the tokenizer and the cold-started weights of `retool_tiny` from nothing but a seed.

The model imitates scripted episodes (`datasets/generators/arithmetic.py`): first a diligent solver's, from which it learns to
copy an expression into a call and the output into the answer; then a lazy one's, who mostly guesses. It can call; it does not
yet know that it should.

`psrl prepare retool_tiny --output psrl/recipes/retool_tiny/model` made the folder that psrl ships.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase, Qwen3Config

from psrl.chat import load_renderer
from psrl.config.model import ModelConfig
from psrl.config.sft import SftConfig
from psrl.datasets.demonstrations import tokens_of_all
from psrl.datasets.generators import build_generator
from psrl.recipes.retool_tiny.tokenizer import MODEL_MAX_LENGTH, build_tokenizer, conversation_text
from psrl.training.sft import SftProgress, SftRow, train_sft

NUM_TOKENIZER_TEXTS = 4000
SFT = SftConfig(num_steps=2000, batch_size=32, max_length=256, lr=2e-3, min_lr_ratio=0.02, seed=1, from_scratch=True)


def make_model(
    output: Path, *, num_steps: int = SFT.num_steps, seed: int = SFT.seed, on_step: Callable[[SftProgress], None] | None = None
) -> None:
    """Write a Hugging Face folder with tokenizer and cold-started weights at `output`."""
    generator = build_generator("arithmetic")
    tokenizer = build_tokenizer(conversation_text(each) for each in generator.demonstrations(NUM_TOKENIZER_TEXTS, seed=seed))
    demonstrations = generator.demonstrations(num_steps * SFT.batch_size, seed=seed)
    settings = replace(SFT, num_steps=num_steps, seed=seed, output_path=str(output))
    with tempfile.TemporaryDirectory() as start:
        tokenizer.save_pretrained(start)
        architecture(tokenizer).save_pretrained(start)
        renderer = load_renderer(start, tool_format="hermes")
        rows = (SftRow(each.ids, each.loss_mask) for each in tokens_of_all(demonstrations, renderer))
        train_sft(settings, ModelConfig(path=start), rows, on_step=on_step)


def architecture(tokenizer: PreTrainedTokenizerBase) -> Qwen3Config:
    """0.9 million parameters in the shape of Qwen3."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MODEL_MAX_LENGTH,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
