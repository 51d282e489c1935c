"""`psrl eval --model URL`: the recipe's agent at somebody else's endpoint; gold resolves all, null none."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from recipes.swe_task_folders import write_task
from runtime.chat_endpoint import chat_endpoint

from psrl.cli.main import main
from psrl.recipes.swe.row_files import write_problems
from psrl.recipes.swe.task_folders import read_task_folder
from psrl.telemetry.errors_log import read_errors

RECIPE = """
defaults: [/swe/config@_global_, _self_]
data: {{train_files: [{folder}/nowhere.jsonl], val_files: [{folder}/problems.jsonl]}}
sandbox: {{backend: bubblewrap, packages: [pytest], wall_s: 20}}
psrl: {{max_episode_retries: 1}}
trainer: {{default_local_dir: {folder}/runs}}
"""
OTHER_LOOP = [
    f"train_actor_rollout_ref.rollout.{each}"
    for each in (
        "agent.default_agent_loop=generate_only_agent",
        "agent.agent_loop_config_path=null",
        "multi_turn.enable=false",
        "multi_turn.max_turns=1",
        "multi_turn.max_tokens_per_turn=0",
    )
]
SUBMIT = "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"


@pytest.fixture
def problems(tmp_path):
    """Three problems, and the recipe that plays them."""
    made = []
    tests = {"fail_to_pass": ("tests/test_sums.py::test_sum",), "pass_to_pass": ("tests/test_sums.py::test_nothing",)}
    for name, repo in (("first", "mine"), ("second", "mine"), ("third", "other")):
        statement = f"Problem {name}: total(2, 3) gives -1, not 5."
        read = read_task_folder(write_task(tmp_path / "tasks", name, statement=statement))
        made.append(replace(read, repo=repo, **tests))
    write_problems({tmp_path / "problems.jsonl": made}, {problem.instance_id: "tasks" for problem in made})
    (tmp_path / "mine.yaml").write_text(RECIPE.format(folder=tmp_path))
    return made


def gold(problems, *, but=()):
    """An agent that knows the mend of every problem but some."""

    def answer(body):
        messages = body["messages"]
        problem = next(each for each in problems if each.statement in messages[1]["content"])
        if len(messages) > 2 or problem.instance_id in but:
            return f"It is mended.\n\n{SUBMIT}"
        return f"I know this one.\n\n```bash\ngit apply - <<'END_OF_MEND'\n{problem.gold_patch}END_OF_MEND\n```"

    return answer


def evaluate(tmp_path, url, *more):
    with pytest.raises(SystemExit) as info:
        main(["eval", str(tmp_path / "mine.yaml"), "--model", url, *more])
    return info.value.code


def run_folder(tmp_path):
    (folder,) = (tmp_path / "runs" / "mine").iterdir()
    return folder


def test_a_mixed_agent_is_told_apart_and_its_patches_are_predictions_that_swebench_reads(tmp_path, problems, capsys, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret-123")
    with chat_endpoint(gold(problems, but=["first"]), models=["org/teacher", "other"], key="secret-123") as (url, requests):
        assert evaluate(tmp_path, f"{url}/v1", "--model-name", "org/teacher", "--api-key-env", "MY_KEY") == 0
    printed = capsys.readouterr().out
    assert "resolved 2 of 3: 66.7% (95% confidence interval 20.8% to 93.9%, Wilson)" in printed
    assert "played 3/3" in printed and "outcomes" in printed and "finished 3" in printed and "Submitted 3" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert ["mine", "1", "2"] in rows and ["other", "1", "1"] in rows
    assert {body["model"] for body in requests} == {"org/teacher"}
    folder = run_folder(tmp_path)
    predictions = {each["instance_id"]: each for each in predictions_as_swebench_reads_them(folder / "predictions.json")}
    assert {name: each["model_name_or_path"] for name, each in predictions.items()} == dict.fromkeys(
        ("first", "second", "third"), "org/teacher"
    )
    assert predictions["first"]["model_patch"] == ""
    assert all("+    return a + b" in predictions[name]["model_patch"] for name in ("second", "third"))
    results = {each["instance_id"]: each for each in json.loads((folder / "results.json").read_text())}
    assert results["third"]["repo"] == "other" and results["third"]["is_resolved"] and results["third"]["num_turns"] == 2
    assert len((folder / "trajectories" / "val.jsonl").read_text().splitlines()) == 3
    assert [child.name() for child in psutil.Process().children(recursive=True) if "bwrap" in child.name()] == []
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml", "errors.jsonl", "predictions.json", "results.json", "trajectories"
    }  # fmt: skip
    assert not any("secret-123" in path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())
    with pytest.raises(SystemExit):
        main(["view", str(folder), "--val"])
    listed = capsys.readouterr().out
    assert "unknown" in listed and "I know this one" not in listed


@pytest.mark.slow
@pytest.mark.parametrize(("is_gold", "said"), [(True, "3 of 3: 100.0% (95% confidence interval 43.9%"), (False, "0 of 3: 0.0%")])
def test_gold_resolves_all_and_null_none(tmp_path, problems, capsys, is_gold, said):
    # 3 / (3 + 1.96²) = 0.4385; the endpoint has no list of models.
    with chat_endpoint(gold(problems, but=[] if is_gold else ["first", "second", "third"]), models=None) as (url, _):
        assert evaluate(tmp_path, url, "--model-name", "policy") == 0
    assert f"resolved {said}" in capsys.readouterr().out


def predictions_as_swebench_reads_them(path):
    """Through the released package's own loader, which needs none of what else the package imports."""
    origin = Path(importlib.util.find_spec("swebench").origin).parent / "harness" / "utils.py"
    text = origin.read_text()
    start = text.index("def get_predictions_from_file(")
    space = {"json": json}
    exec(text[start : text.index("\ndef ", start + 1)], space)
    return space["get_predictions_from_file"](str(path), "SWE-bench/SWE-bench_Verified", "test")


@pytest.mark.slow
def test_an_endpoint_that_fails_is_no_fault_of_the_model_s(tmp_path, problems, capsys):
    with chat_endpoint(gold(problems), status=500) as (url, requests):
        assert evaluate(tmp_path, url, "data.val_max_samples=1") == 0
    printed = capsys.readouterr().out
    assert "resolved 0 of 1" in printed and "infra_error 1" in printed
    (result,) = json.loads((run_folder(tmp_path) / "results.json").read_text())
    assert result["reward"] is None and "InternalServerError" in result["error"]
    errors = list(read_errors(run_folder(tmp_path) / "errors.jsonl"))
    assert [error.error_class for error in errors] == ["infra_error"] * 2 and all(error.unit.startswith("first ") for error in errors)
    assert "InternalServerError" in errors[0].message and errors[0].is_retryable
    assert len(requests) >= 2  # played again once, as psrl.max_episode_retries says


@pytest.mark.slow
def test_an_interrupt_of_the_terminal_before_agents_are_warm_ends_within_seconds(tmp_path, problems):
    with chat_endpoint(gold(problems)) as (url, requests):
        command = [sys.executable, "-m", "psrl", "eval", str(tmp_path / "mine.yaml"), "--model", url]
        program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        assert "run folder" in program.stdout.readline()
        os.killpg(program.pid, signal.SIGINT)
        began = time.monotonic()
        printed, _ = program.communicate(timeout=60)
    assert time.monotonic() - began < 15
    assert program.returncode == 0
    assert "SIGINT: finishing" in printed and "stopped early" in printed and "Traceback" not in printed
    assert requests == []


@pytest.mark.slow
def test_an_interrupt_ends_the_evaluation_and_keeps_what_was_played(tmp_path, problems):
    is_asked, may_answer = threading.Event(), threading.Event()

    def answer(body):
        if problems[0].statement in body["messages"][1]["content"]:
            return SUBMIT
        is_asked.set()
        may_answer.wait(60)
        return SUBMIT

    with chat_endpoint(answer) as (url, _):
        words = ["eval", tmp_path / "mine.yaml", "--model", url, "train_actor_rollout_ref.rollout.agent.max_concurrent_episodes=1"]
        words += ["gen_actor_rollout_ref.rollout.agent.max_concurrent_episodes=1"]
        command = [sys.executable, "-m", "psrl", *map(str, words)]
        program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert is_asked.wait(180)
        program.send_signal(signal.SIGINT)
        printed, _ = program.communicate(timeout=60)
        may_answer.set()
    assert program.returncode == 0
    assert "resolved 0 of 1" in printed and "stopped early" in printed and "True" in printed
    assert list(json.loads((run_folder(tmp_path) / "predictions.json").read_text())) == ["first"]


def test_a_key_that_is_refused_is_named_by_its_variable(tmp_path, problems, monkeypatch, capsys):
    monkeypatch.setenv("MY_KEY", "wrong")
    with chat_endpoint(lambda body: SUBMIT, key="secret-123") as (url, requests):
        assert evaluate(tmp_path, url, "--api-key-env", "MY_KEY") == 2
    assert "refuses the key of MY_KEY (401)" in capsys.readouterr().err and requests == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["http://127.0.0.1:9/v1"], ["--model", "does not answer at http://127.0.0.1:9/v1/models"]),
        (["http:///nothing"], ["is no address of an API"]),
        (["http://127.0.0.1:9", "--api-key-env", "NOT_SET_ANYWHERE"], ["NOT_SET_ANYWHERE", "is not set in the environment"]),
        (["/some/folder", "--model-name", "x"], ["--model-name", "--model is no URL"]),
        (["http://127.0.0.1:9", *OTHER_LOOP], ["the loop generate_only_agent needs", "mini_swe_agent"]),
    ],
    ids=["nobody there", "no host", "no such variable", "a folder has no name", "a loop that samples itself"],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_is_played(tmp_path, problems, capsys, arguments, words):
    assert evaluate(tmp_path, *arguments) == 2
    printed = capsys.readouterr().err
    assert [word for word in words if word not in printed] == []
    assert not (tmp_path / "runs").exists()


def test_without_an_engine_nothing_is_played_and_the_reason_has_a_fix(tmp_path, problems, capsys):
    engine = ("sandbox.backend=docker", f"sandbox.engine_url=unix://{tmp_path}/docker.sock")
    with chat_endpoint(lambda body: SUBMIT) as (url, requests):
        assert evaluate(tmp_path, url, *engine) != 0
    assert "no Docker Engine answers at" in (printed := capsys.readouterr().err) and "Fix: start it" in printed
    assert requests == []


def test_rows_of_another_kind_than_the_agent_s_are_refused(tmp_path, problems, capsys):
    others = [replace(problem, task_kind="swe_tiny") for problem in problems]
    write_problems({tmp_path / "problems.jsonl": others}, {problem.instance_id: "tasks" for problem in problems})
    with chat_endpoint(lambda body: SUBMIT) as (url, requests):
        assert evaluate(tmp_path, url) == 2
    assert "task_kind of val-0-0 (first) = 'swe_tiny'" in capsys.readouterr().err
    assert requests == []


def test_the_model_s_name_must_be_given_where_there_are_several_and_be_one_of_them(tmp_path, problems, capsys):
    with chat_endpoint(lambda body: SUBMIT, models=["a", "b"]) as (url, _):
        assert evaluate(tmp_path, url) == 2
        assert "has 2 models" in capsys.readouterr().err
        assert evaluate(tmp_path, url, "--model-name", "c") == 2
        assert "is no model of the endpoint, which has a, b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listing", "words"),
    [
        ((500, "{}"), ["with 500", "the server's own log"]),
        ((503, "starting"), ["with 503", "the server's own log"]),
        ((200, "<html>welcome</html>"), ["text/html that is no JSON", "correct the address"]),
        ((200, "[" * 100_000), ["no JSON", "correct the address"]),
        ((401, "{}"), ["wants a key (401), and none was given", "--api-key-env VARIABLE"]),
    ],
)
def test_a_server_that_is_none_of_its_kind_or_fails_is_told_apart(tmp_path, problems, capsys, monkeypatch, listing, words):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with chat_endpoint(lambda body: SUBMIT, listing=listing) as (url, requests):
        assert evaluate(tmp_path, url, "--model-name", "policy") == 2
    printed = capsys.readouterr().err
    assert [word for word in words if word not in printed] == [] and requests == []
