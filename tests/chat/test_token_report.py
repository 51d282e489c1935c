"""`psrl doctor tokens`: what it says of the five families is what docs/tokens.md shows."""

import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from families_under_test import FAMILIES, FOLDERS, real_family

from psrl.chat.token_report import branch_cost, written_formats
from psrl.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "tokens.md"


def said(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "tokens", *arguments])
    assert ended.value.code == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "tokens", *arguments])
    assert ended.value.code != 0
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_page_shows_what_the_command_says(name, capsys):
    shown = re.search(rf"\$ psrl doctor tokens --model {name} --format hermes\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown, f"{PAGE.name} does not show {name}"
    assert said(capsys, "--model", str(FOLDERS[name]()), "--format", "hermes") == shown[1]


@pytest.mark.parametrize(("name", "formats"), [("qwen3", ("hermes",)), ("gpt_oss", ("harmony",)), ("llama3_1", ()), ("gemma3", ())])
def test_the_format_of_a_family_is_read_off_its_template(name, formats):
    assert written_formats(real_family(name).renderer) == formats


def test_a_format_that_the_family_does_not_write_is_named_with_the_one_that_it_does(capsys):
    folder = str(FOLDERS["gpt_oss"]())
    assert "the template writes harmony; hermes does not read its calls: use --format harmony" in said(
        capsys, "--model", folder, "--format", "hermes"
    )
    assert "tool-call format: harmony, as the template writes calls" in said(capsys, "--model", folder)


def test_strip_computes_again_what_stands_after_the_dropped_reasoning():
    family = real_family("qwen3")
    cost = branch_cost(family.renderer)
    answers = [f"The sum is {turn + 42}.<|im_end|>\n" for turn in range(9)]  # all that is left of each turn once its reasoning is gone
    assert cost.num_branches == 9
    assert cost.num_again == sum(len(family.encode(answer)) for answer in answers) - 9  # the separator belongs to the new message
    assert cost.kept_length > 3 * cost.stripped_length


def test_what_cannot_be_reported_on_is_an_error_that_says_why(capsys, tmp_path):
    assert "is no folder" in refused(capsys, "--model", str(tmp_path / "none"))
    assert "no tokenizer can be loaded" in refused(capsys, "--model", str(tmp_path))
    for file in FOLDERS["gpt_oss"]().glob("tokenizer*.json"):
        shutil.copy(file, tmp_path)
    assert "has no chat template; add chat_template.jinja" in refused(capsys, "--model", str(tmp_path))
    assert "is no registered tool-call format" in refused(capsys, "--model", str(FOLDERS["qwen3"]()), "--format", "no_such")
    assert "--model" in refused(capsys)
