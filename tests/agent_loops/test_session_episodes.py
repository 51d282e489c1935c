"""Every way in which a black-box agent's episode can end, on a real router."""

import asyncio
import json
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import aiohttp
import pytest
from episode_kit import LastTurnScorer, Reply, ScriptedGenerator, make_rollout, make_task, make_ticket, renderer

from psrl.agent_loops import CommandAgentLoop, EpisodeRunner, LoopParts, SessionAgentLoop
from psrl.agent_loops.limits import Limits
from psrl.agent_loops.session_spec import session_spec_of
from psrl.errors import AgentError, ConfigError, EngineError, SandboxError
from psrl.types import AgentSampling, Outcome, Score
from tests.gateway.gateway_kit import running_gateway, until

FINAL = "The answer is \\boxed{7}."


class Hanging(ScriptedGenerator):
    """The engine answers the first `num_answered` turns and then never again."""

    def __init__(self, script, num_answered=0):
        super().__init__(script)
        self.num_answered, self.num_cancelled = num_answered, 0

    async def generate(self, request):
        if len(self.requests) < self.num_answered:
            return await super().generate(request)
        self.requests.append(request)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


def play(loop_class, script=(FINAL,), *, generator=None, scorer=None, meanwhile=None, **rollout):
    """One episode of a loop class, at most one session at a time. `meanwhile(work, generator)` runs beside it."""

    async def run():
        engine = generator or ScriptedGenerator(list(script))
        async with running_gateway(renderer(), engine, max_sessions=1) as sessions:
            settings = {"max_turns": 5, **rollout}
            parts = LoopParts(
                renderer=renderer(),
                generator=engine,
                rollout=make_rollout(loop=f"{__name__}.{loop_class.__name__}", **settings),
                sessions=sessions,
            )
            work = asyncio.ensure_future(EpisodeRunner(parts, scorer or LastTurnScorer()).run(make_task(), make_ticket()))
            if meanwhile is not None:
                await meanwhile(work, engine)
            episode = None if work.cancelled() else await work
            # The only place for a session is free again.
            await sessions.close(await sessions.open(session_spec_of(parts, make_ticket(), Limits.from_rollout(parts.rollout))), abort=True)
            return episode

    return asyncio.run(asyncio.wait_for(run(), timeout=60))


async def ask(address, *contents):
    """The policy's answer to a conversation that begins with user messages and goes on in turns; raises what the session answers."""
    messages = [content if isinstance(content, dict) else {"role": "user", "content": content} for content in contents]
    body, headers = {"model": "m", "messages": messages}, {"authorization": f"Bearer {address.api_key}"}
    async with aiohttp.ClientSession() as http, http.post(f"{address.base_url}/chat/completions", json=body, headers=headers) as answer:
        raw = await answer.json()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {raw['error']['message']}")
        return raw["choices"][0]["message"]


class Polite(SessionAgentLoop):
    """Asks twice and is done."""

    async def run_agent(self, task, address):
        first = await ask(address, task.prompt[-1].content)
        await ask(address, task.prompt[-1].content, first, "go on")
        return {"patience": 2, "name": "Polite"}


def test_an_agent_that_returns_has_finished_and_its_turns_are_the_record():
    episode = play(Polite, ["Hello", FINAL])
    result = episode.result
    assert (result.outcome, result.error, episode.score) == (Outcome.FINISHED, None, Score(reward=1.0, accuracy=1.0))
    (trajectory,) = result.trajectories
    assert (trajectory.uid, trajectory.num_turns) == ("train-0-0-e0-t0", 2)
    assert [message.content for message in result.messages] == ["What is 3 + 4?", "Hello", "go on", FINAL]
    assert [text.removesuffix("<|im_end|>") for text in result.turn_texts] == ["Hello", FINAL]
    assert (result.counts["turns"], result.counts["agent/patience"]) == (2, 2)
    assert "agent/name" not in result.counts
    assert 0 < result.timings.generation_s <= result.timings.total_s


class Blocking(SessionAgentLoop):
    """A plain function that blocks its thread."""

    def run_agent(self, task, address):
        assert threading.current_thread() is not threading.main_thread()
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
        headers = {"authorization": f"Bearer {address.api_key}", "content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{address.base_url}/chat/completions", body, headers), timeout=30) as answer:
            return {"status": answer.status}


def test_a_plain_function_runs_in_a_thread_of_its_own():
    episode = play(Blocking)
    assert (episode.result.outcome, episode.result.counts["agent/status"]) == (Outcome.FINISHED, 200)


def raising(error, *, is_async=True):
    """A loop class whose agent asks once and raises."""

    class Raising(SessionAgentLoop):
        async def run_agent(self, task, address):
            await ask(address, "hi")
            raise error

    class RaisingInThread(SessionAgentLoop):
        def run_agent(self, task, address):
            asyncio.run(ask(address, "hi"))
            raise error

    chosen = Raising if is_async else RaisingInThread
    chosen.__name__ = f"Raising{type(error).__name__}{is_async}"
    globals()[chosen.__name__] = chosen
    return chosen


@pytest.mark.parametrize("is_async", [True, False], ids=["coroutine", "thread"])
@pytest.mark.parametrize(
    ("error", "outcome", "name"),
    [
        (ValueError("no such file"), Outcome.AGENT_ERROR, "ValueError"),
        (AgentError("gave up"), Outcome.AGENT_ERROR, "AgentError"),
        (TimeoutError("its own"), Outcome.AGENT_ERROR, "TimeoutError"),
        (SystemExit(3), Outcome.AGENT_ERROR, "AgentError"),
        (SandboxError("gone"), Outcome.INFRA_ERROR, "SandboxError"),
        (EngineError("gone"), Outcome.INFRA_ERROR, "EngineError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_what_an_agent_raises_decides_the_outcome_and_its_turns_are_kept(error, outcome, name, is_async):
    episode = play(raising(error, is_async=is_async))
    assert episode.result.outcome is outcome
    assert episode.result.error.startswith(f"{name}: ")
    assert str(error) in episode.result.error
    assert episode.result.counts[f"errors/{name}"] == 1
    assert episode.result.trajectories[0].num_turns == 1
    assert (episode.score.reward is None) == (outcome is Outcome.INFRA_ERROR)


class Silent(SessionAgentLoop):
    """Never asks for a turn."""

    async def run_agent(self, task, address):
        return None


def test_an_episode_without_a_turn_is_an_error_that_names_the_session_and_never_a_sample():
    scorer = LastTurnScorer()
    episode = play(Silent, scorer=scorer)
    assert (episode.result.outcome, episode.result.trajectories, episode.score.reward) == (Outcome.INFRA_ERROR, (), None)
    assert "session " in episode.result.error
    assert "of train-0-0-e0 captured no turn: the agent asked for none" in episode.result.error
    assert scorer.scored == []
    assert episode.result.messages == make_task().prompt


class Tireless(SessionAgentLoop):
    """Asks until the session refuses, and then does what `then` says."""

    then = staticmethod(print)

    async def run_agent(self, task, address):
        conversation = ["go on"]
        while True:
            try:
                conversation += [await ask(address, *conversation), "go on"]
            except RuntimeError as error:
                outcome = type(self).then(error)
                return await outcome if asyncio.iscoroutine(outcome) else None


def reraise(error):
    raise error


async def wait_for_ever(error):
    await asyncio.Event().wait()


@pytest.mark.parametrize("then", [print, reraise, wait_for_ever], ids=["returns", "raises", "hangs"])
@pytest.mark.parametrize(
    ("limits", "outcome", "says"),
    [({"max_turns": 2}, Outcome.MAX_TURNS, "2 turns"), ({"response_length": 50}, Outcome.MAX_TOKENS, "maximum context length")],
)
def test_a_limit_of_the_session_is_the_outcome_whatever_the_agent_did_then(then, limits, outcome, says, monkeypatch):
    monkeypatch.setattr(Tireless, "then", staticmethod(then))
    episode = play(Tireless, ["more"] * 20, agent={"episode_timeout_s": 2.0, "step_timeout_s": 1.0}, **limits)
    assert episode.result.outcome is outcome
    assert says in episode.result.error
    assert episode.score.reward == 0.0


class HangsAfterATurn(SessionAgentLoop):
    """Asks once, then waits for ever."""

    async def run_agent(self, task, address):
        await ask(address, "hi")
        await asyncio.Event().wait()


class AsksTwice(SessionAgentLoop):
    """Asks twice at the same time after a first turn."""

    async def run_agent(self, task, address):
        first = await ask(address, "hi")
        await asyncio.gather(ask(address, "hi", first, "a"), ask(address, "hi", first, "b"))


def test_an_agent_that_hangs_is_a_timeout_which_it_answers_for():
    episode = play(HangsAfterATurn, agent={"episode_timeout_s": 0.5, "step_timeout_s": 0.5})
    assert episode.result.outcome is Outcome.TIMEOUT
    assert "HangsAfterATurn took longer than 0.5 s" in episode.result.error
    assert (episode.result.trajectories[0].num_turns, episode.score.reward) == (1, 1.0)


def test_an_engine_that_hangs_until_the_episode_s_deadline_is_infra_and_never_judged():
    generator, scorer = Hanging(["Hello"], num_answered=1), LastTurnScorer()
    episode = play(Polite, generator=generator, scorer=scorer, agent={"episode_timeout_s": 1.0, "step_timeout_s": 0.5})
    assert (episode.result.outcome, episode.score.reward, scorer.scored) == (Outcome.INFRA_ERROR, None, [])
    assert "s for engines" in episode.result.error
    assert generator.num_cancelled == 1


def test_an_engine_that_fails_is_infra_whatever_the_agent_made_of_it():
    def script(request):
        if request.request_id.endswith("-1"):
            raise EngineError("replica 0 does not answer")
        return Reply("Hello")

    class Shrugs(Polite):
        async def run_agent(self, task, address):
            first = await ask(address, "hi")
            await asyncio.gather(ask(address, "hi", first, "go on"), return_exceptions=True)

    globals()["Shrugs"] = Shrugs
    episode = play(Shrugs, generator=ScriptedGenerator(script))
    assert (episode.result.outcome, episode.score.reward) == (Outcome.INFRA_ERROR, None)
    assert "replica 0 does not answer" in episode.result.error


def test_cancellation_reaches_the_agent_and_its_turns_at_the_engine_and_forgets_the_session():
    async def cancel(work, generator):
        await until(lambda: len(generator.requests) == 3)
        work.cancel()
        await asyncio.wait({work})
        assert work.cancelled()
        assert generator.num_cancelled == 2

    assert play(AsksTwice, generator=Hanging(["Hello"], num_answered=1), meanwhile=cancel) is None


class Stubborn(SessionAgentLoop):
    """Blocks where nothing reaches it until `released`."""

    released = threading.Event()

    def run_agent(self, task, address):
        asyncio.run(ask(address, "hi"))
        self.released.wait(60)


def test_a_thread_that_nothing_reaches_is_left_behind_and_named(monkeypatch):
    monkeypatch.setattr("psrl.agent_loops.session.THREAD_GRACE_S", 0.1)
    try:
        episode = play(Stubborn, agent={"episode_timeout_s": 0.5, "step_timeout_s": 0.5})
        assert episode.result.outcome is Outcome.TIMEOUT
        assert episode.result.counts["agent/left_running"] == 1
        assert "the agent's thread is still running" in episode.result.error
    finally:
        Stubborn.released.set()


def test_a_run_without_a_gateway_is_refused_at_the_start():
    parts = LoopParts(renderer=renderer(), generator=ScriptedGenerator([]), rollout=make_rollout(loop=f"{__name__}.Polite"))
    with pytest.raises(ConfigError, match="this run has none"):
        EpisodeRunner(parts, LastTurnScorer())


# ---------------------------------------------------------------- commands

ASK = """
import json, os, sys, urllib.request
def ask():
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30))
"""


class Program(CommandAgentLoop):
    """Runs `program`, Python text."""

    program = ""

    def command(self, task, address, folder):
        (folder / "agent.py").write_text(ASK + type(self).program)
        return [sys.executable, str(folder / "agent.py"), str(folder)]


def run_program(monkeypatch, text, **more):
    monkeypatch.setattr(Program, "program", text)
    return play(Program, **more)


def test_a_command_that_ends_with_0_has_finished_in_a_folder_that_is_gone(monkeypatch, tmp_path):
    said = tmp_path / "said.json"
    text = f"""
ask()
kept = {{name: os.environ[name] for name in ("HOME", "TMPDIR", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")}}
json.dump({{"cwd": os.getcwd(), "folder": sys.argv[1], "names": sorted(os.environ), **kept}}, open({str(said)!r}, "w"))
print("x" * 100)
"""
    monkeypatch.setenv("SECRET_OF_THE_WORKER", "1")
    episode = run_program(monkeypatch, text)
    assert (episode.result.outcome, episode.result.error, episode.result.counts["agent/output_bytes"]) == (Outcome.FINISHED, None, 101)
    told = json.loads(said.read_text())
    assert told["cwd"] == told["folder"] == told["HOME"] == told["TMPDIR"]
    assert not Path(told["folder"]).exists()
    assert "SECRET_OF_THE_WORKER" not in told["names"]
    assert told["ANTHROPIC_BASE_URL"].startswith("http://127.0.0.1:")
    assert told["ANTHROPIC_API_KEY"]


def test_a_command_s_exit_code_and_the_end_of_its_output_are_told(monkeypatch):
    text = 'ask()\nprint("first words" + "." * 200_000)\nprint("last words", file=sys.stderr)\nsys.exit(3)\n'
    episode = run_program(monkeypatch, text)
    assert (episode.result.outcome, episode.score.reward) == (Outcome.AGENT_ERROR, 1.0)
    assert "ended with 3; its last output: ..." in episode.result.error
    assert episode.result.error.endswith("last words")
    assert "first words" not in episode.result.error
    assert len(episode.result.error) < 20_000


@pytest.mark.parametrize("argv", [["/no/such/program"], [sys.executable, "-c", "import sys; sys.exit('no key')"]])
def test_a_command_that_never_asks_is_infra_and_says_why(argv, monkeypatch):
    monkeypatch.setattr(Program, "command", lambda self, task, address, folder: argv)
    episode = play(Program)
    assert (episode.result.outcome, episode.score.reward) == (Outcome.INFRA_ERROR, None)
    assert "captured no turn" in episode.result.error
    assert ("FileNotFoundError" if argv[0] == "/no/such/program" else "no key") in episode.result.error


TREE = """
import signal, subprocess, time
{ignore}
ask()
program = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
children = [subprocess.Popen(program), subprocess.Popen(program, start_new_session=True)]
with open({pids!r} + ".new", "w") as file:
    json.dump([os.getpid(), *(child.pid for child in children)], file)
os.rename({pids!r} + ".new", {pids!r})
{then}
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("end", ["returns", "timeout", "cancelled", "cancelled, deaf to TERM"])
def test_nothing_that_a_command_started_outlives_its_episode(end, monkeypatch, tmp_path):
    pids = tmp_path / "pids.json"
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if "deaf" in end else ""
    text = TREE.format(pids=str(pids), ignore=ignore, then="" if end == "returns" else "time.sleep(600)")

    async def cancel(work, generator):
        if end.startswith("cancelled"):
            await until(pids.exists)
            assert all(is_running(pid) for pid in json.loads(pids.read_text()))
            work.cancel()
            await asyncio.wait({work})

    timeout = {"episode_timeout_s": 3.0, "step_timeout_s": 1.0} if end == "timeout" else {}
    episode = run_program(monkeypatch, text, meanwhile=cancel, agent=timeout)
    expected = {"returns": Outcome.FINISHED, "timeout": Outcome.TIMEOUT}
    assert (episode.result.outcome if episode else None) is expected.get(end)
    left = [pid for pid in json.loads(pids.read_text()) if is_running(pid)]
    assert left == []


class Warm(SessionAgentLoop):
    """Asks for a temperature of its own."""

    async def run_agent(self, task, address):
        body = {"messages": [{"role": "user", "content": "Hello."}], "temperature": 0.3}
        headers = {"authorization": f"Bearer {address.api_key}"}
        async with aiohttp.ClientSession() as http, http.post(f"{address.base_url}/chat/completions", json=body, headers=headers) as answer:
            return {"status": answer.status}


@pytest.mark.parametrize(("choice", "status"), [("override", 200), ("refuse", 400)])
def test_what_becomes_of_the_agents_own_sampling_is_the_runs_choice(choice, status):
    async def run():
        async with running_gateway(renderer(), ScriptedGenerator([FINAL]), max_sessions=1) as sessions:
            parts = LoopParts(
                renderer=renderer(),
                generator=ScriptedGenerator([FINAL]),
                rollout=make_rollout(loop=f"{__name__}.Warm", max_turns=5),
                sessions=sessions,
                agent_sampling=AgentSampling(choice),
            )
            return await EpisodeRunner(parts, LastTurnScorer()).run(make_task(), make_ticket())

    episode = asyncio.run(asyncio.wait_for(run(), timeout=60))
    assert episode.result.counts["agent/status"] == status


class EmptyIterator(SessionAgentLoop):
    """Blocks, takes a turn, and lets a StopIteration out, which a future cannot carry."""

    def run_agent(self, task, address):
        body = json.dumps({"messages": [{"role": "user", "content": "Hello."}]}).encode()
        headers = {"authorization": f"Bearer {address.api_key}", "content-type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{address.base_url}/chat/completions", data=body, headers=headers)).read()
        next(iter(()))


def test_a_stop_iteration_is_an_agent_error_at_once():
    episode = play(EmptyIterator)
    assert episode.result.outcome is Outcome.AGENT_ERROR
    assert "StopIteration" in episode.result.error
