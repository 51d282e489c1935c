"""`psrl prepare` offers what the recipe's own function takes, and refuses everything else by name."""

import json

import pytest

from psrl.cli.main import main
from psrl.cli.recipe_options import options_of
from psrl.recipes.retool.prepare import prepare as prepare_retool

PREPARE = """
from __future__ import annotations
import json
from pathlib import Path

def prepare(source, output, *, subset: int = 0, share: float | None = None, folder: Path | None = None, name="x", validate: bool = False,
            hook: dict | None = None):
    given = {"subset": subset, "share": share, "folder": str(folder), "name": name, "validate": validate}
    (Path(__file__).parent / "given.json").write_text(json.dumps(given))
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {train_files: [a.jsonl]}\n")
    (tmp_path / "prepare.py").write_text(PREPARE)
    return tmp_path


def run_psrl(*arguments):
    with pytest.raises(SystemExit) as info:
        main([str(argument) for argument in arguments])
    return info.value.code


def test_parameters_of_the_function_are_options_with_their_types(recipe):
    words = ("--subset", "5", "--share=0.25", "--folder", "/tmp/a", "--name", "b c", "--validate")
    assert run_psrl("prepare", recipe, *words) == 0
    given = json.loads((recipe / "given.json").read_text())
    assert given == {"subset": 5, "share": 0.25, "folder": "/tmp/a", "name": "b c", "validate": True}


def test_a_switch_can_be_turned_off_and_what_is_not_given_keeps_its_default(recipe):
    assert run_psrl("prepare", recipe, "--no-validate") == 0
    assert json.loads((recipe / "given.json").read_text()) == {
        "subset": 0, "share": None, "folder": "None", "name": "x", "validate": False
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--subst", "5"], ["--subst", "is no option of psrl prepare", "--subset INT", "did you mean --subset?"]),
        (["--hook", "{}"], ["--hook", "is no option"]),
        (["word"], ["word", "is no option"]),
        (["--subset", "many"], ["--subset", "'many'", "a whole number"]),
        (["--share", "half"], ["--share", "a number"]),
        (["--subset"], ["--subset", "needs a value", "write --subset INT"]),
        (["--subset", "--no-validate"], ["--subset", "needs a value", "write --subset INT"]),
        (["--validate=yes"], ["--validate", "takes no value"]),
        (["--validate", "--no-validate"], ["--validate", "is there twice"]),
    ],
    ids=[
        "misspelt",
        "no word can be a dict",
        "bare word",
        "no whole number",
        "no number",
        "no value",
        "option as value",
        "switch",
        "twice",
    ],
)
def test_a_wrong_option_is_refused_before_anything_runs(recipe, capsys, words, said):
    assert run_psrl("prepare", recipe, *words) == 2
    printed = capsys.readouterr().err
    assert [each for each in said if each not in printed] == []
    assert not (recipe / "given.json").exists()


def test_the_options_of_a_shipped_recipe_are_its_parameters():
    assert [str(option) for option in options_of(prepare_retool, but=("source", "output"))] == ["--hub STR", "--sft STR", "--with-model"]


def test_help_shows_the_options_of_the_recipe_that_is_named(recipe, capsys):
    assert run_psrl("prepare", recipe, "--help") == 0
    printed = capsys.readouterr().out
    assert "--subset INT" in printed and "--validate / --no-validate" in printed and "--hook" not in printed
    assert not (recipe / "given.json").exists()
    assert run_psrl("prepare", "swe", "--help") == 0
    assert "a folder of projects" in " ".join(capsys.readouterr().out.split())
    assert run_psrl("prepare", "--help") == 0
    assert "psrl prepare RECIPE --help" in capsys.readouterr().out
