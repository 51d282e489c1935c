"""Ranks as processes of their own, forked from one that has imported torch already."""

import multiprocessing
import traceback
from pathlib import Path

import torch

DEADLINE_S = 400.0


def run_ranks(world_size, folder, play, *arguments):
    """`play(rank, world_size, init_method, *arguments)` on every rank; what each returned, by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["psrl.training.worker", "training_builders"])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    processes = [context.Process(target=_play, args=(rank, world_size, str(folder), play, arguments)) for rank in range(world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
    for process in processes:
        if process.is_alive():
            process.kill()
    errors = [(folder / f"error-{rank}.txt") for rank in range(world_size)]
    said = [error.read_text() for error in errors if error.exists()]
    codes = [process.exitcode for process in processes]
    assert codes == [0] * world_size, f"exit codes {codes}\n" + "\n".join(said)
    return [torch.load(folder / f"result-{rank}.pt") for rank in range(world_size)]


def _play(rank, world_size, folder, play, arguments):
    try:
        result = play(rank, world_size, f"file://{folder}/rendezvous", *arguments)
    except BaseException:
        Path(folder, f"error-{rank}.txt").write_text(traceback.format_exc())
        raise
    torch.save(result, f"{folder}/result-{rank}.pt")
