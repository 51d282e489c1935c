"""Off-policy correction that is counted twice, has no effect or cannot be read is refused before anything starts."""

import pytest
from config_files import write_recipe

from psrl.config.load import load_config
from psrl.errors import ConfigError

KEY = "algorithm.rollout_correction"
ACTOR = "train_actor_rollout_ref.actor"
GEN = "gen_actor_rollout_ref.rollout"
RECOMPUTE = f"{ACTOR}.old_logprobs=recompute"
REINFORCE = f"{ACTOR}.policy_loss=reinforce"
TOKEN = f"{KEY}.rollout_is=token"

# (overrides, key of the error, words of the message)
WRONG = [
    ([f"{KEY}.rollout_is=turn", RECOMPUTE], f"{KEY}.rollout_is", "token, sequence"),
    ([TOKEN], f"{KEY}.rollout_is", "twice"),
    ([f"{KEY}.rollout_is_threshold=3.0"], f"{KEY}.rollout_is_threshold", "no effect"),
    ([TOKEN, RECOMPUTE, f"{KEY}.rollout_is_threshold=0.5"], f"{KEY}.rollout_is_threshold", "agree"),
    # YAML and Hydra read 0.5_2 as 0.52, 1_5 as 15
    ([TOKEN, RECOMPUTE, f"{KEY}.rollout_is_threshold=1_5"], f"{KEY}.rollout_is_threshold", "as the number 15"),
    ([f"{KEY}.rollout_rs=token_k1", f"{KEY}.rollout_rs_threshold=1_2"], f"{KEY}.rollout_rs_threshold", "as the number 12"),
    ([f"{KEY}.rollout_token_veto_threshold=1_0e-4"], f"{KEY}.rollout_token_veto_threshold", "decimal points"),
    ([TOKEN, RECOMPUTE, f"{KEY}.rollout_is_threshold=0.5_2"], f"{KEY}.rollout_is_threshold", "decimal points"),
    ([f"{KEY}.rollout_rs_threshold=2.0"], f"{KEY}.rollout_rs_threshold", "no effect"),
    ([f"{KEY}.rollout_rs=token_k1"], f"{KEY}.rollout_rs_threshold", "needs thresholds"),
    ([f"{KEY}.rollout_rs=geometric", f"{KEY}.rollout_rs_threshold=2.0"], f"{KEY}.rollout_rs", "seq_mean_k1"),
    ([f"{KEY}.rollout_token_veto_threshold=0"], f"{KEY}.rollout_token_veto_threshold", "at least 1e-08"),
    ([f"{KEY}.rollout_token_veto_threshold=2"], f"{KEY}.rollout_token_veto_threshold", "at most 0.5"),
    ([f"{KEY}.rollout_token_veto_threshold=1e-4", f"{GEN}.top_p=0.9"], f"{GEN}.top_p", "would correct the cut"),
    ([f"{KEY}.rollout_rs=token_k1", f"{KEY}.rollout_rs_threshold=2.0", f"{GEN}.top_k=20"], f"{GEN}.top_k", "would correct the cut"),
    ([REINFORCE, RECOMPUTE], f"{ACTOR}.old_logprobs", "no effect"),
    ([REINFORCE, f"{ACTOR}.clip_ratio_high=0.3"], f"{ACTOR}.clip_ratio_high", "no effect"),
    ([RECOMPUTE, f"{ACTOR}.clip_ratio_high=0.3"], f"{ACTOR}.clip_ratio_high", "the ratio is 1"),
    ([f"{KEY}.bypass_mode=true"], f"{KEY}.bypass_mode", "no setting"),
]


@pytest.mark.parametrize(("overrides", "key", "words"), WRONG, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_a_wrong_correction_is_refused_with_its_key(tmp_path, overrides, key, words):
    with pytest.raises(ConfigError) as refused:
        load_config(str(write_recipe(tmp_path)), overrides)
    assert refused.value.key == key
    assert words in str(refused.value)


def test_two_bounds_that_yaml_reads_as_one_number_are_refused_in_a_file_too(tmp_path):
    recipe = write_recipe(tmp_path, "algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: 1_5}}\n")
    with pytest.raises(ConfigError, match="as the number 15") as refused:
        load_config(str(recipe), [RECOMPUTE])
    assert refused.value.key == f"{KEY}.rollout_is_threshold"


def test_whole_numbers_names_and_quoted_bounds_may_have_underscores(tmp_path):
    recipe = write_recipe(tmp_path, "algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: '1_5'}}\n")
    config = load_config(str(recipe), [RECOMPUTE, "sft.max_length=1_024", "trainer.experiment_name=run_1_5"])
    assert config.algorithm.rollout_correction.rollout_is_threshold == "1_5"
    assert (config.sft.max_length, config.trainer.experiment_name) == (1024, "run_1_5")


@pytest.mark.parametrize(
    "overrides",
    [
        [RECOMPUTE],
        [RECOMPUTE, TOKEN],
        [RECOMPUTE, f"{KEY}.rollout_is=sequence", f"{KEY}.rollout_is_threshold=0.5_5.0"],
        [f"{KEY}.rollout_rs=seq_mean_k1", f"{KEY}.rollout_rs_threshold=0.99_1.01", f"{KEY}.rollout_token_veto_threshold=1e-4"],
        [RECOMPUTE, TOKEN, f'{KEY}.rollout_rs="token_k1,seq_mean_k3"', f'{KEY}.rollout_rs_threshold="0.5_2.0,0.01"'],
        [REINFORCE, f"{KEY}.rollout_is=sequence"],
        [REINFORCE],
        [RECOMPUTE, f"{ACTOR}.clip_ratio_high=0.3", f"{ACTOR}.ppo_epochs=2"],
        [RECOMPUTE, f"{ACTOR}.clip_ratio_high=0.3", f"{ACTOR}.ppo_mini_batch_size=8"],
    ],
)
def test_corrections_of_verl_are_accepted(tmp_path, overrides):
    load_config(str(write_recipe(tmp_path)), overrides)
