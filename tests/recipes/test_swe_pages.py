"""docs/recipes/swe says what the code does: every option, every reason, every file."""

import re
from pathlib import Path

import pytest

from psrl.cli.recipe_options import options_of
from psrl.config.agent_yaml import read_agent_yaml
from psrl.config.load import PACKAGE_FOLDER, RECIPES_FOLDER, load_config
from psrl.datasets.swe_rows import GYM_REPOS, TASK_KIND
from psrl.recipes.swe.options import HUB_NAMES
from psrl.recipes.swe.prepare import prepare
from psrl.recipes.swe.validation import Verdict

DOCS = Path(__file__).parent.parent.parent / "docs"
PREPARE = (DOCS / "recipes" / "swe" / "prepare.md").read_text()
SOURCES = [
    *(RECIPES_FOLDER / "swe" / f"{name}.py" for name in ("prepare", "task_folders", "validation")),
    PACKAGE_FOLDER / "datasets" / "swe_rows.py",
]


def test_every_option_is_on_the_page_and_the_page_has_no_other():
    options = {"--source", "--output", *(option.flag for option in options_of(prepare, but=("source", "output")))}
    named = set(re.findall(r"`(--[a-z-]+)", PREPARE))
    assert named - {"--no-with-model"} == options - {"--output", "--with-model"}


def test_every_reason_to_leave_a_problem_out_is_on_the_page():
    text = "".join(path.read_text() for path in SOURCES)
    reasons = set(re.findall(r'refuse(?:_named)?\(\s*"([a-z_]+)"', text))
    reasons |= set(re.findall(r'reason="([a-z_]+)"', text)) | set(re.findall(r'missing="([a-z_]+)"', text))
    reasons |= {str(verdict) for verdict in Verdict} - {"good"} | {"cannot_be_run", "bad_test_patch", "bad_patch"}
    assert len(reasons) > 20
    assert [reason for reason in sorted(reasons) if f"`{reason}`" not in PREPARE] == []


def test_the_short_names_of_the_hub_are_on_the_page():
    assert [name for name in HUB_NAMES if f"`{name}`" not in PREPARE] == []
    assert len(GYM_REPOS) == 11  # "its eleven repositories"


@pytest.mark.parametrize("key", ["sandbox.wall_s", "reward.execution.timeout_s"])
def test_a_knob_s_value_on_the_page_is_the_recipe_s(key, tmp_path, monkeypatch):
    page = (DOCS / "recipes" / "swe" / "training.md").read_text()
    model = tmp_path / "data/swe/SmolLM2-135M-Instruct"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    for part in ("train", "test"):
        (model.parent / f"{part}.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    config = load_config("swe")
    values = {"sandbox.wall_s": config.sandbox.wall_s, "reward.execution.timeout_s": config.reward.execution.timeout_s}
    assert re.search(rf"`{re.escape(key)}`[^|]*\| {values[key]:g}[,| ]", page)


def test_the_agent_of_the_recipe_is_written_for_its_rows():
    settings = read_agent_yaml(str(RECIPES_FOLDER / "swe" / "agent.yaml"))
    assert settings.task_kind == TASK_KIND
    assert "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in settings.instance_template
