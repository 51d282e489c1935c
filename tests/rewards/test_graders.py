"""Graders answer, and those that hang, die or lie are killed without harm to the next grading."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from episodes import result, scorer_of, task

from psrl.config.reward import CustomRewardFunctionConfig, RewardConfig
from psrl.errors import ConfigError, RewardError
from psrl.rewards.custom import without_end_tokens
from psrl.rewards.math_scorer import BoxChecker

ENDLESS_POWER = "9^{9^{9^9}}"

CUSTOM = """
import os, signal, subprocess, sys, time
print("noise on stdout at import")

def compute_score(data_source, solution_str, ground_truth, extra_info):
    print("noise on stdout")
    if solution_str == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            try:
                time.sleep(100)
            except BaseException:
                pass
    if solution_str == "hang with child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        open(extra_info["pid_file"], "w").write(str(child.pid))
        time.sleep(300)
    if solution_str == "report and hang":
        open(extra_info["pid_file"], "w").write(str(os.getpid()))
        while True:
            pass
    if solution_str == "die":
        os._exit(3)
    if solution_str == "raise":
        raise KeyError("no such key")
    if solution_str == "nan":
        return float("nan")
    if solution_str == "dict":
        return {"score": 0.5, "acc": True, "format": 1, "note": "text is left out"}
    if "<" in solution_str:
        return {"score": 0.0, "is_clean": float(solution_str == "<tool_call>1</tool_call>\\n2")}
    if solution_str == "arguments":
        seen = (data_source, ground_truth, extra_info["index"], extra_info["num_turns"])
        return {"score": 1.0, "seen": float(seen == ("test", "42", 7, 1))}
    return 1.0 if ground_truth in solution_str else -1.0
"""


def with_custom(tmp_path, use, *, source=CUSTOM, timeout_s=20.0, name="compute_score"):
    path = tmp_path / "reward.py"
    path.write_text(source)

    async def run():
        reward = RewardConfig(name="custom", timeout_s=timeout_s)
        scorer = scorer_of(reward, CustomRewardFunctionConfig(path=str(path), name=name))
        try:
            return await use(scorer)
        finally:
            await scorer.close()

    return asyncio.run(run())


def wait_until_dead(pid):
    """Gone, or a zombie that only its new parent has yet to reap."""
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.02)


def test_mathematics_decides_what_text_cannot_and_the_self_test_passes():
    async def run():
        checker = BoxChecker(RewardConfig())
        try:
            await checker.self_test()
            right = await checker.check(r"\boxed{(x+1)^2}", "x^2+2x+1")
            wrong = await checker.check(r"\boxed{(x+1)^2}", "x^2+2x+2")
            return right.is_correct, wrong.is_correct
        finally:
            await checker.close()

    assert asyncio.run(run()) == (True, False)


def test_a_comparison_that_never_ends_is_killed_and_the_next_one_works():
    async def run():
        checker = BoxChecker(RewardConfig(timeout_s=1.0))
        try:
            with pytest.raises(RewardError, match="no answer within 1 s"):
                await checker.check(rf"\boxed{{{ENDLESS_POWER}}}", "3")
            return (await checker.check(r"\boxed{\sqrt{4}}", "2")).is_correct
        finally:
            await checker.close()

    assert asyncio.run(run()) is True
    assert [child for child in psutil.Process().children(recursive=True) if "grading_worker" in " ".join(child.cmdline())] == []


def test_grading_works_outside_of_the_main_thread():
    seen = []

    async def run():
        checker = BoxChecker(RewardConfig())
        try:
            seen.append((await checker.check(r"\boxed{\sqrt{4}}", "2")).is_correct)
        finally:
            await checker.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    thread.join(timeout=60)
    assert seen == [True]


def test_a_plain_answer_starts_no_process():
    async def run():
        before = set(psutil.Process().children())
        checker = BoxChecker(RewardConfig())
        verdict = await checker.check(r"\boxed{42.0}", "42")
        return verdict.is_correct, set(psutil.Process().children()) - before

    assert asyncio.run(run()) == (True, set())


def test_a_users_function_gets_verls_arguments_and_may_return_a_number_or_a_dictionary(tmp_path):
    async def use(scorer):
        await scorer.self_test()
        right = await scorer.score(task(), result("it is 42"))
        wrong = await scorer.score(task(), result("it is 41"))
        full = await scorer.score(task(), result("dict"))
        seen = await scorer.score(task(extra_info={"index": 7}), result("arguments"))
        return right, wrong, full, seen

    right, wrong, full, seen = with_custom(tmp_path, use)
    assert (right.reward, right.accuracy, wrong.reward, wrong.accuracy) == (1.0, 1.0, -1.0, 0.0)
    assert (full.reward, full.accuracy, full.parts) == (0.5, 1.0, {"acc": 1.0, "format": 1.0})
    assert seen.parts == {"seen": 1.0}


def test_a_users_function_sees_calls_but_no_tokens_that_end_turns(tmp_path):
    turns = result("<tool_call>1</tool_call><|im_end|>", "2<|im_end|>")
    assert with_custom(tmp_path, lambda scorer: scorer.score(task(), turns)).parts == {"is_clean": 1.0}


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("It is 4.<|im_end|>", "It is 4."),
        ("It is 4.<|im_end|><|endoftext|></s>\n", "It is 4."),
        ("It is 4. \n", "It is 4. \n"),
        ("<|im_end|> It is 4.", "<|im_end|> It is 4."),
        ("a <|im_end|> b<|im_end|>", "a <|im_end|> b"),
        ("<|" + "x" * 32 + "|>", ""),
        ("<|im_end|>" * 100_000, ""),
        ("<|im_end|>" * 100_000 + "x", "<|im_end|>" * 100_000 + "x"),
    ],
    ids=range(8),
)
def test_tokens_at_the_end_of_a_turn_are_dropped_in_no_time_however_many_there_are(text, without):
    assert without_end_tokens(text) == without


@pytest.mark.parametrize(
    ("solution", "message"),
    [("hang", "no answer within 1 s"), ("die", "died"), ("raise", "KeyError: 'no such key'"), ("nan", "score nan")],
)
def test_a_users_function_that_fails_gives_an_error_and_the_next_grading_works(tmp_path, solution, message):
    async def use(scorer):
        with pytest.raises(RewardError, match=message):
            await scorer.score(task(), result(solution))
        return await scorer.score(task(), result("it is 42"))

    assert with_custom(tmp_path, use, timeout_s=1.0).reward == 1.0


def test_what_a_killed_grader_started_dies_with_it(tmp_path):
    pid_file = tmp_path / "pid"

    async def use(scorer):
        with pytest.raises(RewardError, match="no answer"):
            await scorer.score(task(extra_info={"pid_file": str(pid_file)}), result("hang with child"))

    with_custom(tmp_path, use, timeout_s=3.0)
    wait_until_dead(int(pid_file.read_text()))


PARENT = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from episodes import result, scorer_of, task
from psrl.config.reward import CustomRewardFunctionConfig, RewardConfig

scorer = scorer_of(RewardConfig(name="custom", timeout_s=100), CustomRewardFunctionConfig(path=sys.argv[2]))
asyncio.run(scorer.score(task(extra_info={"pid_file": sys.argv[3]}), result("report and hang")))
"""


def test_a_grader_in_an_endless_loop_dies_with_a_killed_worker(tmp_path):
    reward, pid_file = tmp_path / "reward.py", tmp_path / "pid"
    reward.write_text(CUSTOM)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(Path(__file__).parent), str(reward), str(pid_file)])
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline, "the grader never began"
        assert parent.poll() is None, "the worker died by itself"
        time.sleep(0.02)
    parent.kill()
    parent.wait(timeout=10)
    wait_until_dead(int(pid_file.read_text()))


def test_an_answer_never_reaches_another_question_after_a_cancellation(tmp_path):
    pid_file = tmp_path / "pid"

    async def use(scorer):
        hanging = asyncio.create_task(scorer.score(task(extra_info={"pid_file": str(pid_file)}), result("hang with child")))
        async with asyncio.timeout(30):
            while not pid_file.exists():  # noqa: ASYNC110  (written by another process)
                await asyncio.sleep(0.01)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        return [(await scorer.score(task(), result(text))).reward for text in ("it is 41", "it is 42", "dict")]

    assert with_custom(tmp_path, use) == [-1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("source", "name", "rule"),
    [
        (None, "compute_score", "is no file"),
        ("def compute_score(:", "compute_score", "is no valid Python"),
        ("def other(): pass", "compute_score", "defines other"),
    ],
)
def test_a_users_file_that_cannot_be_used_is_refused_at_load(tmp_path, source, name, rule):
    path = tmp_path / "reward.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ConfigError, match=rule):
        scorer_of(RewardConfig(name="custom"), CustomRewardFunctionConfig(path=str(path), name=name))


def test_a_users_file_that_fails_at_import_is_named_by_the_self_test(tmp_path):
    source = "import a_module_that_is_not_there\ndef compute_score(*a): return 0"
    with pytest.raises(ConfigError, match="a_module_that_is_not_there"):
        with_custom(tmp_path, lambda scorer: scorer.self_test(), source=source)


def test_a_custom_path_without_the_custom_scorer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"set reward\.name=custom"):
        scorer_of(RewardConfig(name="retool"), CustomRewardFunctionConfig(path=os.fspath(tmp_path)))
