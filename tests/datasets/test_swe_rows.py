"""Rows of SWE-bench, SWE-Gym and SWE-smith become problems, or are left out with a reason."""

import subprocess

import pytest
from recipes.swe_published_rows import GOLD, TEST_PATCH, bench_row, bench_row_5, gym_row, smith_row

from psrl.datasets.swe_commands import command_of_script
from psrl.datasets.swe_rows import SweFormat, format_of, problem_of_raw_row
from psrl.errors import RowError
from psrl.types import SweProblem

ACTIVATED = "{\nsource /opt/miniconda3/bin/activate\nconda activate testbed\ncd /testbed\n"


def problem_of(raw, **more):
    return problem_of_raw_row(raw, source="rows.jsonl", row=3, **more)


def test_each_format_is_told_by_its_columns():
    rows = (bench_row(), bench_row_5(), gym_row(), smith_row())
    assert [str(format_of(row)) for row in rows] == ["swe_bench", "swe_bench", "swe_gym", "swe_smith"]


def test_a_row_of_swe_bench_is_tested_as_its_repository_and_version_say():
    problem = problem_of(bench_row())
    assert problem.image == "docker.io/swebench/sweb.eval.x86_64.pallets_1776_flask-5014:latest"
    assert problem.test_command == (
        f"{ACTIVATED}python -m pip install -e .\n}} > /dev/null 2>&1\n{{\npytest -rA tests/test_area.py\n}} 2>&1"
    )
    assert problem.log_parser == "parse_log_flask"
    assert (problem.gold_patch, problem.test_patch, problem.test_paths) == (GOLD, TEST_PATCH, ("tests/test_area.py",))
    assert (problem.fail_to_pass, problem.pass_to_pass) == (("tests/test_area.py::test_area",), ("tests/test_area.py::test_other",))
    assert (problem.task_kind, problem.workdir, problem.allow_network) == ("swe", "/testbed", False)
    assert "multiply" not in problem.statement  # hints are not the agent's to read


def test_a_row_of_version_5_is_tested_as_its_script_says_and_git_is_left_out():
    problem = problem_of(bench_row_5())
    assert problem.image == "swebench/sweb.eval.x86_64.pallets_1776_flask-5014:latest"
    assert problem.log_parser == "parse_log_pytest"
    assert "git " not in problem.test_command and "EOF_" not in problem.test_command and "def test_area" not in problem.test_command
    assert problem.test_command.endswith("python -m pip install -e .\n} > /dev/null 2>&1\n{\npytest -rA tests/test_area.py\n} 2>&1")


def test_the_command_of_a_script_runs_in_a_shell_and_shows_the_tests_alone(tmp_path):
    script = """#!/bin/bash
set -uxo pipefail
echo set up; export NAME=world
git checkout abc file
cat <<'EOF' > made.txt
git is text here
EOF
: '>>>>> Start Test Output'
echo hello $NAME >&2
cat made.txt
: '>>>>> End Test Output'
git checkout abc file
"""
    done = subprocess.run(["bash", "-c", command_of_script(script)], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("hello world\ngit is text here\n", "")
    assert command_of_script("echo no marks\n") is None


@pytest.mark.parametrize(
    ("repo", "version", "words"),
    [
        ("django/django", "1.9", ["python setup.py install", "export LANG=en_US.UTF-8", "./tests/runtests.py --verbosity 2 a.test_area"]),
        ("django/django", "4.1", ["pip install -e .", "--settings=test_sqlite --parallel 1 a.test_area"]),
        ("sympy/sympy", "1.7", ["bin/test -C --verbose tests/a/test_area.py"]),
        ("sphinx-doc/sphinx", "3.4", ["tox --current-env -epy39 -v -- tests/a/test_area.py"]),
        ("astropy/astropy", "1.3", ["pytest -rA -vv -o console_output_style=classic --tb=no tests/a/test_area.py"]),
    ],
)
def test_the_commands_of_swe_bench_s_repositories_are_those_of_its_package(repo, version, words):
    # By hand from `MAP_REPO_VERSION_TO_SPECS` of swebench 4.1.0; a data file is no test to be named.
    patch = TEST_PATCH.replace("tests/test_area.py", "tests/a/test_area.py") + "diff --git a/tests/a/d.json b/tests/a/d.json\nold mode 1\n"
    problem = problem_of(bench_row(repo=repo, version=version, test_patch=patch))
    assert [word for word in words if word not in problem.test_command] == []
    assert "d.json" not in problem.test_command
    assert problem.test_paths == ("tests/a/test_area.py", "tests/a/d.json")


def test_a_row_of_swe_gym_runs_pytest_on_the_files_of_its_tests():
    problem = problem_of(gym_row())
    assert problem.image == "docker.io/xingyaoww/sweb.eval.x86_64.getmoto_s_moto-5752:latest"
    assert problem.log_parser == "parse_log_pytest"
    assert problem.test_command.startswith(ACTIVATED)
    assert problem.test_command.endswith("-p no:cacheprovider tests/test_area.py\n} 2>&1")


def test_a_row_of_swe_smith_has_its_bug_put_in_and_its_mend_turned_round(tmp_path):
    problem = problem_of(smith_row())
    assert problem.image == "jyangballin/swesmith.x86_64.mewwts_1776_addict.75284f95"
    assert problem.test_paths == ("tests/test_area.py", "tests/test_more.py")
    assert problem.hidden_paths == ("tests/test_area.py",)
    (tmp_path / "pkg").mkdir()
    clean = "def area(width, height):\n    return width * height\n"
    (tmp_path / "pkg" / "area.py").write_text(clean)
    for command in problem.setup_commands:
        subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert (tmp_path / "pkg" / "area.py").read_text() == clean.replace("*", "+")
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=problem.gold_patch.encode(), check=True)
    assert (tmp_path / "pkg" / "area.py").read_text() == clean


def test_a_problem_goes_through_a_row_and_back():
    for raw in (bench_row(), gym_row(), smith_row()):
        problem = problem_of(raw, allow_network=True)
        assert SweProblem.of_row(problem.to_row(), source="s", uid="u") == problem


def test_a_bug_that_holds_the_mark_of_its_end_cannot_leave_it():
    bug = smith_row()["patch"].replace("return width + height", "return 'END_OF_BUG'")
    (command,) = problem_of(smith_row(patch=bug)).setup_commands
    assert command.splitlines()[0].endswith("<<'END_OF_BUG_'")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (ValueError("line 3"), "not_json"),
        ([1, 2], "not_an_object"),
        (bench_row(instance_id=None), "bad_field"),
        (bench_row(instance_id="../../etc"), "bad_field"),
        (bench_row(problem_statement=" \n"), "empty_statement"),
        (smith_row(problem_statement=""), "empty_statement"),
        (smith_row(problem_statement=None), "empty_statement"),
        (bench_row(FAIL_TO_PASS="[]"), "no_fail_to_pass"),
        (bench_row(FAIL_TO_PASS=None), "no_fail_to_pass"),
        (bench_row(FAIL_TO_PASS="[broken"), "bad_field"),
        (gym_row(FAIL_TO_PASS=[1]), "bad_field"),
        (bench_row(FAIL_TO_PASS="[" * 100_000), "bad_field"),
        (bench_row(PASS_TO_PASS="[" * 100_000), "bad_field"),
        (gym_row(FAIL_TO_PASS=["tests/test_area.py::test_area", " "]), "bad_field"),
        (gym_row(PASS_TO_PASS=["tests/test_area.py::test_a\nPASSED tests/test_area.py::test_b"]), "bad_field"),
        (gym_row(FAIL_TO_PASS=["tests/test_area.py::test_\ud800"]), "bad_field"),
        (gym_row(FAIL_TO_PASS=["../../e.py::test_area"]), "bad_field"),
        (smith_row(PASS_TO_PASS=["/etc/x.py::test_area"]), "bad_field"),
        (bench_row(problem_statement="It adds \ud800."), "bad_field"),
        (bench_row(patch=GOLD + "\ud800"), "bad_field"),
        (bench_row(instance_id="größe-1"), "bad_field"),
        (bench_row(problem_statement="x" * 200_001), "too_large"),
        (bench_row_5(log_parser="os.system"), "bad_field"),
        (bench_row_5(log_parser="parse_log_pytest; x"), "bad_field"),
        (bench_row(patch=""), "bad_patch"),
        (bench_row(patch=GOLD.replace("+    return width * height\n", "")), "bad_patch"),
        (smith_row(patch=GOLD + "diff --git a/x b/x\nBinary files a/x and b/x differ\n"), "bad_patch"),
        (bench_row(test_patch="no diff"), "bad_test_patch"),
        (bench_row(test_patch=TEST_PATCH.replace("tests/test_area.py", "../../e.py")), "bad_test_patch"),
        (bench_row(test_patch=TEST_PATCH.replace("tests/test_area.py", "/etc/x.py")), "bad_test_patch"),
        (bench_row(patch=GOLD.replace("pkg/area.py", ".git/hooks/post-commit")), "bad_patch"),
        (smith_row(patch=smith_row()["patch"].replace("pkg/area.py", "a/../../x.py")), "bad_patch"),
        (gym_row(test_patch=None), "bad_test_patch"),
        (bench_row(repo="some/thing"), "no_test_command"),
        (bench_row(version=None), "no_test_command"),
        (bench_row_5(eval_type="fail_only"), "fail_only_tests"),
        (bench_row_5(image_assets='{"test_patch": [{"path": "a.png", "url": "https://x"}]}'), "binary_assets"),
        (bench_row_5(image="No Image; rm -rf"), "missing_image"),
        (smith_row(FAIL_TO_PASS=["TestArea/adds"]), "not_pytest"),
        (smith_row(patch=smith_row()["patch"] + "\n".join(["", *["junk " * 20] * 2000])), "too_large"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(raw, reason):
    with pytest.raises(RowError) as caught:
        problem_of(raw)
    assert caught.value.reason == reason
    assert "rows.jsonl row 3" in str(caught.value)


@pytest.mark.parametrize("nothing", ["", None])
def test_a_smith_row_without_its_image_is_said_to_be_one(nothing):
    raw = smith_row(image_name=nothing)
    assert format_of(raw) is SweFormat.SWE_SMITH
    with pytest.raises(RowError) as caught:
        problem_of(raw)
    assert caught.value.reason == "missing_image"


def test_a_statement_at_the_limit_is_kept():
    assert len(problem_of(bench_row(problem_statement="x" * 200_000 + "\n")).statement) == 200_000
