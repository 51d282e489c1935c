"""Every shipped recipe loads, and says in its pages and files what a newcomer needs."""

from pathlib import Path

import pytest

from psrl.cli.main import main
from psrl.config.load import RECIPES_FOLDER, Purpose, configuration_names, load_config, recipe_names
from psrl.datasets.source import build_source
from psrl.errors import ConfigError
from psrl.rewards.base import ScorerParts
from psrl.rewards.scorer import build_scorer
from psrl.sandbox import BackendSandboxes
from psrl.tools.config import load_tools

DOCS = Path(__file__).parent.parent.parent / "docs" / "recipes"
NO_TOOL = (
    "gen_actor_rollout_ref.rollout.multi_turn.tool_config_path=null",
    "gen_actor_rollout_ref.rollout.multi_turn.max_turns=1",
)


@pytest.fixture
def ready_folder(tmp_path, monkeypatch):
    """Where recipes find the files that their prepare step writes."""
    for recipe in ("retool", "gsm8k", "swe"):
        model = tmp_path / "data" / recipe / "SmolLM2-135M-Instruct"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        for part in ("train", "test"):
            (model.parent / f"{part}.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)


def test_the_recipes_are_those_of_the_docs():
    assert set(recipe_names()) == {path.parent.name for path in DOCS.glob("*/index.md")}


@pytest.mark.parametrize("recipe", recipe_names())
def test_a_recipe_loads_and_its_scorer_and_name_are_its_own(recipe, ready_folder):
    config = load_config(recipe)
    assert config.recipe == recipe
    build_scorer(ScorerParts(reward=config.reward, custom=config.custom_reward_function, sandboxes=BackendSandboxes(config.sandbox)))


@pytest.mark.parametrize("recipe", recipe_names())
@pytest.mark.parametrize("page", ["index", "prepare", "training"])
def test_a_recipe_has_its_pages(recipe, page):
    assert f"{recipe}" in (DOCS / recipe / f"{page}.md").read_text().splitlines()[0]
    assert (RECIPES_FOLDER / recipe / "README.md").is_file()


@pytest.mark.parametrize("name", [name for name in configuration_names() if "/clusters/" not in name])
def test_a_configuration_is_named_by_its_path_and_takes_the_rows_that_prepare_writes(name, ready_folder):
    known = {"dapo_math_17k", "aime_2024", "aime_2025"}
    config = load_config(name, purpose=Purpose.SIMULATION)
    assert config.recipe == name.replace("/", "_")
    files = [Path(file) for file in (*config.data.train_files, *config.data.val_files)]
    assert {file.stem for file in files} == known
    assert {file.parent for file in files} == {Path.cwd() / "data" / "retool"}
    assert config.sft.output_path.endswith("-retool-sft")


DESCRIBED = (
    "psrl.ray_address=auto", "psrl.deployment.num_nodes=4", "psrl.deployment.gpus_per_node=[8]", "psrl.deployment.cores_per_node=[96]",
    "psrl.deployment.memory_gib_per_node=[1024]", "psrl.deployment.num_instances=4", "trainer.num_workers=16",
)  # fmt: skip


@pytest.mark.parametrize("name", ["retool/qwen3_4b", "retool/qwen2_5_7b", "retool/qwen2_5_32b"])
def test_a_configuration_is_planned_for_a_cluster_that_is_described_and_not_here(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # neither rows nor models
    with pytest.raises(SystemExit) as ended:
        main(["train", name, "--dry-run", *DESCRIBED])
    assert ended.value.code in (0, None)
    assert "train worker 8-15 on 8 GPUs" in capsys.readouterr().out


def test_a_configuration_that_is_misspelt_is_asked_after():
    with pytest.raises(ConfigError, match="did you mean retool/qwen3_4b"):
        load_config("retool/qwen3_4")


@pytest.mark.parametrize("recipe", ["retool_tiny", "retool"])
def test_the_tools_of_a_recipe_are_those_that_exist(recipe):
    tools = load_tools(str(RECIPES_FOLDER / recipe / "tools.yaml"), program_runner=None)
    assert [tool.schema.name for tool in tools] == ["code_interpreter"]


def test_the_text_only_control_is_the_same_recipe_with_the_tool_taken_away():
    with_tool, control = load_config("retool_tiny"), load_config("retool_tiny", NO_TOOL)
    turns = control.gen_actor_rollout_ref.rollout.multi_turn
    assert (turns.tool_config_path, turns.max_turns) == (None, 1)
    assert control.train_actor_rollout_ref.rollout.multi_turn == turns
    assert control.data == with_tool.data
    assert control.train_actor_rollout_ref.model == with_tool.train_actor_rollout_ref.model
    page = (DOCS / "retool_tiny" / "training.md").read_text()
    assert all(override in page for override in NO_TOOL)


def test_the_tiny_recipe_makes_enough_tasks_and_its_prompts_fit():
    config = load_config("retool_tiny")
    source = build_source(config.data, prompt_tokens=lambda task: len(task.prompt[-1].content))
    steps = config.trainer.total_training_steps
    assert source.report.num_train >= steps * config.data.train_batch_size
    assert source.report.num_overlong == 0
