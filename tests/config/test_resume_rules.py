"""What a resume may change, by the run's own config.yaml."""

import pytest

from psrl.config.fields import leaves_of
from psrl.config.load import load_config, to_yaml
from psrl.config.resume_rules import FIXED, changed_settings, check_changes
from psrl.config.tree import Config
from psrl.errors import ConfigError


@pytest.fixture(scope="module")
def started():
    return load_config("retool_tiny")


@pytest.fixture
def run_yaml(tmp_path, started):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(started))
    return path


def test_nothing_has_changed_when_the_runs_own_settings_are_loaded(run_yaml):
    assert changed_settings(run_yaml, load_config(str(run_yaml))) == {}


def test_a_change_is_named_with_both_values(run_yaml, started):
    now = load_config(str(run_yaml), ["psrl.rollout_n=4", "train_actor_rollout_ref.actor.optim.lr=0.5"])
    assert changed_settings(run_yaml, now) == {
        "psrl.rollout_n": (started.psrl.rollout_n, 4),
        "train_actor_rollout_ref.actor.optim.lr": (started.train_actor_rollout_ref.actor.optim.lr, 0.5),
    }
    check_changes(changed_settings(run_yaml, now))


def test_a_setting_that_the_run_did_not_know_had_its_default(run_yaml, started):
    run_yaml.write_text("recipe: retool_tiny\n")
    assert "psrl.staleness" not in changed_settings(run_yaml, started)
    assert "data.generator.name" in changed_settings(run_yaml, started)


def test_every_fixed_setting_exists_and_is_refused_with_its_reason_and_a_fix():
    assert set(FIXED) <= {leaf.key for leaf in leaves_of(Config)}
    for key, reason in FIXED.items():
        with pytest.raises(ConfigError) as refused:
            check_changes({"psrl.staleness": (0, 1), key: ("before", "now")})
        assert refused.value.key == key
        assert "'before'" in refused.value.rule and reason in refused.value.rule
        assert f"leave {key} out" in refused.value.fix


def test_settings_that_are_no_yaml_are_named(tmp_path, started):
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="cannot be read"):
        changed_settings(tmp_path / "config.yaml", started)
