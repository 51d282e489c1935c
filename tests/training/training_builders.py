"""A tiny real model, rows sampled from it, and ranks that train on them."""

import dataclasses
import random

import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM

from psrl.config.actor import ActorConfig, OptimConfig, RefConfig
from psrl.config.algorithm import AlgorithmConfig
from psrl.config.critic import CriticConfig
from psrl.config.model import ModelConfig
from psrl.config.rollout_correction import RolloutCorrectionConfig
from psrl.data_plane import MemoryDataPlane, TrajectoryRow
from psrl.training.worker import TrainRank

VOCABULARY = 48


def save_tiny_model(path):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)


def save_model_with_sliding_windows(path):
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, sliding_window=4, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(path)


def make_rows(model_path, *, num_groups=3, group_size=4, temperature=0.7, seed=0, rewards=None):
    """Rows of two turns whose rollout logprobs are transformers' own, computed row by row over all logits."""
    draw = random.Random(seed)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    rows = []
    for group in range(num_groups):
        for member in range(group_size):
            spans = [draw.randint(3, 9), draw.randint(2, 9), draw.randint(1, 5), draw.randint(1, 6)]  # prompt, turn 0, observation, turn 1
            ids = torch.tensor([draw.randrange(VOCABULARY) for _ in range(sum(spans))])
            turns = torch.tensor([-1] * spans[0] + [0] * spans[1] + [-1] * spans[2] + [1] * spans[3], dtype=torch.int32)
            mask = (turns >= 0).to(torch.int8)
            with torch.no_grad():
                log_probs = torch.log_softmax(model(ids[None]).logits[0] / temperature, -1)
            logprobs = torch.zeros(len(ids))
            logprobs[1:] = log_probs[:-1].gather(1, ids[1:, None]).squeeze(1)
            reward = draw.choice([1.0, -1.0]) if rewards is None else rewards[group * group_size + member]
            episode = f"g{group}-e{member}"
            tags = {
                "group": f"g{group}", "episode": episode, "reward": reward, "outcome": "finished", "admitted_version": 0,
                "num_tokens": len(ids), "num_sampled": int(mask.sum()), "num_turns": 2, "temperature": temperature,
            }  # fmt: skip
            columns = {
                "input_ids": ids, "loss_mask": mask, "rollout_logprobs": logprobs * mask, "turn_indices": turns,
                "policy_versions": torch.where(mask.bool(), 0, -1), "rewards": torch.zeros(len(ids)),
            }  # fmt: skip
            columns["rewards"][-1] = reward
            rows.append(TrajectoryRow(key=f"{episode}-t0", tags=tags, columns=columns))
    return rows


def sampled_elsewhere(rows, shift, *, versions=None):
    """The rows with rollout logprobs that are `shift(row number, [T])` higher, sampled by `versions(row number, [T])`."""
    changed = []
    for number, row in enumerate(rows):
        mask, length = row.columns["loss_mask"].bool(), len(row.columns["input_ids"])
        columns = row.columns | {"rollout_logprobs": (row.columns["rollout_logprobs"] + shift(number, torch.arange(length))) * mask}
        if versions is not None:
            columns["policy_versions"] = torch.where(mask, versions(number, torch.arange(length)), -1)
        changed.append(dataclasses.replace(row, columns=columns))
    return changed


def make_rank(
    model_path,
    data_plane,
    *,
    rank=0,
    world_size=1,
    mask_truncated=False,
    init_method="",
    correction=None,
    algorithm=None,
    critic=None,
    critic_warmup=0,
    model=None,
    device="cpu",
    **actor,
):
    """A TrainRank that is set up; weight decay is off so that no gradient means no change."""
    settings = {"optim": OptimConfig(lr=1e-3, weight_decay=0.0, lr_scheduler_type="linear"), "num_threads": 1} | actor
    trainer = TrainRank(
        model=ModelConfig(path=str(model_path), **(model or {})), actor=ActorConfig(**settings), ref=RefConfig(),
        algorithm=AlgorithmConfig(
            mask_truncated=mask_truncated, rollout_correction=RolloutCorrectionConfig(**(correction or {})), **(algorithm or {})
        ),
        critic=critic or CriticConfig(), critic_warmup=critic_warmup,
        total_steps=10, seed=1, device=device, rank=rank, world_size=world_size, data_plane=data_plane, timeout_s=180.0,
    )  # fmt: skip
    trainer.setup(init_method)
    return trainer


def stored(rows):
    data_plane = MemoryDataPlane()
    return data_plane, data_plane.put(rows)


def largest_difference(left, right):
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)
