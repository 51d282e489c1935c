"""`mini_swe_env` by itself: what it may be called with, and what it leaves."""

import asyncio
import os
from dataclasses import replace

import pytest
import yaml
from calc_project import PROBLEM, TEXT_YAML

from psrl.config.sandbox import SandboxConfig
from psrl.environments.base import EnvironmentParts, build_environment
from psrl.errors import ConfigError, EnvironmentFault, RowError, SandboxError
from psrl.sandbox import BackendSandboxes, limits_of
from psrl.sandbox.reaper import labelled_processes
from psrl.swe.agent_turn import AgentAction
from psrl.types import Message, Outcome, Role, Task, TaskUid

MEND = "sed -i 's/a - b/a + b/' calc.py"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo mended"


def environment_of(folder, *, content=TEXT_YAML, **settings):
    path = folder / "agent.yaml"
    path.write_text(yaml.safe_dump(content))
    config = SandboxConfig(**settings)
    parts = EnvironmentParts(sandboxes=BackendSandboxes(config), sandbox_limits=limits_of(config), agent_loop_config_path=str(path))
    return build_environment("mini_swe_env", parts)


def task_of(problem=PROBLEM):
    prompt = (Message(role=Role.USER, content="mend"),)
    return Task(uid=TaskUid("train-0-0"), prompt=prompt, data_source="t", extra_info={"swe": problem.to_row()})


def played(folder, use, *, problem=PROBLEM, **options):
    """What `use(environment)` gives after a reset; nothing is left."""

    async def run():
        environment = environment_of(folder, **options)
        try:
            observation, info = await environment.reset(task_of(problem))
            assert observation.statement == problem.statement
            assert set(info) == {"sandbox_start_s", "prepare_s"}
            return await use(environment)
        finally:
            await environment.close()
            await environment.close()

    result = asyncio.run(run())
    assert [label for label in labelled_processes().values() if label.startswith("run.") and f".{os.getpid()}." in label] == []
    return result


def test_the_commands_of_a_turn_run_in_order_until_one_submits(tmp_path):
    async def use(environment):
        first = await environment.step(AgentAction(commands=("echo 1 > a", "cat a; pwd")))
        second = await environment.step(AgentAction(commands=(MEND, SUBMIT, "touch never")))
        return first, second, await environment.submission(Outcome.FINISHED)

    (answers, reward, done, info), (last, _, is_done, _), submission = played(tmp_path, use)
    assert [(answer.output, answer.returncode) for answer in answers] == [("", 0), ("1\n/testbed\n", 0)]
    assert (reward, done, is_done, info["commands"], len(last)) == (None, False, True, 2, 2)
    assert (submission.exit_status, submission.text) == ("Submitted", "mended\n")
    assert "never" not in submission.patch
    assert "+    return a + b" in submission.patch


def test_a_plain_text_is_a_command_and_its_limits_are_the_runs(tmp_path):
    async def use(environment):
        return [await environment.step(command) for command in ("exit 3", "head -c 9000 /dev/zero | tr '\\0' x", "sleep 9")]

    no_timeout = {**TEXT_YAML, "environment": {}}
    (failed, *_), (long, *_), (late, *_, info) = played(tmp_path, use, content=no_timeout, output_kb=2, wall_s=1.0)
    assert failed[0].returncode == 3
    assert "bytes dropped" in long[0].output
    assert late[0].exception_info == "An error occurred while executing the command: Command 'sleep 9' timed out after 1 seconds"
    assert (info["killed_by/wall_time"], info["commands_failed"]) == (1, 1)


def test_the_yaml_says_folder_variables_and_interpreter(tmp_path):
    section = {"cwd": "/testbed/tests", "env": {"COLOR": "green"}, "interpreter": ["python3", "-c"]}

    async def use(environment):
        return await environment.step("import os; print(os.getcwd(), os.environ['COLOR'])")

    answers, *_ = played(tmp_path, use, content={**TEXT_YAML, "environment": section})
    assert answers[0].output == "/testbed/tests green\n"


@pytest.mark.parametrize(
    "damage",
    ["rm -rf .git", "rm -rf .git && git init -q . && git commit -q --allow-empty -m x", "rm -rf .git; touch .git", "rm -rf .git/objects"],
)
def test_an_agent_that_loses_the_first_commit_hands_in_nothing(tmp_path, damage):
    async def use(environment):
        await environment.step(f"{MEND}; {damage}")
        return await environment.submission(Outcome.MAX_TURNS)

    submission = played(tmp_path, use)
    assert (submission.exit_status, submission.patch) == ("LimitsExceeded", "")


def test_an_agent_that_fills_its_disk_is_answered_and_hands_in_what_git_can_say(tmp_path):
    async def use(environment):
        answers, *_ = await environment.step("head -c 50000000 /dev/zero > big; echo $?")
        return answers[0], await environment.submission(Outcome.MAX_TURNS)

    answer, submission = played(tmp_path, use, disk_mb=16)
    assert "No space left on device" in answer.output or "File too large" in answer.output
    assert submission.patch == ""


def test_rows_and_settings_that_are_none_are_errors_of_their_class(tmp_path):
    async def reset(environment, task):
        try:
            await environment.reset(task)
        finally:
            await environment.close()

    with pytest.raises(RowError, match="must be an object"):
        asyncio.run(reset(environment_of(tmp_path), replace(task_of(), extra_info={})))
    with pytest.raises(EnvironmentFault, match=r"set-up command 'false' failed \(exit code 1\)"):
        asyncio.run(reset(environment_of(tmp_path), task_of(replace(PROBLEM, setup_commands=("false",)))))
    with pytest.raises(ConfigError, match=r"sandbox\.backend='bubblewrap': has no images"):
        asyncio.run(reset(environment_of(tmp_path), task_of(replace(PROBLEM, image="python:3"))))
    with pytest.raises(ConfigError, match="needs the agent's YAML"):
        build_environment("mini_swe_env", EnvironmentParts())


def test_nothing_can_be_asked_of_an_environment_that_was_closed_or_never_reset(tmp_path):
    environment = environment_of(tmp_path)
    with pytest.raises(EnvironmentFault, match="no project"):
        asyncio.run(environment.submission(Outcome.FINISHED))
    asyncio.run(environment.close())

    async def use(environment):
        await environment.close()
        with pytest.raises(SandboxError):
            await environment.step("true")
        with pytest.raises(SandboxError):
            await environment.submission(Outcome.FINISHED)

    played(tmp_path, use)
