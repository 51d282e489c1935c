"""How YAML, overrides and defaults become one Config."""

import sys

import pytest
import yaml
from config_files import write_recipe

from psrl.config.fields import leaves_of, value_at
from psrl.config.load import PACKAGE_FOLDER, RECIPES_FOLDER, Purpose, load_config, recipe_names, to_yaml
from psrl.config.ranges import BOUNDS, CHOICES
from psrl.config.rollout import RolloutConfig
from psrl.config.tree import Config
from psrl.errors import ConfigError

GEN = "gen_actor_rollout_ref.rollout"
VAL = "train_actor_rollout_ref.rollout"


def test_validation_rollouts_take_every_value_from_training_rollouts(tmp_path):
    overrides = [f"{GEN}.temperature=0.7", f"{GEN}.multi_turn.max_turns=6", f"{GEN}.agent.episode_timeout_s=70"]
    config = load_config(str(write_recipe(tmp_path)), overrides)
    gen, val = config.gen_actor_rollout_ref.rollout, config.train_actor_rollout_ref.rollout
    assert (val.temperature, val.multi_turn.max_turns, val.agent.episode_timeout_s) == (0.7, 6, 70.0)
    assert val == gen
    assert val is not gen


def test_what_validation_sets_itself_stays_also_where_it_equals_the_default(tmp_path):
    config = load_config(str(write_recipe(tmp_path)), [f"{GEN}.temperature=0.7", f"{VAL}.temperature=1.0"])
    assert config.train_actor_rollout_ref.rollout.temperature == 1.0


def test_validation_may_also_set_its_own_values_in_yaml(tmp_path):
    text = write_recipe(tmp_path).read_text()
    path = tmp_path / "own.yaml"
    path.write_text(text.replace("train_actor_rollout_ref:\n", "train_actor_rollout_ref:\n  rollout: {n: 4}\n"))
    config = load_config(str(path))
    assert (config.train_actor_rollout_ref.rollout.n, config.gen_actor_rollout_ref.rollout.n) == (4, 1)


def test_overrides_win_over_yaml_and_yaml_over_defaults(tmp_path):
    path = write_recipe(tmp_path, "psrl: {rollout_n: 4, max_episode_retries: 1}\n")
    config = load_config(str(path), ["psrl.rollout_n=6"])
    assert (config.psrl.rollout_n, config.psrl.max_episode_retries, config.psrl.max_infra_error_rate) == (6, 1, 0.5)


def test_the_written_yaml_loads_to_the_same_config(tmp_path):
    config = load_config(str(write_recipe(tmp_path)), [f"{VAL}.n=2", "trainer.logger=[jsonl]"])
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_config(str(again)) == config
    assert yaml.safe_load(to_yaml(config))["train_actor_rollout_ref"]["rollout"]["n"] == 2


def test_relative_paths_start_at_the_working_directory(tmp_path, monkeypatch):
    path = write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = load_config(str(path), ["data.train_files=[rows.jsonl]", "train_actor_rollout_ref.model.path=model"])
    assert config.data.train_files == [str(tmp_path / "rows.jsonl")]
    assert config.train_actor_rollout_ref.model.path == str(tmp_path / "model")
    assert config.trainer.default_local_dir == str(tmp_path / "runs")


def test_package_names_a_file_of_the_installed_package(tmp_path):
    path = write_recipe(tmp_path, "trainer: {default_local_dir: '${package:recipes/somewhere}'}\n")
    assert load_config(str(path)).trainer.default_local_dir == str(PACKAGE_FOLDER / "recipes" / "somewhere")


def test_a_yaml_file_may_build_on_a_shipped_recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [/retool_tiny/config@_global_, _self_]\npsrl: {rollout_n: 3}\n")
    config = load_config(str(path))
    original = load_config("retool_tiny")
    assert config.psrl.rollout_n == 3
    assert config.data == original.data
    assert (config.recipe, original.recipe) == ("mine", "retool_tiny")


def test_a_recipe_is_named_after_its_file_or_its_folder(tmp_path):
    path = write_recipe(tmp_path)
    assert load_config(str(path)).recipe == "mine"
    folder = tmp_path / "tictactoe"
    folder.mkdir()
    path.rename(folder / "config.yaml")
    assert load_config(str(folder)).recipe == "tictactoe"


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_has_no_wrong_setting(name):
    """Data and models that `psrl prepare` makes may not be there yet; nothing else may be wrong."""
    refused = ""
    try:
        load_config(name)
    except ConfigError as error:
        refused = error.rule
    assert refused in ("", "is not on this machine")


def test_fine_tuning_reads_only_its_own_section_and_the_model(tmp_path):
    path = write_recipe(tmp_path, "psrl: {rollout_n: 1}\n")
    assert load_config(str(path), purpose=Purpose.SFT).sft.generator == "arithmetic"


def test_validation_alone_needs_no_training_rows(tmp_path):
    path = write_recipe(tmp_path)
    gone = ["data.train_files=[/nowhere/rows.jsonl]", f"data.val_files=[{tmp_path}/rows.jsonl]"]
    for purpose in (Purpose.VALIDATION, Purpose.ENDPOINT):
        assert load_config(str(path), gone, purpose=purpose).data.train_files == ["/nowhere/rows.jsonl"]
        assert load_config(str(path), ["data.train_files=[]", gone[1]], purpose=purpose).data.train_files == []
    with pytest.raises(ConfigError, match="is not on this machine"):
        load_config(str(path), gone)
    with pytest.raises(ConfigError, match="no source of training tasks"):
        load_config(str(path), ["data.train_files=[]", gone[1]])


def test_rows_that_a_shipped_recipe_makes_are_missed_with_its_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="psrl prepare swe"):
        load_config("swe", purpose=Purpose.ENDPOINT)


def test_every_number_has_bounds_and_every_rule_has_a_setting():
    leaves = {leaf.key: leaf for leaf in leaves_of(Config)}
    assert set(BOUNDS) | set(CHOICES) <= set(leaves)
    numbers = {key for key, leaf in leaves.items() if leaf.base in (int, float)}
    assert numbers == set(BOUNDS)


def test_every_default_keeps_its_own_rule():
    config = Config()
    assert all(bounds.hold(value) for key, bounds in BOUNDS.items() if (value := value_at(config, key)) is not None)
    assert all(value in choices for key, choices in CHOICES.items() if (value := value_at(config, key)) is not None)


def test_loading_imports_nothing_heavy(tmp_path):
    import subprocess

    code = (
        "import sys; from psrl.config.load import load_config; load_config(sys.argv[1]); import psrl.cli.main; "
        "print([name for name in ('torch', 'ray', 'transformers', 'transfer_queue', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(write_recipe(tmp_path))], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_rollout_section_is_the_same_twice():
    keys = {leaf.key for leaf in leaves_of(Config)}
    assert {f"{GEN}.{leaf.key}" for leaf in leaves_of(RolloutConfig)} | {f"{VAL}.{leaf.key}" for leaf in leaves_of(RolloutConfig)} <= keys


def test_recipes_lie_in_the_package():
    assert RECIPES_FOLDER.is_dir()
    assert "retool_tiny" in recipe_names()
