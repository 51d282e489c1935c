"""Supervised fine-tuning of a recipe: its demonstrations, laid out by the run's renderer, to `training.sft`. No Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import multiprocessing

from psrl.chat.renderer import load_renderer
from psrl.config.sft import SftConfig
from psrl.config.tree import Config
from psrl.datasets.demonstrations import Demonstration, load_demonstrations, tokens_of_all
from psrl.datasets.generators import build_generator
from psrl.errors import ConfigError, ProcessDiedError
from psrl.processes.child import free_port
from psrl.runtime.devices import resolved_device
from psrl.training.sft import SftProgress, SftRank, SftRow, train_sft
from psrl.training.threads import share_of_cores

NUM_PROGRESS_LINES = 20


def run_sft(config: Config) -> Path:
    """Fine-tune on `sft.generator` or `sft.train_files`, on `trainer.num_workers` ranks of this machine; the folder of the new model.

    Raises:
        ConfigError: The demonstrations cannot be used.
        TrainingError: A loss is not finite, or there is nothing to learn.
        ProcessDiedError: One of several ranks ended; with its last words.
    """
    num_ranks = config.trainer.num_workers
    if num_ranks == 1:
        _fine_tune(0, config, "")
        return Path(config.sft.output_path)
    next(_rows(config))  # what is wrong with the demonstrations is said here, and not by every rank
    try:
        multiprocessing.spawn(_fine_tune, args=(config, f"tcp://127.0.0.1:{free_port()}"), nprocs=num_ranks)
    except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
        last_words = str(error).strip().splitlines()[-1]
        raise ProcessDiedError(f"rank {error.error_index} of fine-tuning ended: {last_words}") from error
    return Path(config.sft.output_path)


def _fine_tune(rank: int, config: Config, init_method: str) -> None:
    """One rank, to its end; rank 0 prints the progress."""
    trainer, actor = config.trainer, config.train_actor_rollout_ref.actor
    device = resolved_device(trainer.device)
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    elif trainer.num_workers > 1:
        torch.set_num_threads(share_of_cores(trainer.num_workers))
    place = SftRank(
        device=device,
        rank=rank,
        world_size=trainer.num_workers,
        init_method=init_method,
        fsdp=actor.fsdp_config,
        gradient_checkpointing=actor.gradient_checkpointing,
        timeout_s=config.psrl.deadlines.train_step_s,
    )
    on_step = _progress_printer(config.sft.num_steps) if rank == 0 else None
    train_sft(config.sft, config.train_actor_rollout_ref.model, _rows(config), on_step=on_step, rank=place)


def _rows(config: Config) -> Iterator[SftRow]:
    model, tool_format = config.train_actor_rollout_ref.model, config.gen_actor_rollout_ref.rollout.multi_turn.format
    renderer = load_renderer(model.tokenizer_path or model.path, tool_format=tool_format, history_thinking=model.history_thinking)
    for tokens in tokens_of_all(_demonstrations(config.sft), renderer):
        yield SftRow(tokens.ids, tokens.loss_mask)


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
