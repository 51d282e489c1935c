"""mini-swe-agent's YAML: what is wrong in it is said when the settings are loaded, and its defaults are mini-swe-agent's own."""

import pytest
import yaml
from config_files import write_recipe

from psrl.config.agent_yaml import AgentYaml, read_agent_yaml
from psrl.config.load import load_config
from psrl.config.machine import Machine
from psrl.config.plan import make_plan
from psrl.errors import ConfigError
from psrl.swe.agent_turn import BASH_TOOL

GEN = "gen_actor_rollout_ref.rollout"
KEY = f"{GEN}.agent.agent_loop_config_path"
GOOD = {
    "task_kind": "swe_tiny",
    "agent": {"system_template": "Mend.", "instance_template": "{{task}} in {{cwd}}"},
    "environment": {"timeout": 5},
    "model": {"model_class": "litellm_textbased"},
}
LOOP = ["default_agent_loop=mini_swe_agent", "env.name=null", "data.name=null"]


def write(folder, content):
    path = folder / "agent.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def changed(key, value):
    """GOOD with one key of a section changed, or removed where the value is None."""
    section, _, name = key.partition(".")
    content = {part: dict(values) if isinstance(values, dict) else values for part, values in GOOD.items()}
    if not name:
        content[section] = value
    elif value is None:
        del content[section][name]
    else:
        content[section][name] = value
    return content


def loaded(folder, content, *overrides, loop=LOOP):
    agent = [f"{GEN}.agent.{each}" for each in loop]
    return load_config(str(write_recipe(folder)), [*agent, f"{KEY}={write(folder, content)}", *overrides])


def test_the_defaults_are_those_of_mini_swe_agent(tmp_path, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    from minisweagent.agents.default import AgentConfig
    from minisweagent.models.litellm_model import LitellmModelConfig
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModelConfig
    from minisweagent.models.utils.actions_toolcall import BASH_TOOL as THEIR_BASH_TOOL

    minimal = {"task_kind": "swe", "agent": GOOD["agent"]}
    ours, theirs = read_agent_yaml(write(tmp_path, minimal)), AgentConfig(**GOOD["agent"])
    for name in ("max_consecutive_format_errors", "wall_time_limit_seconds", "step_limit"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert set(AgentYaml.__dataclass_fields__) >= set(AgentConfig.model_fields) - {"cost_limit", "output_path"}
    for content, model_class in ((minimal, LitellmModelConfig), ({**minimal, "model": GOOD["model"]}, LitellmTextbasedModelConfig)):
        ours, theirs = read_agent_yaml(write(tmp_path, content)), model_class(model_name="m")
        for name in {"observation_template", "format_error_template", "action_regex"} & set(model_class.model_fields):
            assert getattr(ours, name) == getattr(theirs, name)
    assert BASH_TOOL.to_template() == THEIR_BASH_TOOL


# (key in the file, value, words of the error)
WRONG = [
    ("task_kind", None, "for which rows"),
    ("task_kind", 3, "for which rows"),
    ("tools", {}, "is no section"),
    ("run", {"env_startup_command": "make"}, "is no section"),
    ("agent", [1], "must be a mapping"),
    ("agent.system_template", None, "is missing"),
    ("agent.system_template", 5, "must be text"),
    ("agent.instance_template", "{{task", "is no template that jinja can read"),
    ("agent.instance_template", "{{tusk}}", "uses 'tusk', which is not there"),
    ("agent.step_limit", -1, "a whole number, 0 or more"),
    ("agent.step_limit", True, "a whole number"),
    ("agent.cost_limit", 3.0, "tokens have no price here"),
    ("agent.output_path", "t.json", "the agent writes no files"),
    ("agent.max_steps", 3, "is not a key of mini-swe-agent"),
    ("environment.environment_class", "docker", "commands run in the run's sandbox"),
    ("environment.image", "ubuntu", "the image is the row's"),
    ("environment.cwd", "testbed", "an absolute folder"),
    ("environment.timeout", 0, "1 or more"),
    ("environment.env", {"A": 1}, "a mapping of texts"),
    ("environment.interpreter", [], "a list of texts"),
    ("environment.forward_env", ["HOME"], "is not a key of mini-swe-agent that psrl knows"),
    ("model.model_class", "openrouter", "litellm or litellm_textbased"),
    ("model.model_name", "anthropic/claude", "the model is the run's policy"),
    ("model.api_key", "x", "is not a key of mini-swe-agent that psrl knows"),
    ("model.model_kwargs", {"api_base": "http://x"}, "its address and its sampling are the run's"),
    ("model.model_kwargs", {"temperature": 0}, "sampling is rollout.temperature"),
    ("model.model_kwargs", [1], "a mapping of drop_params"),
    ("model.cost_tracking", "default", "tokens have no price here"),
    ("model.action_regex", "```(.*", "a regular expression with one group"),
    ("model.action_regex", "(a)(b)", "a regular expression with one group"),
    ("model.observation_template", "{{outputs}}", "uses 'outputs'"),
    ("model.format_error_template", "{{ error }", "is no template"),
    ("model.format_error_template", "{{ task }}", "uses 'task'"),
]


@pytest.mark.parametrize(("key", "value", "words"), WRONG, ids=[f"{key}={value!r}"[:40] for key, value, _ in WRONG])
def test_a_wrong_file_is_refused_with_the_key_inside_it(tmp_path, key, value, words):
    with pytest.raises(ConfigError) as info:
        read_agent_yaml(write(tmp_path, changed(key, value)))
    assert key in info.value.key
    assert "agent_loop_config_path" in info.value.key
    assert words in str(info.value)
    assert info.value.fix


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"a: {", bytes([255, 254, 58]), None])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "agent.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as info:
        read_agent_yaml(str(tmp_path / "agent.yaml"))
    assert "agent_loop_config_path" in info.value.key


def test_an_action_regex_without_effect_is_refused(tmp_path):
    content = changed("model.action_regex", "<a>(.*?)</a>")
    content["model"]["model_class"] = "litellm"
    with pytest.raises(ConfigError, match="has no effect where commands are tool calls"):
        read_agent_yaml(write(tmp_path, content))


def test_a_right_file_is_read_once_and_read_again_when_it_changes(tmp_path):
    path = write(tmp_path, GOOD)
    first = read_agent_yaml(path)
    assert first is read_agent_yaml(path)
    assert (first.timeout, first.interpreter, first.is_textbased) == (5, ("bash", "-c"), True)
    write(tmp_path, changed("environment.timeout", 9))
    assert read_agent_yaml(path).timeout == 9


@pytest.mark.parametrize(
    ("loop", "overrides", "key", "words"),
    [
        ([], [f"{KEY}=null", "sandbox.allow_network=true"], "sandbox.allow_network", "only projects with a bug"),
        (LOOP, [f"{KEY}=null"], KEY, "is set up by mini-swe-agent's YAML"),
        (["env.name=mini_swe_env", "data.name=mini_swe_agent_data"], [f"{KEY}=null"], KEY, "mini_swe_env is set up by"),
        ([], [], KEY, "is read by none of multi_turn_agent, tool_env, tool_agent_data"),
        (["default_agent_loop=mini_swe_agent", "data.name=null"], [], f"{GEN}.agent.env.name", "the agent brings its own tool"),
        (LOOP, [f"{GEN}.multi_turn.enable=false", f"{GEN}.multi_turn.max_turns=1"], f"{GEN}.multi_turn.enable", "takes many turns"),
        (
            ["env.name=mini_swe_env", "data.name=mini_swe_agent_data"],
            [f"{GEN}.agent.step_timeout_s=5"],
            f"{KEY}: environment.timeout",
            "a command that takes so long ends the episode",
        ),
    ],
)
def test_settings_that_do_not_fit_the_agent_are_refused(tmp_path, loop, overrides, key, words):
    with pytest.raises(ConfigError) as info:
        loaded(tmp_path, GOOD, *overrides, loop=loop)
    assert info.value.key == key
    assert words in str(info.value)


@pytest.mark.parametrize(
    ("loop", "overrides", "words"),
    [
        (LOOP, [], "with mini_swe_agent, what a policy wrote"),
        (["env.name=mini_swe_env", "data.name=mini_swe_agent_data"], [f"{GEN}.agent.step_timeout_s=60"], "with mini_swe_env,"),
        ([], [f"{KEY}=null", "reward.name=execution"], "with execution,"),
    ],
)
def test_projects_are_never_played_or_graded_without_isolation(tmp_path, loop, overrides, words):
    with pytest.raises(ConfigError, match=r"Fix: set sandbox\.backend=bubblewrap") as info:
        loaded(tmp_path, GOOD, "sandbox.backend=process", *overrides, loop=loop)
    assert (info.value.key, info.value.value) == ("sandbox.backend", "process")
    assert words in str(info.value)
    with pytest.raises(ConfigError, match=r"whole programs and keeps nothing.*Fix: set sandbox\.backend=bubblewrap"):
        loaded(tmp_path, GOOD, "sandbox.backend=sandbox_fusion", "sandbox.urls=['http://127.0.0.1:1']", *overrides, loop=loop)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("agent.step_limit", 7, f"differs from {GEN}.multi_turn.max_turns=4"),
        ("agent.wall_time_limit_seconds", 300, f"is never reached: {GEN}.agent.episode_timeout_s=300"),
        ("model.model_name", "anthropic/claude", "the model is the run's policy"),
    ],
)
def test_a_line_that_the_runs_settings_contradict_is_refused_at_load(tmp_path, key, value, words):
    with pytest.raises(ConfigError) as info:
        loaded(tmp_path, changed(key, value))
    assert key in info.value.key
    assert words in str(info.value)


def test_the_step_limit_may_repeat_the_runs(tmp_path):
    config = loaded(tmp_path, changed("agent.step_limit", 4))
    assert config.gen_actor_rollout_ref.rollout.multi_turn.max_turns == 4


def test_the_plan_counts_agents_and_sandboxes_of_the_episodes_in_flight(tmp_path):
    config = loaded(tmp_path, GOOD, "data.train_batch_size=2", "psrl.rollout_n=8")
    plan = make_plan(config, Machine(num_cores=2, memory_bytes=16 * 2**30))
    counts = {process.role: process.count for process in plan.processes}
    assert {role: counts[role] for role in ("warm mini-swe-agent", "mini-swe-agent", "sandbox of an episode", "command", "SMG")} == {
        "warm mini-swe-agent": 1,
        "mini-swe-agent": 16,
        "sandbox of an episode": 16,
        "command": 2,
        "SMG": 1,
    }
    with pytest.raises(ConfigError, match=r"agent\.max_concurrent_episodes"):
        make_plan(loaded(tmp_path, GOOD, "data.train_batch_size=32"), Machine(num_cores=2, memory_bytes=8 * 2**30))
