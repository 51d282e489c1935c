"""Rows that mini-swe-agent cannot play are named before anything starts, and prompts are measured as its templates render them."""

import json
from dataclasses import replace

import pytest
import yaml
from config.config_files import write_recipe

from psrl.config.load import load_config
from psrl.datasets.swe_rows import BENCH_TIMEOUT_S, SMITH_TIMEOUT_S
from psrl.errors import ConfigError
from psrl.runtime.first_prompts import GRADING_MARGIN_S, FirstPrompts
from psrl.types import Message, Role, SweProblem, Task, TaskUid, ToolSchema

MODEL = "train_actor_rollout_ref.model.path"
GEN = "gen_actor_rollout_ref.rollout"
PROBLEM = SweProblem(
    instance_id="calc-1",
    repo="calc",
    task_kind="swe_tiny",
    statement="It must add.",
    gold_patch="",
    test_paths=("tests",),
    fail_to_pass=("tests/test_calc.py::test_adds",),
)


class LettersRenderer:
    """A prompt's tokens are its letters, and those of the tools' names."""

    def open(self, messages, tools):
        return list("".join(message.content for message in messages) + "".join(tool.name for tool in tools))


def task_of(swe):
    prompt = (Message(role=Role.USER, content="abc"),)
    return Task(uid=TaskUid("train-0-7"), prompt=prompt, data_source="tests", extra_info={} if swe is None else {"swe": swe})


def prompts_of(folder, *overrides, model=None, more=()):
    agent = {"system_template": "12345", "instance_template": "{{task}}{{cwd}}"}
    content = {"task_kind": "swe_tiny", "agent": agent, "model": model or {"model_class": "litellm_textbased"}}
    (folder / "agent.yaml").write_text(yaml.safe_dump(content))
    loop = ["default_agent_loop=mini_swe_agent", "env.name=null", "data.name=null", f"agent_loop_config_path={folder}/agent.yaml"]
    overrides = overrides or [f"{GEN}.agent.{each}" for each in loop]
    tools = [ToolSchema(name="tool", description="", parameters={})]
    return FirstPrompts(load_config(str(write_recipe(folder)), [*overrides, *more]), LettersRenderer(), tools)


def test_the_prompt_is_the_agents_own_and_not_the_rows(tmp_path):
    task = task_of(json.loads(json.dumps(PROBLEM.to_row())))
    # "12345", "It must add." (12 letters) and "/testbed" (8); then the name of the tool that is offered.
    assert prompts_of(tmp_path).num_tokens(task) == 5 + 12 + 8
    assert prompts_of(tmp_path, model={"model_class": "litellm"}).num_tokens(task) == 5 + 12 + 8 + len("bash")


def test_other_loops_read_the_rows_prompt_and_the_runs_tools(tmp_path):
    assert prompts_of(tmp_path, "psrl.rollout_n=4").num_tokens(task_of(None)) == len("abc") + len("tool")


def test_a_row_of_another_kind_is_named(tmp_path):
    task = task_of(replace(PROBLEM, task_kind="swe").to_row())
    with pytest.raises(ConfigError, match=r"task_kind of train-0-7 \(calc-1\)='swe': .*task_kind swe_tiny.*Fix: .*task_kind swe,"):
        prompts_of(tmp_path).num_tokens(task)


@pytest.mark.parametrize(("swe", "words"), [(None, "must be an object"), ({"instance_id": "x"}, "is missing"), ({"x": 1}, "unknown field")])
def test_a_row_without_a_problem_is_named(tmp_path, swe, words):
    with pytest.raises(ConfigError, match=rf"extra_info.swe of train-0-7.*{words}.*psrl prepare swe"):
        prompts_of(tmp_path).num_tokens(task_of(swe))


IMAGE = f"swebench/x@sha256:{'0' * 64}"
GRADED = "reward.name=execution"
LOG = {"test_command": "make test", "log_parser": "parse_log_pytset"}

# (fields of the row, settings, key, value, words of the error)
UNFIT = [
    ({"image": IMAGE}, [], "image", IMAGE, r"sandbox\.backend=bubblewrap has no images.*sandbox\.backend=docker"),
    ({"timeout_s": 1800}, [GRADED], "timeout_s", 1800, r"reward\.execution\.timeout_s=300 ends.*reward\.execution\.timeout_s=1830 or more"),
    ({"timeout_s": 6}, [GRADED, "reward.execution.timeout_s=20"], "timeout_s", 6, r"timeout_s=36 or more"),
    (LOG, [GRADED], "log_parser", "parse_log_pytset", "did you mean parse_log_pytest"),
]


@pytest.mark.parametrize(("changes", "more", "key", "value", "words"), UNFIT, ids=[row[2] for row in UNFIT])
def test_a_row_that_the_run_cannot_place_or_grade_is_named_before_the_start(tmp_path, changes, more, key, value, words):
    task = task_of(replace(PROBLEM, **changes).to_row())
    with pytest.raises(ConfigError, match=words) as info:
        prompts_of(tmp_path, more=more).check(task)
    assert (info.value.key, info.value.value) == (f"{key} of train-0-7 (calc-1)", value)


def test_a_row_that_fits_is_taken(tmp_path):
    fitting = replace(PROBLEM, timeout_s=270, test_command="make test", log_parser="parse_log_pytest")
    prompts_of(tmp_path, more=[GRADED]).check(task_of(fitting.to_row()))
    prompts_of(tmp_path).check(task_of(replace(PROBLEM, timeout_s=86_400).to_row()))  # graded by no tests
    prompts_of(tmp_path, more=["sandbox.backend=docker"]).check(task_of(replace(PROBLEM, image=IMAGE).to_row()))


def test_a_row_that_names_the_agent_itself_is_looked_at_too(tmp_path):
    loop = ["psrl.rollout_gateway.enable=true"]
    task = replace(task_of(replace(PROBLEM, image=IMAGE).to_row()), agent_name="mini_swe_agent")
    for backend, key in (("bubblewrap", "image"), ("process", "agent_name"), ("sandbox_fusion", "agent_name")):
        urls = ["sandbox.urls=['http://127.0.0.1:1']"] if backend == "sandbox_fusion" else []
        prompts = prompts_of(tmp_path, *loop, f"sandbox.backend={backend}", *urls)
        with pytest.raises(ConfigError, match=f"{key} of train-0-7.*sandbox.backend={backend}"):
            prompts.check(task)


def test_rows_that_psrl_prepares_fit_the_recipe(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    execution = load_config(
        "swe", [f"data.train_files=[{__file__}]", f"data.val_files=[{__file__}]", f"{MODEL}={tmp_path}"]
    ).reward.execution
    assert execution.timeout_s >= max(BENCH_TIMEOUT_S, SMITH_TIMEOUT_S) + GRADING_MARGIN_S
