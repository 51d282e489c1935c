"""What is wrong with tools, tasks or prompts is said before any process is started."""

import json
import sys

import pytest

from psrl.config.cross_checks import DEFAULTS, SHIPPED_NAMES
from psrl.config.load import load_config
from psrl.errors import ConfigError
from psrl.runtime.build import load_tasks, run_renderer
from psrl.runtime.names import REGISTRIES, resolve_names


def test_the_names_that_the_config_knows_are_those_of_the_registries():
    assert {key: set(names) for key, names in SHIPPED_NAMES.items()} == {key: shipped_by(registry) for key, registry in REGISTRIES.items()}


def shipped_by(registry):
    """Names of what psrl brings; tests register things of their own."""
    return {name for name in registry.names if registry.resolve(name).__module__.startswith("psrl.")}


def tasks_of(*overrides: str):
    config = load_config("retool_tiny", list(overrides))
    resolve_names(config)
    return load_tasks(config, run_renderer(config))


def test_a_prompt_is_measured_with_the_tools_that_it_will_offer():
    # Three operands of three digits and the frame of the chat fit into 29 tokens, but not together with the tool's line.
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length=29"):
        tasks_of("data.max_prompt_length=29")
    without_tool = (
        "gen_actor_rollout_ref.rollout.multi_turn.tool_config_path=null",
        "gen_actor_rollout_ref.rollout.multi_turn.max_turns=1",
    )
    assert tasks_of("data.max_prompt_length=29", *without_tool).validation_tasks()


def test_a_tool_file_that_names_no_tool_is_an_error_with_its_fix(tmp_path):
    path = tmp_path / "tools.yaml"
    path.write_text("tools:\n  - name: code_interpretor\n")
    with pytest.raises(ConfigError, match=r"code_interpretor.*Fix: "):
        tasks_of(f"gen_actor_rollout_ref.rollout.multi_turn.tool_config_path={path}")


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.adv_estimator=grpoo",
        "train_actor_rollout_ref.actor.policy_loss=ppo",
        "gen_actor_rollout_ref.rollout.agent.env.name=toolenv",
        "gen_actor_rollout_ref.rollout.agent.default_agent_loop=multi_turn",
        "gen_actor_rollout_ref.rollout.multi_turn.format=hermess",
        "reward.name=retol",
        "data.generator.name=arithmetics",
        "trainer.logger=[consol]",
    ],
)
def test_a_name_that_nobody_registered_is_an_error_that_lists_those_that_are(override):
    with pytest.raises(ConfigError, match=r"Fix: .*use one of") as caught:
        tasks_of(override)
    assert caught.value.key in override or override.startswith(caught.value.key.replace("train_actor", "gen_actor"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("gen_actor_rollout_ref.rollout.agent.env.name=no_such_module.Game", "cannot be imported"),
        ("algorithm.adv_estimator=psrl.algorithms.advantages.Nothing", "has no Nothing"),
    ],
)
def test_a_dotted_path_that_leads_nowhere_is_refused_with_its_own_key(override, words):
    with pytest.raises(ConfigError, match=words) as caught:
        tasks_of(override)
    assert caught.value.key == override.split("=")[0]


def test_a_class_beside_the_users_yaml_is_found(tmp_path):
    (tmp_path / "beside_the_yaml.py").write_text("class Game:\n    pass\n")
    config = load_config("retool_tiny", [f"import_folder={tmp_path}", "gen_actor_rollout_ref.rollout.agent.env.name=beside_the_yaml.Game"])
    resolve_names(config)
    assert sys.modules["beside_the_yaml"].__file__ == str(tmp_path / "beside_the_yaml.py")


class LoopOfAUser:
    """A black-box loop, named by its path."""

    needs_sessions = True


def test_a_loop_that_needs_sessions_says_how_to_start_the_gateway():
    loop = f"gen_actor_rollout_ref.rollout.agent.default_agent_loop={__name__}.LoopOfAUser"
    with pytest.raises(ConfigError, match=r"starts no gateway\. Fix: set psrl\.rollout_gateway\.enable=true"):
        resolve_names(load_config("retool_tiny", [loop]))
    resolve_names(load_config("retool_tiny", [loop, "psrl.rollout_gateway.enable=true"]))


def test_a_row_whose_loop_needs_sessions_says_how_to_start_the_gateway(tmp_path):
    row = {"prompt": [{"role": "user", "content": "1+1"}], "data_source": "x", "agent_name": "multi_turn_completion_agent"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    unused = [f"{key}={DEFAULTS[key]}" for key in ("data.generator.num_train", "data.generator.num_val")]
    with pytest.raises(ConfigError, match=r"multi_turn_completion_agent.*Fix: set psrl\.rollout_gateway\.enable=true"):
        tasks_of("data.generator.name=null", f"data.train_files=[{tmp_path}/rows.jsonl]", *unused)


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["gen_actor_rollout_ref.rollout.name=vllm"], r"scripts/setup\.sh vllm"),
        (["psrl.ps_mode=nixl_cpu", "psrl.ray_address=auto"], "pip install nixl"),
    ],
)
def test_what_is_not_installed_is_refused_with_the_command_that_installs_it(overrides, fix, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr("psrl.runtime.names.NIXL_MODULES", ("no_such_nixl",))
    with pytest.raises(ConfigError, match=fix):
        resolve_names(load_config("retool_tiny", overrides))
