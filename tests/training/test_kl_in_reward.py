"""The KL to the reference taken from each token's reward, on a real tiny model whose reference is itself."""

import pytest
import torch
from training_builders import make_rank, sampled_elsewhere, stored

from psrl.algorithms.advantages import AdvantageEstimator, Estimates
from psrl.config.algorithm import AlgorithmConfig, KlCtrlConfig
from psrl.data_plane import MemoryDataPlane
from psrl.errors import ConfigError
from psrl.training.credit import Credit

SETTINGS = {"adv_estimator": "reinforce_plus_plus", "use_kl_in_reward": True, "kl_ctrl": KlCtrlConfig(kl_coef=0.5)}


def test_each_sampled_token_pays_for_its_own_kl():
    # kl 0.2 and -0.4 at the sampled tokens, coefficient 0.5: 0 - 0.1 and 1 + 0.2
    columns = {"loss_mask": torch.tensor([0, 1, 0, 1], dtype=torch.int8), "rewards": torch.tensor([0.0, 0.0, 0.0, 1.0])}
    plane, meta = MemoryDataPlane(), type("Meta", (), {"keys": ["a", "without a loss"]})()
    credit = Credit(AlgorithmConfig(**SETTINGS), plane, world_size=1)
    less, same = credit.less_kl(meta, [columns, columns], {"a": torch.tensor([0.2, -0.4])})
    assert less["rewards"].tolist() == pytest.approx([0.0, -0.1, 0.0, 1.2])
    assert same["rewards"].tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.3), ("k2", 0.045)])
def test_the_kl_is_that_of_the_policy_that_sampled(tiny_model, rows, kind, expected):
    # Engine's logprobs 0.3 above those of the reference, which are the trainer's own: d = 0.3, d^2 / 2 = 0.045
    plane, meta = stored(sampled_elsewhere(rows, lambda number, positions: torch.full((len(positions),), 0.3)))
    metrics = make_rank(tiny_model, plane, algorithm=SETTINGS | {"kl_penalty": kind}).train_step(meta, version=0)
    assert metrics["train/reward_kl/mean"] == pytest.approx(expected, abs=1e-4)
    assert "train/ref_kl/mean" not in metrics, "the loss has no KL term"


class Indifferent(AdvantageEstimator):
    """Reads nothing."""

    needed_columns = ()

    def estimate(self, batch, settings):
        return Estimates(advantages=[torch.tensor(0.0) for _ in batch.tags])


def test_an_estimator_of_the_users_own_that_reads_no_rewards_by_token_is_refused_before_a_step():
    settings = AlgorithmConfig(**SETTINGS | {"adv_estimator": f"{__name__}.Indifferent"})
    with pytest.raises(ConfigError, match="needed_columns"):
        Credit(settings, MemoryDataPlane(), world_size=1)


def test_where_there_is_no_kl_nothing_is_taken(tiny_model, rows):
    norms = []
    for settings in (SETTINGS, {"adv_estimator": "reinforce_plus_plus"}):
        plane, meta = stored(rows)
        norms.append(make_rank(tiny_model, plane, algorithm=settings).train_step(meta, version=0)["train/grad_norm/mean"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
