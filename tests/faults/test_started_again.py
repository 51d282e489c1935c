"""Processes that are started again: killed twenty times at random moments, also while they start. The run goes on; no group is lost or
trained on twice."""

import json
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from psrl.config.load import RECIPES_FOLDER
from tests.faults.faulty_run import NUM_INJECTIONS, RECOVERY_LIMIT_S, WITHOUT_END, FaultyRun, kill
from tests.runtime.command import Command, start

pytestmark = pytest.mark.slow

SESSIONS = ("psrl.rollout_gateway.enable=true", "gen_actor_rollout_ref.rollout.agent.default_agent_loop=multi_turn_completion_agent")
TWO_REPLICAS = ("gen_actor_rollout_ref.rollout.num_replicas=2",)
KINDS = {
    "engine server": ("engine replica", ("psrl.engines.torch",), TWO_REPLICAS),
    "only engine server": ("engine replica", ("psrl.engines.torch",), ()),
    "engine actor": ("engine replica", ("ray::EngineReplicaActor",), TWO_REPLICAS),
    "agent worker": ("agent worker", ("ray::AgentWorkerActor",), ("gen_actor_rollout_ref.rollout.agent.num_workers=2",)),
    "only agent worker": ("agent worker", ("ray::AgentWorkerActor",), ()),
    "parameter server": ("parameter server", ("ray::ParameterServerActor",), ()),
    "gateway actor": ("gateway", ("ray::GatewayActor",), SESSIONS),
    "session router": ("gateway", ("psrl.gateway --model-path",), SESSIONS),
}
"""Kind -> what errors call it, words of its command line, settings."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_is_killed_again_and_again_costs_time_and_nothing_else(tmp_path, kind):
    unit, words, settings = KINDS[kind]
    run = FaultyRun(tmp_path, kind, settings=(*settings, *WITHOUT_END))
    run.begin()
    for number in range(1, NUM_INJECTIONS + 1):
        victim = run.until_alive(words)
        pause_s = run.moment(5.0)
        num_deaths, step, began = run.num_deaths(unit), run.num_steps(), time.monotonic()
        kill(victim)
        until_named(run, unit, num_deaths)
        run.report(
            number, f"{pause_s:.1f} s after it was there, at step {step}: pid {victim.pid}, named in {time.monotonic() - began:.1f} s"
        )
    until_recovered(run, unit)
    run.until_steps(3)
    run.stop()
    run.check_record()
    print(f"[{kind}] {run.num_deaths(unit)} deaths, {run.num_steps()} steps", flush=True)


def test_smg_that_is_killed_again_and_again_costs_time_and_nothing_else(tmp_path):
    run = FaultyRun(tmp_path, "SMG", settings=(*SESSIONS, *WITHOUT_END, "psrl.rollout_gateway.max_restarts=1000"))
    run.begin()
    for number in range(1, NUM_INJECTIONS + 1):
        victim = run.until_alive(("smg::router",))
        pause_s = run.moment(4.0)
        kill(victim)
        run.report(number, f"{pause_s:.1f} s after it was there, at step {run.num_steps()}: pid {victim.pid}")
    run.until_steps(3)
    run.stop()
    run.check_record()


def test_a_replica_that_answers_nothing_is_started_again(tmp_path):
    run = FaultyRun(tmp_path, "silent engine server", settings=(*TWO_REPLICAS, *WITHOUT_END))
    run.begin()
    for number in range(1, NUM_INJECTIONS + 1):
        victim, pause_s, num_deaths = stopped_one(run)
        began = time.monotonic()
        until_named(run, "engine replica", num_deaths)
        run.report(number, f"{pause_s:.1f} s after it was there: pid {victim.pid} stopped, named in {time.monotonic() - began:.1f} s")
    until_recovered(run, "engine replica")
    run.until_steps(3)
    run.stop()
    run.check_record()


def stopped_one(run: FaultyRun) -> tuple[psutil.Process, float, int]:
    """An engine server that stands still now, seconds waited before, deaths until then; one that psrl was just ending is not taken."""
    while True:
        victim = run.until_alive(("psrl.engines.torch",))
        pause_s, num_deaths = run.moment(5.0), run.num_deaths("engine replica")
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGSTOP)
            return victim, pause_s, num_deaths


def test_a_replica_that_takes_turns_and_samples_nothing_is_started_again(tmp_path):
    recipe = recipe_with_hanging_engine(tmp_path / "recipe", num_answered=200)
    run = FaultyRun(tmp_path, "hanging engine", recipe=str(recipe), settings=WITHOUT_END)
    run.begin()
    for number in range(1, NUM_INJECTIONS + 1):
        began = time.monotonic()
        until_named(run, "engine replica 0", number - 1)
        run.report(number, f"after 200 turns, at step {run.num_steps()}, {time.monotonic() - began:.1f} s after the one before")
    assert "sampled nothing for" in run.errors()[0].message
    until_recovered(run, "engine replica")
    run.until_steps(1)
    run.stop()
    run.check_record()


def test_an_evaluation_goes_on_through_deaths_and_plays_every_task(tmp_path):
    settings = ("data.generator.num_val=400", "train_actor_rollout_ref.rollout.n=4", f"trainer.default_local_dir={tmp_path}")
    command = start(tmp_path, "eval", "retool_tiny", *settings)
    for words in (("ray::AgentWorkerActor.run_group",), ("psrl.engines.torch",)):
        kill(until_running(command, *words))
    output = command.output(300)
    assert command.process.returncode == 0, output
    assert re.search(r"num tasks\s+400", output), output
    assert "agent worker 0 is up again" in output and "engine replica 0 is up again" in output, output
    assert command.leftovers() == []


def until_running(command: Command, *words: str) -> psutil.Process:
    """The process whose command line holds the words, once there is one."""
    deadline = time.monotonic() + RECOVERY_LIMIT_S
    while time.monotonic() < deadline:
        assert command.process.poll() is None, f"ended: {command.log()}"
        with suppress(AssertionError):
            return command.descendant(*words)
        time.sleep(0.05)
    raise AssertionError(f"no {words}: {command.log()}")


def recipe_with_hanging_engine(folder: Path, *, num_answered: int) -> Path:
    """The tiny recipe on a scripted engine that answers so many turns after each start, and then none."""
    folder.mkdir()
    answer = {
        "random": {"low": 20, "high": 120, "min_tokens": 4, "max_tokens": 40, "by_seed": True},
        "per_token_s": 0.002,
        "finish_reason": "stop",
    }
    vocab_size = json.loads((RECIPES_FOLDER / "retool_tiny" / "model" / "config.json").read_text())["vocab_size"]
    script = {"vocab_size": vocab_size, "max_model_len": 1024, "turns": [answer] * num_answered + [{"failure": "hang"}] * 100_000}
    (folder / "script.json").write_text(json.dumps(script))
    recipe = folder / "hanging_engine.yaml"
    rollout = {"name": "scripted", "script_path": str(folder / "script.json"), "request_timeout_s": 5}
    tree = {"defaults": ["/retool_tiny/config@_global_", "_self_"], "gen_actor_rollout_ref": {"rollout": rollout}}
    recipe.write_text(yaml.safe_dump(tree))
    return recipe


def until_named(run: FaultyRun, unit: str, num_deaths: int) -> None:
    """Until one more death of the unit stands in errors.jsonl."""
    deadline = time.monotonic() + RECOVERY_LIMIT_S
    while run.num_deaths(unit) <= num_deaths:
        assert run.now.process.poll() is None, f"ended: {run.now.log()}"
        assert time.monotonic() < deadline, f"the death of {unit} is not named: {run.now.log()}"
        run.now.look()
        time.sleep(0.05)


def until_recovered(run: FaultyRun, unit: str) -> None:
    """Until as many deaths as recoveries of the unit are told of, but for those that hit a start."""
    deadline = time.monotonic() + RECOVERY_LIMIT_S
    lines = lambda: [line for line in (run.folder / "output.txt").read_text().splitlines() if line.startswith(unit)]  # noqa: E731
    while not lines()[-1].rstrip().endswith("is up again"):
        assert run.now.process.poll() is None, f"ended: {run.now.log()}"
        assert time.monotonic() < deadline, f"{unit} is not up again: {run.now.log()}"
        run.now.look()
        time.sleep(0.05)
