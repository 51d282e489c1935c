"""Supervised fine-tuning of a recipe: its demonstrations, laid out by the run's renderer, to `training.sft`. One process, no Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from psrl.chat.renderer import load_renderer
from psrl.config.sft import SftConfig
from psrl.config.tree import Config
from psrl.datasets.demonstrations import Demonstration, load_demonstrations, tokens_of_all
from psrl.datasets.generators import build_generator
from psrl.errors import ConfigError
from psrl.training.sft import SftProgress, SftRow, train_sft

NUM_PROGRESS_LINES = 20


def run_sft(config: Config) -> Path:
    """Fine-tune on `sft.generator` or `sft.train_files`; the folder of the new model.

    Raises:
        ConfigError: The demonstrations cannot be used.
        TrainingError: A loss is not finite, or there is nothing to learn.
    """
    demonstrations = _demonstrations(config.sft)
    model, tool_format = config.train_actor_rollout_ref.model, config.gen_actor_rollout_ref.rollout.multi_turn.format
    renderer = load_renderer(model.tokenizer_path or model.path, tool_format=tool_format, history_thinking=model.history_thinking)
    rows = (SftRow(each.ids, each.loss_mask) for each in tokens_of_all(demonstrations, renderer))
    train_sft(config.sft, model, rows, on_step=_progress_printer(config.sft.num_steps))
    return Path(config.sft.output_path)


def _demonstrations(settings: SftConfig) -> Sequence[Demonstration]:
    if settings.generator is None:
        return load_demonstrations(settings.train_files)
    found = build_generator(settings.generator).demonstrations(settings.num_steps * settings.batch_size, seed=settings.seed)
    if not found:
        fix = "use a generator that has demonstrations, or sft.train_files"
        raise ConfigError(key="sft.generator", value=settings.generator, rule="makes no demonstrations", fix=fix)
    return found


def _progress_printer(num_steps: int) -> Callable[[SftProgress], None]:
    console = Console(soft_wrap=True)
    every = max(1, num_steps // NUM_PROGRESS_LINES)

    def show(progress: SftProgress) -> None:
        if progress.step % every == 0 or progress.step == progress.num_steps:
            console.print(
                f"step {progress.step}/{progress.num_steps}  loss {progress.loss:.4f}  lr {progress.lr:.2e}  "
                f"grad norm {progress.grad_norm:.2f}  {progress.seconds:.0f} s"
            )

    return show
