"""Makes a tokenizer and cold-started weights from nothing but a seed: what the tiny recipes ship."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase, Qwen3Config

from psrl.chat import load_renderer
from psrl.config.model import ModelConfig
from psrl.config.sft import SftConfig
from psrl.datasets.demonstrations import tokens_of_all
from psrl.datasets.generators import build_generator
from psrl.errors import ConfigError
from psrl.recipes.tiny_tokenizer import MODEL_MAX_LENGTH, build_tokenizer, conversation_text
from psrl.training.sft import SftProgress, SftRow, train_sft

REPORT_EVERY = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyModel:
    """What a tiny recipe's model is made of."""

    generator: str
    """Whose demonstrations are imitated, and train the tokenizer."""
    num_tokenizer_texts: int
    vocab_size: int
    names: tuple[str, ...] = ()
    """Words that the tokenizer keeps alone."""
    intermediate_size: int
    sft: SftConfig

    def make(
        self, output: Path, *, num_steps: int | None = None, seed: int | None = None, on_step: Callable[[SftProgress], None] | None = None
    ) -> None:
        """Write a Hugging Face folder with tokenizer and cold-started weights at `output`."""
        settings = replace(
            self.sft, num_steps=num_steps or self.sft.num_steps, seed=self.sft.seed if seed is None else seed, output_path=str(output)
        )
        generator = build_generator(self.generator)
        texts = (conversation_text(each) for each in generator.demonstrations(self.num_tokenizer_texts, seed=settings.seed))
        tokenizer = build_tokenizer(texts, vocab_size=self.vocab_size, names=self.names)
        demonstrations = generator.demonstrations(settings.num_steps * settings.batch_size, seed=settings.seed)
        with tempfile.TemporaryDirectory() as start:
            tokenizer.save_pretrained(start)
            self.architecture(tokenizer).save_pretrained(start)
            renderer = load_renderer(start, tool_format="hermes")
            rows = (SftRow(each.ids, each.loss_mask) for each in tokens_of_all(demonstrations, renderer))
            train_sft(settings, ModelConfig(path=start), rows, on_step=on_step)

    def prepare(self, name: str, source: Path | None, output: Path | None, *, num_steps: int) -> Path:
        """What `psrl prepare NAME` of a tiny recipe does: `make` at `output`, else at `models/NAME`; returns that folder.

        Raises:
            ConfigError: A source was given; everything is made from a seed.
        """
        if source is not None:
            raise ConfigError(key="--source", value=str(source), rule=f"{name} makes its data itself", fix="leave --source out")
        folder = output or Path("models") / name
        self.make(folder, num_steps=num_steps, on_step=show_progress)
        print(f"model written to {folder}; train with train_actor_rollout_ref.model.path={folder}")
        return folder

    def architecture(self, tokenizer: PreTrainedTokenizerBase) -> Qwen3Config:
        """About a million parameters in the shape of Qwen3."""
        return Qwen3Config(
            architectures=["Qwen3ForCausalLM"],
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=self.intermediate_size,
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


def show_progress(progress: SftProgress) -> None:
    """A line on the terminal, every so many steps."""
    if progress.step % REPORT_EVERY == 0 or progress.step == progress.num_steps:
        print(f"step {progress.step}/{progress.num_steps}  loss {progress.loss:.3f}  {progress.seconds:.0f} s", flush=True)
