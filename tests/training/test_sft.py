"""SFT learns what is masked in and nothing else, and saves a folder that transformers reads."""

import pytest
import torch
from training_builders import largest_difference
from transformers import AutoModelForCausalLM

from psrl.config.model import ModelConfig
from psrl.config.sft import SftConfig
from psrl.errors import RowTooLongError, TrainingError
from psrl.training.optim import lr_factor
from psrl.training.sft import SftRow, train_sft

COPY_ROWS = [SftRow([1, a, b, 2, a, b, 3], [0, 0, 0, 0, 1, 1, 1]) for a in range(4, 12) for b in range(4, 12)]


def settings(tmp_path, **changes):
    values = {"num_steps": 60, "batch_size": 16, "lr": 5e-3, "warmup_steps": 5, "from_scratch": True, "output_path": str(tmp_path / "sft")}
    return SftConfig(**(values | changes))


def test_a_model_from_scratch_learns_the_masked_tokens_and_is_saved(tiny_model, tmp_path):
    progress = []
    policy = train_sft(settings(tmp_path), ModelConfig(path=str(tiny_model)), COPY_ROWS, on_step=progress.append)
    assert [p.step for p in progress] == list(range(1, 61))
    assert progress[-1].loss < progress[0].loss / 3
    assert progress[0].num_tokens == 16 * 7
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "sft")
    ids = torch.tensor([COPY_ROWS[5].ids])
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, policy.causal_lm(ids).logits, atol=1e-6)


def test_the_loss_is_the_mean_over_masked_tokens_as_transformers_computes_it(tiny_model, tmp_path):
    rows = [SftRow([1, 5, 6, 7], [0, 0, 1, 1]), SftRow([1, 9, 8, 7, 6, 5], [1, 1, 0, 0, 0, 1])]
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    nll = []
    with torch.no_grad():
        for row in rows:
            # transformers ignores label -100, and the first label, which nothing predicts
            labels = torch.tensor([[token if keep else -100 for token, keep in zip(row.ids, row.loss_mask, strict=True)]])
            num = sum(row.loss_mask[1:])
            nll.append((float(model(torch.tensor([row.ids]), labels=labels).loss) * num, num))
    progress = []
    train_sft(
        settings(tmp_path, num_steps=1, batch_size=2, from_scratch=False), ModelConfig(path=str(tiny_model)), rows, on_step=progress.append
    )
    assert progress[0].loss == pytest.approx(sum(n for n, _ in nll) / sum(c for _, c in nll), abs=1e-5)


def test_the_same_seed_gives_the_same_weights_over_several_epochs(tiny_model, tmp_path):
    models = [
        train_sft(settings(tmp_path, num_steps=6, seed=seed), ModelConfig(path=str(tiny_model)), COPY_ROWS[:32]) for seed in (3, 3, 4)
    ]
    first, again, other = ({name: p.detach() for name, p in m.causal_lm.named_parameters()} for m in models)
    assert largest_difference(first, again) == 0.0
    assert largest_difference(first, other) > 1e-3


def test_no_more_rows_are_taken_from_a_generator_than_the_steps_need(tiny_model, tmp_path):
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield COPY_ROWS[len(taken) % 64]

    train_sft(settings(tmp_path, num_steps=2, batch_size=3), ModelConfig(path=str(tiny_model)), endless())
    assert len(taken) == 6


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([], TrainingError),
        ([SftRow([1, 2, 3], [1, 0, 0])], TrainingError),
        ([SftRow([1] * 9, [1] * 9)], RowTooLongError),
    ],
)
def test_rows_that_cannot_be_learned_are_errors(tiny_model, tmp_path, rows, error):
    with pytest.raises(error):
        train_sft(settings(tmp_path, num_steps=1, batch_size=1, max_length=8), ModelConfig(path=str(tiny_model)), rows)


def test_schedules_by_hand():
    shape = {"warmup_steps": 2, "total_steps": 7, "min_ratio": 0.2}
    # two steps of warm-up, then from 1.0 at step 2 to 0.2 at step 6
    assert [round(lr_factor(s, schedule="linear", **shape), 4) for s in range(8)] == [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    # cosine at a half: 0.6; at a quarter: 0.2 + 0.8 * (1 + cos 45 deg) / 2 = 0.8828
    assert [round(lr_factor(s, schedule="cosine", **shape), 4) for s in (2, 3, 4, 6)] == [1.0, 0.8828, 0.6, 0.2]
    assert [lr_factor(s, schedule="constant", **shape) for s in (0, 1, 2, 100)] == [0.5, 1.0, 1.0, 1.0]
