"""swe_tiny: the shipped model can be made again, and speaks as mini-SWE-agent does with the recipe's `agent.yaml`."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from jinja2 import StrictUndefined, Template
from minisweagent.environments.local import LocalEnvironment
from minisweagent.exceptions import FormatError, Submitted
from minisweagent.models.utils.actions_text import format_observation_messages, parse_regex_actions
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from psrl.chat import load_renderer
from psrl.config.load import RECIPES_FOLDER, load_config
from psrl.datasets.demonstrations import tokens_of
from psrl.datasets.generators import build_generator
from psrl.datasets.generators.swe_projects.episodes import SILENT, prompt_of
from psrl.datasets.source import build_source
from psrl.errors import ConfigError
from psrl.recipes.swe_tiny.cold_start import MODEL, NAMES, SFT
from psrl.recipes.swe_tiny.prepare import prepare
from psrl.types import Role

FOLDER = RECIPES_FOLDER / "swe_tiny"
MAX_SHIPPED_BYTES = 8 * 2**20
PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "swe_tiny" / "training.md"
ROLLOUT = "gen_actor_rollout_ref.rollout"
NATIVE = (
    f"{ROLLOUT}.agent.default_agent_loop=multi_turn_agent",
    f"{ROLLOUT}.agent.env.name=mini_swe_env",
    f"{ROLLOUT}.agent.data.name=mini_swe_agent_data",
)


@pytest.fixture(scope="module")
def agent():
    return yaml.safe_load((FOLDER / "agent.yaml").read_text())


@pytest.fixture(scope="module")
def renderer():
    return load_renderer(str(FOLDER / "model"), tool_format="hermes")


@pytest.fixture(scope="module")
def demonstrations():
    return build_generator("swe_projects").demonstrations(1000, seed=5)


def test_the_prompt_of_an_episode_is_the_one_that_mini_swe_agent_makes(agent):
    (task,) = build_generator("swe_projects").train_tasks(1, seed=1)
    problem = task.extra_info["swe"]
    rendered = [
        Template(agent["agent"][name], undefined=StrictUndefined).render(task=problem["statement"])
        for name in ("system_template", "instance_template")
    ]
    assert rendered == [message.content for message in prompt_of(problem["statement"])]
    assert agent["task_kind"] == problem["task_kind"] == "swe_tiny"


def test_each_turn_of_a_scripted_episode_is_one_command_of_mini_swe_agent(agent, demonstrations):
    regex, template = agent["model"]["action_regex"], agent["model"]["format_error_template"]
    for each in demonstrations:
        turns = [message.content for message in each.messages if message.role is Role.ASSISTANT]
        assert len(turns) <= agent["agent"]["step_limit"]
        for turn in turns:
            (action,) = parse_regex_actions(turn, action_regex=regex, format_error_template=template)
            assert turn == f"$ {action['command']}"
        with pytest.raises(Submitted):
            LocalEnvironment()._check_finished({"output": action["command"].removeprefix("echo ") + "\n", "returncode": 0})


def test_a_turn_without_a_command_is_told_the_form(agent):
    with pytest.raises(FormatError) as caught:
        parse_regex_actions(
            "no", action_regex=agent["model"]["action_regex"], format_error_template=agent["model"]["format_error_template"]
        )
    assert caught.value.messages[0]["content"] == "Write: $ command"


@pytest.mark.parametrize(
    ("output", "code", "shown"), [("", 0, SILENT), ("", 1, "exit 1"), ("a\n  b\n\n", 0, "a\n  b"), ("sed: no\n", 2, "sed: no")]
)
def test_what_the_shell_says_is_shown_as_in_scripted_episodes(agent, output, code, shown):
    given = [{"output": output, "returncode": code, "exception_info": ""}]
    (message,) = format_observation_messages(given, observation_template=agent["model"]["observation_template"])
    assert message["content"] == shown


@pytest.mark.slow
def test_the_cold_start_is_made_again_in_small_and_its_loss_falls(tmp_path):
    losses = []
    MODEL.make(tmp_path / "model", num_steps=20, on_step=lambda progress: losses.append(progress.loss))
    assert losses[0] > 6.0  # near the loss of a uniform guess over the vocabulary, ln 1028 = 6.94
    assert losses[-1] < 0.8 * losses[0]
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "model" / name).read_text() == (FOLDER / "model" / name).read_text(), f"{name} of the package was made otherwise"


def test_the_prepare_step_takes_no_source():
    with pytest.raises(ConfigError, match="makes its data itself"):
        prepare(source=Path("rows.jsonl"))


def test_the_shipped_model_is_small_and_of_the_architecture_that_the_docs_name():
    assert sum(path.stat().st_size for path in (FOLDER / "model").iterdir()) <= MAX_SHIPPED_BYTES
    config = AutoConfig.from_pretrained(FOLDER / "model")
    assert (config.model_type, config.num_hidden_layers, config.hidden_size, config.tie_word_embeddings) == ("qwen3", 4, 128, True)
    num_parameters = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(FOLDER / "model").parameters())
    assert 1e6 < num_parameters < 2e6


def test_a_name_is_the_same_token_wherever_it_stands_and_every_byte_can_be_written():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
    for name in NAMES:
        alone = tokenizer.tokenize(name)
        for text in (f"def {name}_{name}(", f" {name}, ", f"s/{name} + 1/", f"{name}."):
            tokens = tokenizer.tokenize(text)
            assert any(tokens[start : start + len(alone)] == alone for start in range(len(tokens))), (name, text)
    text = "Grüße, 世界! \t π\r\n\x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_prompts_turns_and_episodes_fit_the_recipes_limits(renderer, demonstrations):
    config = load_config("swe_tiny")
    rollout = config.gen_actor_rollout_ref.rollout
    source = build_source(config.data, prompt_tokens=lambda task: len(renderer.open(prompt_of(task.prompt[-1].content), [])))
    assert (source.report.num_train, source.report.num_val, source.report.num_overlong) == (160, 40, 0)
    for each in demonstrations:
        prompt = len(renderer.open(each.messages[:2], []))
        assert prompt <= rollout.prompt_length
        assert len(tokens_of(each, renderer).ids) - prompt <= rollout.response_length
        turns = [message.content for message in each.messages if message.role is Role.ASSISTANT]
        assert all(len(renderer.template.encode(turn)) < rollout.multi_turn.max_tokens_per_turn for turn in turns)


def test_psrl_sft_repeats_the_cold_start_of_the_package():
    settings = load_config("swe_tiny").sft
    assert settings == replace(SFT, generator="swe_projects", output_path=settings.output_path)


def test_the_native_loop_plays_the_same_recipe_with_the_overrides_of_the_page():
    through_agent, native = load_config("swe_tiny"), load_config("swe_tiny", NATIVE)
    agent = native.gen_actor_rollout_ref.rollout.agent
    assert (agent.default_agent_loop, agent.env.name, agent.data.name) == ("multi_turn_agent", "mini_swe_env", "mini_swe_agent_data")
    assert agent.agent_loop_config_path == through_agent.gen_actor_rollout_ref.rollout.agent.agent_loop_config_path
    assert native.data == through_agent.data
    assert all(override in PAGE.read_text() for override in NATIVE)
