"""The official `openai` client against `psrl serve`: what is captured is what the native loop samples with the same seeds."""

import asyncio
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from psrl.agent_loops.base import LoopParts, build_agent_loop
from psrl.chat import load_renderer
from psrl.config.rollout import AgentConfig, MultiTurnConfig, NameConfig, RolloutConfig
from psrl.engine_client.client import HttpGenerator
from psrl.recipes import retool_tiny
from psrl.session_client.client import SessionClient
from psrl.types import (
    EpisodeTicket,
    EpisodeUid,
    GroupUid,
    Outcome,
    PolicyVersion,
    SamplingContract,
    SessionLimits,
    SessionSpec,
    Task,
    TaskUid,
)
from tests.gateway.ten_turns import NUM_TURNS, InterpreterSchema, converse, plain_prompt, prompt_with_examples
from tests.real_models import smollm2_path

SEED = 7
TINY_MODEL = Path(retool_tiny.__file__).parent / "model"
PROMPT_LENGTH, RESPONSE_LENGTH = 600, 1400
TICKET = EpisodeTicket(uid=EpisodeUid("val-0-000000-e0"), group=GroupUid("val-0-000000"), admitted_version=PolicyVersion(0), seed=SEED)


@contextmanager
def served(model, folder):
    """A running `psrl serve`; gives (router's URL, admin key, engine's URL)."""
    logs = folder / "logs"
    argv = [sys.executable, "-m", "psrl", "serve", str(model), "--port", "0", "--log-dir", str(logs), "--max-num-seqs", "2"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if "OPENAI_API_KEY" in line:
                break
        text = "".join(lines)
        router = re.search(r"OPENAI_BASE_URL=(http://[^/]+)/", text)
        assert router, text
        engine = re.search(r"http://\S+", (logs / "engine-0.log").read_text().rpartition("psrl engine")[2])
        yield router[1], (logs / "gateway-admin.key").read_text(), engine[0]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.stdout.close()


def through_the_client(url, admin_key, prompt, *, temperature, stream):
    """The session's record after the conversation."""
    spec = SessionSpec(
        uid=TICKET.uid,
        group=TICKET.group,
        admitted_version=PolicyVersion(0),
        is_validation=False,
        contract=SamplingContract(seed=SEED, temperature=temperature),
        limits=SessionLimits(max_turns=NUM_TURNS, prompt_length=PROMPT_LENGTH, response_length=RESPONSE_LENGTH),
    )

    async def play():
        sessions = SessionClient(url, admin_key=admin_key)
        try:
            address = await sessions.open(spec)
            client = openai.OpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0)
            await asyncio.to_thread(converse, client, prompt, stream=stream)
            return await sessions.close(address, abort=False)
        finally:
            await sessions.aclose()

    return asyncio.run(play())


def through_the_native_loop(model, engine_url, prompt, *, temperature):
    """The episode of `multi_turn_agent`, straight to the engine."""
    rollout = RolloutConfig(
        temperature=temperature,
        prompt_length=PROMPT_LENGTH,
        response_length=RESPONSE_LENGTH,
        multi_turn=MultiTurnConfig(enable=True, max_turns=NUM_TURNS),
        agent=AgentConfig(env=NameConfig(name="tests.gateway.ten_turns.TenTurns")),
    )
    task = Task(uid=TaskUid("val-0-000000"), prompt=prompt, data_source="ten_turns")

    async def play():
        generator = HttpGenerator([engine_url])
        parts = LoopParts(
            renderer=load_renderer(str(model), tool_format="hermes"), generator=generator, tools=[InterpreterSchema()], rollout=rollout
        )
        try:
            return await build_agent_loop("multi_turn_agent", parts).run(task, TICKET)
        finally:
            await generator.close()

    return asyncio.run(play())


@pytest.mark.parametrize(("model", "temperature"), [("tiny", 1.0), pytest.param("smollm2", 0.5, marks=pytest.mark.slow)])
def test_ten_turns_with_a_tool_are_the_native_loops_token_for_token(model, temperature, tmp_path):
    folder, prompt = (TINY_MODEL, plain_prompt()) if model == "tiny" else (smollm2_path(), prompt_with_examples())
    with served(folder, tmp_path) as (url, admin_key, engine_url):
        plain = through_the_client(url, admin_key, prompt, temperature=temperature, stream=False)
        streamed = through_the_client(url, admin_key, prompt, temperature=temperature, stream=True)
        native = through_the_native_loop(folder, engine_url, prompt, temperature=temperature)
    assert native.outcome is Outcome.MAX_TURNS, native.error
    assert native.counts["turns"] == NUM_TURNS
    (expected,) = native.trajectories
    for record in (plain, streamed):
        (captured,) = record.trajectories
        assert captured.ids() == expected.ids()
        assert captured.loss_mask() == expected.loss_mask()
        assert captured.logprobs() == pytest.approx(expected.logprobs(), abs=1e-4)
        assert captured.turn_indices() == expected.turn_indices()
        assert record.turn_texts == native.turn_texts
        if model == "tiny":
            assert record.counts["tool_calls"] > 0, record.counts
