"""Forward and backward of the policy with rows padded, packed, and packed with shared prompts, by the prompt's share of the tokens.

Seconds of CPU of this process at one thread (`--threads`), so that a busy machine changes ratios little; the arrangements take turns and
the best of the rounds counts. Row lengths are drawn once: answers of 30 to 150 tokens, groups of 8, prompts as long as the share asks.

    python benchmarks/training_layouts.py [--groups 8] [--rounds 3] [--hidden 128] [--max-tokens 16384]
"""

import argparse
import os
import random
import tempfile
import time

from psrl.config.processor import openblas_environment

os.environ.update(openblas_environment())  # before numpy is there

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from psrl.config.model import ModelConfig
from psrl.training.model import load_model
from psrl.training.packing import Arrangement, model_inputs, pack

VOCABULARY = 457
GROUP_SIZE = 8
SHARES = (0.05, 0.2, 0.4, 0.6, 0.8)


class Row(tuple):
    """(ids, mask, group); as long as its ids."""

    def __len__(self):
        return self[0].numel()


def make_model(path, hidden, num_layers):
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=num_layers, head_dim=32,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 32, tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(path)


def make_rows(num_groups, share):
    draw = random.Random(0)
    rows = []
    for group in range(num_groups):
        answers = [draw.randint(30, 150) for _ in range(GROUP_SIZE)]
        prompt = [draw.randrange(VOCABULARY) for _ in range(max(1, round(90 * share / (1 - share) * draw.uniform(0.8, 1.2))))]
        for length in answers:
            ids = torch.tensor(prompt + [draw.randrange(VOCABULARY) for _ in range(length)])
            mask = torch.tensor([0] * len(prompt) + [1] * length)
            rows.append(Row((ids, mask, group)))
    draw.shuffle(rows)
    return rows


def step(policy, rows, arrangement, max_tokens):
    policy.zero_grad(set_to_none=True)
    for (batch,) in pack(rows, max_tokens=max_tokens, num_ranks=1, arrangement=arrangement, groups=[row[2] for row in rows]):
        inputs = model_inputs([row[:2] for row in batch.rows], arrangement=arrangement)
        temperatures = torch.ones(len(inputs.chosen))
        logprobs, _ = policy(inputs.input_ids, inputs.states, inputs.chosen, temperatures, layout=inputs.layout)
        logprobs.sum().backward()


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--groups", type=int, default=8)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--hidden", type=int, default=128)
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--max-tokens", type=int, default=16384)
    arguments.add_argument("--threads", type=int, default=1)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, options.hidden, options.layers)
        policy = load_model(ModelConfig(path=folder))
        for share in SHARES:
            rows = make_rows(options.groups, share)
            best = dict.fromkeys(Arrangement, float("inf"))
            for _ in range(options.rounds + 1):
                for arrangement in Arrangement:
                    began = time.process_time()
                    step(policy, rows, arrangement, options.max_tokens)
                    best[arrangement] = min(best[arrangement], time.process_time() - began)
            num_tokens, padded = sum(map(len, rows)), best[Arrangement.PADDED]
            real_share = 1 - sum(int(row[1].sum()) for row in rows) / num_tokens
            ratios = ", ".join(f"{name} {padded / best[name]:.2f}" for name in (Arrangement.PACKED, Arrangement.SHARED))
            print(f"prompt {real_share:4.0%} of {num_tokens:6d} tokens: padded {padded:.2f} s of CPU; times as fast: {ratios}", flush=True)


if __name__ == "__main__":
    main()
