"""`psrl rollout`: each episode is played and stored once, however often it is stopped; at an endpoint as by psrl's own engines."""

import asyncio
import copy
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from runtime.chat_endpoint import chat_endpoint
from runtime.stored_kit import episode_of, task_of

from psrl.cli.main import main
from psrl.config.load import Purpose, load_config
from psrl.errors import TooManyFailuresError
from psrl.runtime.group_play import Member
from psrl.runtime.groups import summary_of
from psrl.runtime.lifetime import cause_in
from psrl.runtime.loops.rollout import Played, Rollout, Sinks
from psrl.telemetry.errors_log import ErrorLog, read_errors
from psrl.telemetry.metric_log import read_metrics
from psrl.telemetry.trajectories import read_trajectories
from psrl.types import Outcome

TASKS = [task_of(f"train-0-{row}") for row in range(4)]

AGENT = '''
import aiohttp
from psrl.agent_loops import SessionAgentLoop


class InternalServerError(Exception):
    """As the clients of OpenAI and litellm call it."""


class AskOnce(SessionAgentLoop):
    async def run_agent(self, task, address):
        body = {"model": address.model, "messages": [{"role": "user", "content": task.prompt[-1].content}]}
        headers = {"authorization": f"Bearer {address.api_key}"}
        async with aiohttp.ClientSession() as http, http.post(f"{address.base_url}/chat/completions", json=body, headers=headers) as answer:
            if answer.status >= 500:
                raise InternalServerError(await answer.text())
            content = (await answer.json())["choices"][0]["message"]["content"]
        return {"calls": 1, "letters": len(content)}


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 1.0
'''
RECIPE = """
gen_actor_rollout_ref: {{rollout: {{multi_turn: {{enable: true, max_turns: 2}}, agent: {{default_agent_loop: asking.AskOnce}}}}}}
train_actor_rollout_ref: {{model: {{path: {folder}/nowhere}}}}
data: {{train_files: [{folder}/rows.jsonl], max_prompt_length: 64}}
reward: {{name: custom}}
custom_reward_function: {{path: {folder}/asking.py}}
psrl: {{rollout_n: 2, max_episode_retries: 0, rollout_gateway: {{enable: true}}}}
trainer: {{default_local_dir: {folder}/runs}}
"""


class Plays:
    """Answers with built episodes, and remembers who asked; `ends` are outcomes of some, and number `stops_at` never ends."""

    def __init__(self, *, ends=None, stops_at=None):
        self.asked, self.at_once, self.most_at_once = [], 0, 0
        self._ends, self._stops_at = ends or {}, stops_at
        self.stands = asyncio.Event()

    async def play(self, task, ticket):
        self.asked.append(ticket.uid)
        number = len(self.asked)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        if number == self._stops_at:
            self.stands.set()
            await asyncio.Event().wait()
        self.at_once -= 1
        outcome = self._ends.get(ticket.uid, Outcome.FINISHED)
        reward = 1.0 if outcome.judges_policy else None
        built = episode_of(task.uid, int(ticket.uid[-1]), reward=reward, outcome=outcome, error=None if reward else "engine gone")
        return Played.of(Member(ticket=ticket, episode=replace(built, ticket=ticket), num_retries=0))


def rollout(tmp_path, stored=(), *, rollout_n=3, num_at_once=2, max_rate=1.0):
    """(the loop, the episodes that it wrote, the metrics that it logged)"""
    config = copy.deepcopy(load_config("retool_tiny", [f"psrl.rollout_n={rollout_n}", f"psrl.max_infra_error_rate={max_rate}"]))
    written, logged = [], []
    sinks = Sinks(
        write=written.append,
        log=lambda metrics, step: logged.append((step, metrics)),
        errors=ErrorLog(tmp_path / "errors.jsonl"),
        tell=lambda text, has_ended: None,
    )
    return Rollout(config, TASKS, stored, sinks, num_at_once=num_at_once), written, logged


def test_every_task_is_played_n_times_task_by_task_and_no_more_at_once_than_may_be(tmp_path):
    loop, written, logged = rollout(tmp_path)
    plays = Plays()
    asyncio.run(loop.run(plays.play))
    assert plays.asked == [f"train-0-{row}-e{index}" for row in range(4) for index in range(3)]
    assert plays.most_at_once == 2
    assert sorted(episode.ticket.uid for episode in written) == sorted(plays.asked)
    assert {episode.ticket.group for episode in written} == {task.uid for task in TASKS}
    assert logged[-1][0] == 12 and logged[-1][1]["reward/episode/mean"] == 1.0
    assert loop.so_far() == "12/12 episodes, 12 solved"


def test_a_resume_that_asks_for_fewer_episodes_than_are_stored_has_none_left(tmp_path):
    stored = [
        summary_of(Member(ticket=each.ticket, episode=each, num_retries=0)) for each in (episode_of("train-0-0", n) for n in range(4))
    ]
    loop, _, _ = rollout(tmp_path, stored, rollout_n=2)
    plays = Plays()
    asyncio.run(loop.run(plays.play))
    assert plays.asked == [f"train-0-{row}-e{index}" for row in (1, 2, 3) for index in range(2)]
    summary = loop.summary(tmp_path, stopped_early=False, is_captured=True)
    assert (summary.num_episodes, summary.num_left) == (10, 0)


def test_a_stopped_rollout_plays_what_is_open_and_failures_again_under_the_same_seeds(tmp_path):
    first, written, _ = rollout(tmp_path)
    plays = Plays(ends={"train-0-0-e1": Outcome.INFRA_ERROR}, stops_at=6)

    async def stopped():
        work = asyncio.create_task(first.run(plays.play))
        await plays.stands.wait()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    asyncio.run(stopped())
    kept = [episode for episode in written if episode.result.outcome.judges_policy]
    assert 0 < len(kept) < 12
    stored = [summary_of(Member(ticket=episode.ticket, episode=episode, num_retries=0)) for episode in kept]
    second, again, _ = rollout(tmp_path, stored)
    played = Plays()
    asyncio.run(second.run(played.play))
    everything = {f"train-0-{row}-e{index}" for row in range(4) for index in range(3)}
    assert set(played.asked) == everything - {episode.ticket.uid for episode in kept}
    assert "train-0-0-e1" in played.asked
    whole, unbroken, _ = rollout(tmp_path)
    asyncio.run(whole.run(Plays().play))
    assert {episode.ticket for episode in (*kept, *again)} == {episode.ticket for episode in unbroken}


def test_failures_are_written_down_left_open_and_too_many_of_them_end_it(tmp_path):
    loop, written, _ = rollout(tmp_path, rollout_n=2)
    asyncio.run(loop.run(Plays(ends={"train-0-1-e0": Outcome.INFRA_ERROR}).play))
    summary = loop.summary(tmp_path, stopped_early=False, is_captured=True)
    assert (summary.num_episodes, summary.num_left, summary.outcomes) == (7, 1, "finished 7, infra_error 1")
    assert [error.unit for error in read_errors(tmp_path / "errors.jsonl")] == ["train-0-1-e0"]
    assert len(written) == 8
    many, _, _ = rollout(tmp_path, rollout_n=20, max_rate=0.5)
    failing = Plays(ends={f"train-0-{row}-e{index}": Outcome.INFRA_ERROR for row in range(4) for index in range(20)})
    with pytest.raises(BaseExceptionGroup) as info:
        asyncio.run(many.run(failing.play))
    assert isinstance(cause_in(info.value), TooManyFailuresError)
    assert len(failing.asked) < 80


def test_the_end_for_too_many_failures_names_their_most_frequent_cause_also_after_an_episode_that_was_judged(tmp_path):
    loop, _, _ = rollout(tmp_path, rollout_n=16, num_at_once=1, max_rate=0.5)
    # The window of 64 is full with the last one, which is judged.
    uids = [f"train-0-{row}-e{index}" for row in range(4) for index in range(16)]
    plays = Plays(ends=dict.fromkeys(uids[:-1], Outcome.INFRA_ERROR))
    with pytest.raises(BaseExceptionGroup) as info:
        asyncio.run(loop.run(plays.play))
    assert "most often: [('engine gone', 63)]" in str(cause_in(info.value))


@pytest.fixture
def recipe(tmp_path):
    """Three tasks for an agent that asks once."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        }
        for number in range(3)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "asking.py").write_text(AGENT)
    (tmp_path / "mine.yaml").write_text(RECIPE.format(folder=tmp_path))
    return tmp_path / "mine.yaml"


def command(*arguments):
    with pytest.raises(SystemExit) as info:
        main([str(argument) for argument in arguments])
    return info.value.code


@pytest.mark.slow
def test_at_an_endpoint_failures_are_played_again_by_a_resume_which_knows_where(tmp_path, recipe, capsys, monkeypatch):
    is_down = {"What is 1 + 1?"}

    def answer(body):
        return "It is known."

    monkeypatch.setenv("THEIR_KEY", "secret-7")
    with chat_endpoint(answer, models=["teacher"], key="secret-7", fails=lambda body: body["messages"][0]["content"] in is_down) as (
        url, requests,
    ):  # fmt: skip
        # In another process, which holds the run folder until its end.
        words = [sys.executable, "-m", "psrl", "rollout", str(recipe), "--model", url, "--api-key-env", "THEIR_KEY"]
        first = subprocess.run(words, capture_output=True, text=True, timeout=200)
        assert first.returncode == 0, first.stdout + first.stderr
        (folder,) = (tmp_path / "runs" / "mine").iterdir()
        assert ["num", "left", "2"] in [line.split() for line in first.stdout.splitlines()] and "played 6/6" in first.stdout
        file = folder / "trajectories" / "train.jsonl"
        assert [record.episode.result.outcome.value for record in read_trajectories(file)].count("infra_error") == 2
        is_down.clear()
        assert command("rollout", recipe, "--resume") == 0
        assert len(requests) == 8
    episodes = [record.episode for record in read_trajectories(file)]
    assert sorted(episode.ticket.uid for episode in episodes) == [f"train-0-{row}-e{index}" for row in range(3) for index in range(2)]
    assert {episode.result.outcome for episode in episodes} == {Outcome.FINISHED}
    assert all(episode.score.reward == 1.0 and not episode.result.trajectories for episode in episodes)
    assert {episode.ticket.is_validation for episode in episodes} == {False}
    assert read_metrics(folder / "metrics.jsonl")[6]["reward/episode/mean"] == 1.0
    assert ["num", "left", "0"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert not any("secret-7" in path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())
    # Nothing can be learned from what has no tokens.
    with chat_endpoint(answer, models=["pupil"]) as (other, _):
        assert command("rollout", recipe, "--resume-from", folder, "--model", other) == 2
    assert "its episodes would be of two kinds" in capsys.readouterr().err


def test_a_loop_that_needs_token_ids_is_refused_at_an_endpoint(capsys):
    with chat_endpoint(lambda body: "no") as (url, requests):
        assert command("rollout", "retool_tiny", "--model", url, "data.train_max_samples=1") == 2
    assert "no token ids, which the loop multi_turn_agent needs" in " ".join(capsys.readouterr().err.split())
    assert requests == []


def test_rules_of_training_do_not_bind_a_rollout():
    assert load_config("retool_tiny", ["psrl.rollout_n=1"], purpose=Purpose.ROLLOUT).psrl.rollout_n == 1


def test_a_rollout_is_resumed_only_where_there_is_one(tmp_path, capsys):
    assert command("rollout", "retool_tiny", "--resume", f"trainer.default_local_dir={tmp_path}") == 2
    assert "there is no rollout of retool_tiny" in capsys.readouterr().err
