"""A training step through `TrainRank` against a bare torch loop of the same model on the same tokens: a ratio from one run.

The bare loop is what one would write by hand: rows of similar length in right-padded batches, logits of sampled positions only, a
clipped ratio times an advantage, gradient clipping, fused AdamW. It has no data plane, no metrics, no checks. Both take turns, so that
a busy machine slows both alike; the ratio is of medians.

    python benchmarks/trainer_step.py [--rows 128] [--rounds 7] [--threads 2]
"""

import argparse
import os
import random
import statistics
import tempfile
import time

from psrl.config.processor import openblas_environment

os.environ.update(openblas_environment())  # before numpy is there

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from psrl.config.actor import ActorConfig, OptimConfig, RefConfig
from psrl.config.algorithm import AlgorithmConfig
from psrl.config.critic import CriticConfig
from psrl.config.model import ModelConfig
from psrl.data_plane import MemoryDataPlane, TrajectoryRow
from psrl.training.worker import TrainRank

VOCABULARY = 457
GROUP_SIZE = 8


def make_model(path):
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def make_rows(num_rows):
    draw = random.Random(0)
    rows = []
    for index in range(num_rows):
        length = draw.randint(60, 224)
        prompt = draw.randint(30, length // 2)
        turns = torch.tensor([-1] * prompt + [0] * (length - prompt), dtype=torch.int32)
        group, reward = f"g{index // GROUP_SIZE}", draw.choice([1.0, -1.0])
        tags = {
            "group": group, "episode": f"e{index}", "reward": reward, "outcome": "finished", "admitted_version": 0, "num_tokens": length,
            "num_sampled": length - prompt, "num_turns": 1, "temperature": 1.0,
        }  # fmt: skip
        columns = {
            "input_ids": torch.tensor([draw.randrange(VOCABULARY) for _ in range(length)]),
            "loss_mask": (turns >= 0).to(torch.int8),
            "rollout_logprobs": torch.where(turns >= 0, -6.1, 0.0),
            "policy_versions": torch.where(turns >= 0, 0, -1),
            "turn_indices": turns,
        }
        rows.append(TrajectoryRow(key=f"e{index}-t0", tags=tags, columns=columns))
    return rows


def bare_step(model, optimizer, rows, rows_per_batch):
    """One update; the advantage is the plain reward."""
    ordered = sorted(rows, key=lambda row: -len(row.columns["input_ids"]))
    total = sum(row.tags["num_sampled"] for row in rows)
    optimizer.zero_grad(set_to_none=True)
    for start in range(0, len(ordered), rows_per_batch):
        batch = ordered[start : start + rows_per_batch]
        width = len(batch[0].columns["input_ids"])
        ids = torch.stack([F.pad(row.columns["input_ids"], (0, width - len(row.columns["input_ids"]))) for row in batch])
        mask = torch.stack([F.pad(row.columns["loss_mask"].bool(), (0, width - len(row.columns["loss_mask"]))) for row in batch])
        old = torch.cat([row.columns["rollout_logprobs"][row.columns["loss_mask"].bool()] for row in batch])
        advantages = torch.cat([torch.full((row.tags["num_sampled"],), row.tags["reward"]) for row in batch])
        hidden = model.model(input_ids=ids, use_cache=False)[0][:, :-1][mask[:, 1:]]
        logprobs = -F.cross_entropy(model.lm_head(hidden), ids[:, 1:][mask[:, 1:]], reduction="none")
        ratio = (logprobs - old).exp()
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).sum() / total
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def seconds_of(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rows", type=int, default=128)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--threads", type=int, default=2)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        num_parameters = make_model(folder)
        rows = make_rows(options.rows)
        num_tokens = sum(row.tags["num_tokens"] for row in rows)
        data_plane = MemoryDataPlane()
        meta = data_plane.put(rows)
        trainer = TrainRank(
            model=ModelConfig(path=folder), actor=ActorConfig(optim=OptimConfig(lr=1e-4), num_threads=options.threads), ref=RefConfig(),
            algorithm=AlgorithmConfig(), critic=CriticConfig(),
            total_steps=1000, seed=1, device="cpu", rank=0, world_size=1, data_plane=data_plane,
        )  # fmt: skip
        trainer.setup("")
        model = AutoModelForCausalLM.from_pretrained(folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        bare_sizes = (16, 32, 64)
        for size in bare_sizes:
            bare_step(model, optimizer, rows, size)
        trainer.train_step(meta, version=0)
        ours, bare = [], {size: [] for size in bare_sizes}
        for _ in range(options.rounds):
            ours.append(seconds_of(lambda: trainer.train_step(meta, version=0)))
            for size in bare_sizes:
                bare[size].append(seconds_of(lambda size=size: bare_step(model, optimizer, rows, size)))
        trainer.close()
    print(f"{num_parameters} parameters, {options.rows} rows, {num_tokens} tokens, {options.threads} threads")
    print(f"TrainRank            {num_tokens / statistics.median(ours):9.0f} tokens/s")
    for size in bare_sizes:
        print(f"bare loop, {size:3d} rows   {num_tokens / statistics.median(bare[size]):9.0f} tokens/s")
    best = min(statistics.median(times) for times in bare.values())
    print(f"ratio to the best bare loop: {best / statistics.median(ours):.2f} (aim: at least 0.85)")


if __name__ == "__main__":
    main()
