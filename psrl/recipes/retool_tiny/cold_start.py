"""Makes the tokenizer and the cold-started weights of `retool_tiny` from nothing but a seed.

The model imitates scripted episodes of a mediocre solver (`datasets/generators/arithmetic.py`): right calls, broken calls, missing
calls and, on long tasks, mostly lazy guesses. It can call; it does not yet know that it should.

Run `python -m psrl.recipes.retool_tiny.cold_start OUTPUT` to make the folder that psrl ships in `recipes/retool_tiny/model`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase, Qwen3Config

from psrl.config.model import ModelConfig
from psrl.config.sft import SftConfig
from psrl.datasets.generators import Demonstration, build_generator
from psrl.recipes.retool_tiny.tokenizer import CHAT_TEMPLATE, MODEL_MAX_LENGTH, build_tokenizer, render_text
from psrl.training.sft import SftProgress, SftRow, train_sft
from psrl.types import Role, ToolSchema

CALCULATOR = ToolSchema(
    name="code_interpreter",
    description="",
    parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
)
"""What the template reads of the real tool: its name and its argument."""
NUM_TOKENIZER_TEXTS = 4000
SFT = SftConfig(num_steps=1200, batch_size=32, max_length=256, lr=2e-3, min_lr_ratio=0.02, seed=1, from_scratch=True)


def make_model(
    output: Path, *, num_steps: int = SFT.num_steps, seed: int = SFT.seed, on_step: Callable[[SftProgress], None] | None = None
) -> None:
    """Write a Hugging Face folder with tokenizer and cold-started weights at `output`."""
    generator = build_generator("arithmetic")
    texts = (demonstration_text(each) for each in generator.demonstrations(NUM_TOKENIZER_TEXTS, seed=seed))
    tokenizer = build_tokenizer(texts)
    demonstrations = generator.demonstrations(num_steps * SFT.batch_size, seed=seed)
    settings = replace(SFT, num_steps=num_steps, seed=seed, output_path=str(output))
    with tempfile.TemporaryDirectory() as start:
        tokenizer.save_pretrained(start)
        architecture(tokenizer).save_pretrained(start)
        train_sft(settings, ModelConfig(path=start), sft_rows(tokenizer, demonstrations), on_step=on_step)


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


def demonstration_text(demonstration: Demonstration) -> str:
    """The conversation as the chat template writes it."""
    return render_text(CHAT_TEMPLATE, demonstration.messages, tools_of(demonstration))


def tools_of(demonstration: Demonstration) -> tuple[ToolSchema, ...]:
    """What the prompt offers."""
    return (CALCULATOR,) if demonstration.has_tools else ()


def sft_rows(tokenizer: PreTrainedTokenizerBase, demonstrations: Sequence[Demonstration]) -> Iterator[SftRow]:
    """Demonstrations as tokens, to be learned where the assistant wrote them."""
    for demonstration in demonstrations:
        yield sft_row(tokenizer, demonstration)


def sft_row(tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration) -> SftRow:
    """One demonstration; learned are the assistant's text and its end-of-turn token, as in reinforcement learning.

    Example:
        `user 2 + 2? / assistant \\boxed{4}` has mask 0 up to and including the header `<|im_start|>assistant\\n`, 1 for the answer and
        `<|im_end|>`.
    """
    messages = demonstration.messages
    tools = tools_of(demonstration)
    ids: list[int] = []
    loss_mask: list[int] = []
    for index, message in enumerate(messages):
        if message.role is not Role.ASSISTANT:
            continue
        before = render_text(CHAT_TEMPLATE, messages[:index], tools, add_generation_prompt=True)
        context = tokenizer.encode(before, add_special_tokens=False)
        assert context[: len(ids)] == ids, "the chat template is not append-only"
        turn = tokenizer.encode(message.content + tokenizer.eos_token, add_special_tokens=False)
        loss_mask += [0] * (len(context) - len(ids)) + [1] * len(turn)
        ids = context + turn
    return SftRow(ids=ids, loss_mask=loss_mask)


def main() -> None:
    """The command that made the shipped weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=SFT.num_steps)
    parser.add_argument("--seed", type=int, default=SFT.seed)
    arguments = parser.parse_args()

    def show(progress: SftProgress) -> None:
        if progress.step % 50 == 0:
            print(f"step {progress.step}/{progress.num_steps}  loss {progress.loss:.3f}  {progress.seconds:.0f} s", flush=True)

    make_model(arguments.output, num_steps=arguments.steps, seed=arguments.seed, on_step=show)


if __name__ == "__main__":
    main()
