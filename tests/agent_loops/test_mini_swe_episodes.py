"""mini-swe-agent, unmodified, plays a project with a bug on a real router in real sandboxes; and the same task played natively."""

import asyncio
import os
import signal
from dataclasses import replace
from typing import ClassVar

import pytest
from calc_project import BROKEN, PROBLEM, TEXT_YAML
from episode_kit import LastTurnScorer, Reply, ScriptedGenerator, make_rollout, make_ticket, renderer
from mini_swe_kit import (
    CALLS_YAML,
    GOLD_TURNS,
    MEND,
    NULL_TURNS,
    SUBMIT,
    agent_processes,
    block,
    call,
    play_episode,
    sandbox_processes,
    sandboxes,
    swe_rollout,
    swe_task,
    write_yaml,
)

from psrl.agent_loops import EpisodeRunner, LoopParts
from psrl.agent_loops.base import build_agent_loop
from psrl.config.agent_yaml import read_agent_yaml
from psrl.config.sandbox import SandboxConfig
from psrl.environments.mini_swe_env import MiniSweEnvironment
from psrl.sandbox import BackendSandboxes
from psrl.session_client.client import SessionClient
from psrl.types import Outcome, Role
from tests.gateway.gateway_kit import running_gateway, until

CHANGES = ["-    return a - b", "+    return a + b"]


def play(folder, script, content=TEXT_YAML, **more):
    """One black-box episode; its processes are gone afterwards."""
    episode = asyncio.run(asyncio.wait_for(play_episode(write_yaml(folder, content), script, LastTurnScorer(), **more), 60))
    assert (agent_processes(), sandbox_processes()) == ([], [])
    return episode


def with_section(section, **values):
    return {**TEXT_YAML, section: {**TEXT_YAML[section], **values}}


def changed_lines(patch):
    return [line for line in patch.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]


@pytest.mark.parametrize(("content", "write"), [(TEXT_YAML, block), (CALLS_YAML, call)], ids=["text", "tool calls"])
def test_the_gold_agent_mends_and_submits_and_every_token_is_captured(tmp_path, content, write):
    turns = [write("cat calc.py"), write(MEND), write(SUBMIT)]
    result = play(tmp_path, turns, content).result
    assert (result.outcome, result.error) == (Outcome.FINISHED, None)
    assert (result.submission.exit_status, result.submission.is_submitted) == ("Submitted", True)
    assert changed_lines(result.submission.patch) == changed_lines(result.submission.text) == CHANGES
    (trajectory,) = result.trajectories
    assert [renderer().decode(step.sampled_ids) for step in trajectory.steps] == [f"{turn}<|im_end|>" for turn in turns]
    system, task, _, first, *_ = result.messages
    assert (system.content, task.content) == ("You mend code.", f"{PROBLEM.statement} One command per turn.")
    assert first.content == f"<rc>0</rc>\n{BROKEN}"
    assert {name: result.counts[name] for name in ("env/commands", "env/commands_failed", "agent/calls", "turns")} == {
        "env/commands": 3,
        "env/commands_failed": 0,
        "agent/calls": 3,
        "turns": 3,
    }


def test_the_null_agent_hands_in_an_empty_patch(tmp_path):
    result = play(tmp_path, NULL_TURNS).result
    assert (result.outcome, result.submission.patch, result.submission.text) == (Outcome.FINISHED, "", "")


# (turns, the agent's YAML, settings of the run, outcome, exit status, words of the error)
ENDS = {
    "steps": ([block(MEND), block("true")], TEXT_YAML, {"max_turns": 2}, Outcome.MAX_TURNS, "LimitsExceeded", None),
    "tokens": ([block(MEND), block("cat calc.py"), block("true")], TEXT_YAML, {"response_length": 160}, Outcome.MAX_TOKENS, "", None),
    "agent's time": (
        [block(f"{MEND}; sleep 1.1"), block("true")],
        with_section("agent", wall_time_limit_seconds=1),
        {},
        Outcome.TIMEOUT,
        "TimeExceeded",
        None,
    ),
    "run's time": (
        [block(f"{MEND}; sleep 60")],
        with_section("environment", timeout=90),
        {"agent": {"episode_timeout_s": 2.0}},
        Outcome.TIMEOUT,
        "TimeExceeded",
        "mini-swe-agent took longer than 2 s",
    ),
    "format": (
        [block(MEND), "first", "second", "third"],
        TEXT_YAML,
        {},
        Outcome.FINISHED,
        "RepeatedFormatError",
        None,
    ),
    "exception": (
        [block(MEND)],
        with_section("model", observation_template="{{ 1 / output.returncode }}"),
        {},
        Outcome.AGENT_ERROR,
        "ZeroDivisionError",
        "ZeroDivisionError: division by zero",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_whatever_ends_an_episode_what_was_mended_so_far_is_handed_in(tmp_path, name):
    turns, content, rollout, outcome, status, words = ENDS[name]
    result = play(tmp_path, turns, content, **rollout).result
    assert result.outcome is outcome
    assert status in result.submission.exit_status
    assert changed_lines(result.submission.patch) == CHANGES
    assert not result.submission.is_submitted
    assert (words or "") in (result.error or "")


def test_a_session_whose_engine_hangs_is_no_fault_of_the_policys(tmp_path):
    class Hanging(ScriptedGenerator):
        async def generate(self, request):
            if self.requests:
                await asyncio.Event().wait()
            return await super().generate(request)

    episode = play(tmp_path, None, generator=Hanging(GOLD_TURNS), agent={"episode_timeout_s": 2.0})
    assert (episode.result.outcome, episode.score.reward) == (Outcome.INFRA_ERROR, None)
    assert "waited" in episode.result.error


class Watched(ScriptedGenerator):
    """Answers a turn a moment after it was asked for, so that something can fail in between."""

    async def generate(self, request):
        generation = await super().generate(request)
        await asyncio.sleep(0.05)
        return generation


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_an_agent_killed_in_any_turn_is_an_infrastructure_error_without_reward(tmp_path, turn):
    generator = Watched(GOLD_TURNS)

    async def kill(_work):
        await until(lambda: len(generator.requests) == turn + 1)
        (pid,) = agent_processes()
        os.kill(pid, signal.SIGKILL)

    episode = play(tmp_path, None, generator=generator, meanwhile=kill)
    assert (episode.result.outcome, episode.score.reward, episode.result.submission) == (Outcome.INFRA_ERROR, None, None)
    assert "the agent's process ended with -9 and no word" in episode.result.error
    assert episode.result.counts["errors/ProcessDiedError"] == 1


def test_a_sandbox_that_is_lost_is_an_infrastructure_error_and_never_shown_to_the_policy(tmp_path):
    generator = Watched(GOLD_TURNS)

    async def kill(_work):
        await until(lambda: len(generator.requests) == 2)
        for pid in sandbox_processes():
            os.kill(pid, signal.SIGKILL)

    episode = play(tmp_path, None, generator=generator, meanwhile=kill)
    assert (episode.result.outcome, episode.score.reward, episode.result.submission) == (Outcome.INFRA_ERROR, None, None)
    assert "SandboxError" in episode.result.error
    assert len(generator.requests) == 2


def test_a_cancelled_episode_leaves_neither_agent_nor_sandbox(tmp_path):
    generator = Watched([block("sleep 30")])

    async def cancel(work):
        await until(lambda: len(generator.requests) == 1)
        await asyncio.sleep(0.2)
        work.cancel()
        await asyncio.wait({work})

    assert play(tmp_path, None, generator=generator, meanwhile=cancel) is None


def test_a_row_without_a_problem_or_whose_set_up_fails_is_never_judged(tmp_path):
    bad = replace(PROBLEM, setup_commands=("echo no such tool >&2; exit 3",))
    for task, words in ((swe_task(bad), "set-up command"), (replace(swe_task(), extra_info={}), "extra_info.swe must be an object")):
        episode = play(tmp_path, GOLD_TURNS, task=task)
        assert (episode.result.outcome, episode.score.reward) == (Outcome.INFRA_ERROR, None)
        assert words in episode.result.error


HOSTILE = {
    "reads stdin": ("cat", "<rc>0</rc>\n"),
    "binary output": ("printf '\\377\\000ok'", "<rc>0</rc>\n\ufffd\x00ok"),
    "both streams in order": ("echo a; echo b >&2; echo c", "<rc>0</rc>\na\nb\nc\n"),
    "null byte": ("echo a\x00b", "<rc>127</rc>\ncannot run"),
    "kills everything": ("kill -9 -1; echo on", "<rc>"),
    "time-out": ("echo begun; sleep 30", "Command 'echo begun; sleep 30' timed out after 1 secondsbegun"),
    "template": ("echo '{{ 7 * 6 }} {% raise %}'", "<rc>0</rc>\n{{ 7 * 6 }} {% raise %}\n"),
    "endless output": ("yes", "the limit of output"),
    "many processes": (":(){ :|:& };:", "<rc>"),
    "signal": ("kill -SEGV $$", "<rc>139</rc>"),
    "no such command": ("x" * 5 + ": " + "y" * 3, "<rc>127</rc>"),
}


def test_whatever_a_command_does_is_an_answer_and_the_next_one_runs(tmp_path):
    commands = [command for command, _ in HOSTILE.values()]
    script = [block(command) for command in commands] + [block(MEND), block(SUBMIT)]
    content = with_section("environment", timeout=1)
    result = play(tmp_path, script, content, max_turns=20, response_length=120_000, settings={"output_kb": 8}).result
    assert (result.outcome, result.error) == (Outcome.FINISHED, None)
    answers = [message.content for message in result.messages if message.role is Role.USER][1:]
    for (name, (_, expected)), answer in zip(HOSTILE.items(), answers, strict=False):
        assert expected in answer, name
    assert changed_lines(result.submission.patch) == CHANGES
    assert (result.counts["env/killed_by/wall_time"], result.counts["env/killed_by/output"]) == (1, 1)


def test_a_tool_call_whose_command_is_no_text_is_answered_and_not_run(tmp_path):
    script = [call(["rm", "-rf", "/"]), call(MEND), call(SUBMIT)]
    result = play(tmp_path, script, CALLS_YAML).result
    assert result.outcome is Outcome.FINISHED
    first = next(message.content for message in result.messages if message.role is Role.TOOL)
    assert "a command is text, not list" in first


@pytest.mark.parametrize(("row", "run", "is_open"), [(True, True, True), (True, False, False), (False, True, False)])
def test_the_network_needs_both_the_row_and_the_run(tmp_path, row, run, is_open):
    _, limits = sandboxes()

    class Recorded(BackendSandboxes):
        """Real ones without a network, since this machine's own is none to give; what was asked is kept."""

        asked: ClassVar = []

        def make(self, spec):
            self.asked.append(spec.limits.allow_network)
            return super().make(spec)

    environment = MiniSweEnvironment(
        settings=read_agent_yaml(write_yaml(tmp_path, TEXT_YAML)),
        sandboxes=Recorded(SandboxConfig()),
        limits=replace(limits, allow_network=run),
    )

    async def devices():
        try:
            await environment.reset(swe_task(replace(PROBLEM, allow_network=row)))
            answer, _ = await environment.execute("cut -d: -f1 /proc/net/dev | tail -n +3")
            return answer.output.split()
        finally:
            await environment.close()

    assert asyncio.run(devices()) == ["lo"]
    assert Recorded.asked == [is_open]


@pytest.mark.parametrize(("content", "write"), [(TEXT_YAML, block), (CALLS_YAML, call)], ids=["text", "tool calls"])
def test_where_nothing_is_captured_the_agents_own_conversation_is_the_record(tmp_path, monkeypatch, content, write):
    """Such as at an endpoint of somebody else's; the session here is a real one whose record is thrown away."""
    turns = [write(MEND), write(SUBMIT)]
    seen = play(tmp_path, turns, content).result
    close = SessionClient.close

    async def close_unseen(self, address, *, abort):
        record = await close(self, address, abort=abort)
        return replace(record, is_captured=False, trajectories=(), messages=(), turn_texts=(), num_turns=0)

    monkeypatch.setattr(SessionClient, "close", close_unseen)
    unseen = play(tmp_path, turns, content).result
    assert (unseen.outcome, unseen.trajectories, unseen.submission) == (Outcome.FINISHED, (), seen.submission)
    assert [(each.role, each.content) for each in unseen.messages] == [(each.role, each.content) for each in seen.messages]
    assert [made.arguments for each in unseen.messages for made in each.tool_calls] == [
        made.arguments for each in seen.messages for made in each.tool_calls
    ]
    assert len(unseen.turn_texts) == 2


# ---------------------------------------------------------------- the same task, natively


def play_natively(folder, script, content, *, agent=None, loop="multi_turn_agent", **rollout):
    """The episode of `multi_turn_agent` with `mini_swe_env` and `mini_swe_agent_data`."""

    async def run():
        places, limits = sandboxes()
        settings = make_rollout(
            loop=loop,
            env="mini_swe_env",
            data="mini_swe_agent_data",
            prompt_length=2000,
            agent={"agent_loop_config_path": write_yaml(folder, content), **(agent or {})},
            **{"response_length": 6000, **rollout},
        )
        generator = ScriptedGenerator(script)
        async with running_gateway(renderer(), generator) as sessions:
            parts = LoopParts(
                renderer=renderer(), generator=generator, sandboxes=places, sandbox_limits=limits, rollout=settings, sessions=sessions
            )
            return await EpisodeRunner(parts, LastTurnScorer()).run(swe_task(), make_ticket()), generator.requests

    episode, requests = asyncio.run(asyncio.wait_for(run(), 60))
    assert sandbox_processes() == []
    return episode, requests


TEMPLATES = {
    "system_template": "{{system}} on {{machine}}, {{cwd}}, {{timeout}} s, {{step_limit}} steps.",
    "instance_template": "{{task}} ({{n_model_calls}} calls, {{interpreter}}, {{env['PAGER']}})",
}
OBSERVED = "{{n_model_calls}}: {{output.returncode}} {{output.exception_info}}{{output.output[:200]}}{{ '!' * step_limit }}"


@pytest.mark.parametrize("write", [block, call])
@pytest.mark.parametrize("max_turns", [9, 3])
def test_both_ways_are_one_task_with_the_same_ids_and_the_same_patch(tmp_path, write, max_turns):
    content = TEXT_YAML if write is block else CALLS_YAML
    content = {**content, "agent": TEMPLATES, "model": {**content["model"], "observation_template": OBSERVED}}
    commands = ["cat calc.py", "cat nothing; exit 4", MEND, "python3 -c 'import calc; print(calc.add(2, 3))'", "kill -TERM $$", SUBMIT]
    script = [write(command) for command in commands]
    black = ScriptedGenerator(script)
    foreign = play(tmp_path, None, content, generator=black, max_turns=max_turns).result
    native, requests = play_natively(tmp_path, script, content, max_turns=max_turns)
    assert [request.token_ids for request in requests] == [request.token_ids for request in black.requests]
    assert [request.sampling.seed for request in requests] == [request.sampling.seed for request in black.requests]
    (one,), (other,) = native.result.trajectories, foreign.trajectories
    assert (one.ids(), one.loss_mask(), one.logprobs()) == (other.ids(), other.loss_mask(), other.logprobs())
    assert (native.result.outcome, native.result.submission) == (foreign.outcome, foreign.submission)
    assert native.result.outcome is (Outcome.FINISHED if max_turns == 9 else Outcome.MAX_TURNS)
    assert changed_lines(foreign.submission.patch) == CHANGES
    shared = ("env/commands", "env/commands_failed", "turns")
    assert [native.result.counts[name] for name in shared] == [foreign.counts[name] for name in shared]
    through, _ = play_natively(tmp_path, script, content, max_turns=max_turns, loop="multi_turn_completion_agent")
    assert (through.result.error, through.result.counts["tokens/drift"]) == (None, 0)
    assert through.result.trajectories[0].ids() == one.ids()
    assert through.result.submission == foreign.submission


def test_a_turn_that_cannot_be_read_is_answered_in_the_agents_words_both_ways(tmp_path):
    """mini-swe-agent forgets the turn, so its session has a branch; natively the turn stays, and is trained on, where it was said."""
    script = ["I think it is mended.", block(MEND), block(SUBMIT)]
    foreign = play(tmp_path, script).result
    native, _ = play_natively(tmp_path, script, TEXT_YAML)
    told = "Write one block. Expected exactly 1 action, found 0."
    assert [message.content for message in native.result.messages].count(told) == 1
    assert [message.content for message in foreign.messages].count(told) == 1
    assert (len(foreign.trajectories), len(native.result.trajectories)) == (2, 1)
    assert native.result.counts["format_errors"] == native.result.counts["env/format_errors"] == 1
    assert (native.result.outcome, native.result.submission.patch) == (foreign.outcome, foreign.submission.patch)


def test_natively_three_unreadable_turns_end_the_episode_and_a_cut_turn_runs_nothing(tmp_path):
    native, _ = play_natively(tmp_path, [block(MEND), "a", "b", "c"], TEXT_YAML)
    assert (native.result.outcome, native.result.submission.exit_status) == (Outcome.FINISHED, "RepeatedFormatError")
    assert changed_lines(native.result.submission.patch) == CHANGES
    cut, _ = play_natively(tmp_path, [Reply(block(MEND)), block("x" * 7000)], TEXT_YAML)
    assert (cut.result.outcome, cut.result.submission.exit_status) == (Outcome.MAX_TOKENS, "LimitsExceeded")
    assert cut.result.counts["env/commands"] == 1


def test_natively_a_command_in_flight_at_the_episodes_end_loses_nothing_that_was_mended(tmp_path):
    content = with_section("environment", timeout=3)
    agent = {"episode_timeout_s": 1.5, "step_timeout_s": 4.0}
    native, _ = play_natively(tmp_path, [block(f"{MEND}; sleep 2.5")], content, agent=agent)
    assert (native.result.outcome, native.result.submission.exit_status) == (Outcome.TIMEOUT, "TimeExceeded")
    assert changed_lines(native.result.submission.patch) == CHANGES


def test_the_backstop_of_an_episode_is_later_than_all_its_parts(tmp_path):
    places, limits = sandboxes()
    rollout = swe_rollout(write_yaml(tmp_path, TEXT_YAML), agent={"episode_timeout_s": 60.0, "step_timeout_s": 10.0})
    everything = {"renderer": renderer(), "generator": ScriptedGenerator([]), "sandboxes": places, "sandbox_limits": limits}
    loop = build_agent_loop("mini_swe_agent", LoopParts(**everything, rollout=rollout, sessions=object()))
    # The sandbox 10 s, the agent 60 s, the patch 10 s, the sandbox's end 20 s; and as long as cancelled work may take: 5, 20, 5 and 5 s.
    assert loop.run_timeout_s > 10 + 60 + 10 + 20 + 5 + 20 + 5 + 5
