"""Episodes of many turns with tools while engines pause, update and hand turns over: the shipped tiny model on the torch engine."""

import asyncio
import itertools
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import pytest
import torch
from episode_kit import LastTurnScorer, make_ticket
from test_completion_real_model import RECIPE, rollout_of
from transformers import AutoModelForCausalLM

from psrl.agent_loops import EpisodeRunner, LoopParts
from psrl.chat import load_renderer
from psrl.config.sandbox import SandboxConfig
from psrl.datasets.generators import build_generator
from psrl.engine_client.client import HttpGenerator
from psrl.engines.server import build_app
from psrl.engines.torch.architecture import read_architecture
from psrl.engines.torch.core import TorchCore
from psrl.engines.torch.weights import load_folder
from psrl.parameter_server.layout import lay_out, pieces_of
from psrl.parameter_server.transports.shared_memory import publish
from psrl.sandbox.build import build_interpreter
from psrl.tools.config import load_tools
from psrl.types import FinishReason, Outcome
from tests.gateway.gateway_kit import running_app, running_gateway, until

NUM_TASKS = 12
NEW_VERSION = 1


def torch_core():
    weights = load_folder(RECIPE / "model", read_architecture(RECIPE / "model"), dtype=torch.float32, device=torch.device("cpu"))
    return TorchCore(weights, model_name="tiny", max_num_seqs=8, num_cache_slots=16, max_model_len=256, num_threads=1)


def new_model():
    """The shipped weights, moved a little: it still calls tools, and says other things."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(RECIPE / "model", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * parameter.std() * torch.randn_like(parameter)
    return model


@dataclass
class Fleet:
    cores: list
    generator: HttpGenerator

    @property
    def num_sampled(self):
        return sum(core.load().num_sampled_tokens for core in self.cores)


async def play_all(loop, disturb, *, num_replicas=1):
    """Every task once, while `disturb(fleet)` does what it does; the episodes."""
    renderer = load_renderer(str(RECIPE / "model"), tool_format="hermes")
    tasks = [
        replace(task, uid=f"train-0-{index}") for index, task in enumerate(build_generator("arithmetic").train_tasks(NUM_TASKS, seed=3))
    ]
    async with AsyncExitStack() as stack:
        cores = [torch_core() for _ in range(num_replicas)]
        for core in cores:
            stack.callback(core.close)
        interpreter = build_interpreter(SandboxConfig(backend="process", num_workers=1))
        stack.push_async_callback(interpreter.stop)
        urls = [await stack.enter_async_context(running_app(build_app(core))) for core in cores]
        generator = HttpGenerator(urls, request_timeout_s=60.0)
        stack.push_async_callback(generator.close)
        sessions = await stack.enter_async_context(running_gateway(renderer, generator))
        tools = load_tools(str(RECIPE / "tools.yaml"), program_runner=interpreter)
        parts = LoopParts(renderer=renderer, generator=generator, tools=tools, rollout=rollout_of(loop), sessions=sessions)
        runner = EpisodeRunner(parts, LastTurnScorer())
        tickets = [make_ticket(f"{task.uid}-e0", seed=index, instance=0) for index, task in enumerate(tasks)]
        playing = asyncio.gather(*(runner.run(task, ticket) for task, ticket in zip(tasks, tickets, strict=True)))
        disturbing = asyncio.create_task(disturb(Fleet(cores, generator)))
        try:
            return await playing
        finally:
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)


def play(loop, disturb, **options):
    return asyncio.run(asyncio.wait_for(play_all(loop, disturb, **options), timeout=200))


async def leave_alone(fleet):
    pass


async def pause_now_and_then(fleet):
    for number in itertools.count(1):
        await until(lambda number=number: fleet.num_sampled >= 30 * number)
        await fleet.generator.replicas[0].pause("abort")
        await fleet.generator.replicas[0].resume()


async def move_to_and_fro(fleet):
    sessions = [f"train-0-{index}-e0" for index in range(NUM_TASKS)]
    for number in itertools.count(1):
        await until(lambda number=number: fleet.num_sampled >= 30 * number)
        await fleet.generator.move(sessions, number % 2)


def tokens_of(episodes):
    return [
        (episode.result.outcome, trajectory.ids(), trajectory.loss_mask())
        for episode in episodes
        for trajectory in episode.result.trajectories
    ]


def num_resumed(episodes):
    return sum(episode.result.counts.get("resumed_turns", 0) for episode in episodes)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["multi_turn_agent", "multi_turn_completion_agent"])
def test_episodes_with_tools_are_the_same_however_often_their_engine_pauses(loop):
    alone, paused = play(loop, leave_alone), play(loop, pause_now_and_then)
    assert num_resumed(alone) == 0
    assert num_resumed(paused) >= 5
    assert tokens_of(paused) == tokens_of(alone)
    assert sum(episode.result.counts["tool_calls"] for episode in alone) >= 3
    for ours, theirs in zip(paused, alone, strict=True):
        assert ours.result.trajectories[0].logprobs() == pytest.approx(theirs.result.trajectories[0].logprobs(), abs=1e-4)


@pytest.mark.slow
def test_episodes_with_tools_are_the_same_however_often_they_move():
    alone, moved = play("multi_turn_agent", leave_alone), play("multi_turn_agent", move_to_and_fro, num_replicas=2)
    assert num_resumed(moved) >= 5
    assert tokens_of(moved) == tokens_of(alone)


@pytest.mark.parametrize(
    ("loop", "mode"),
    [
        ("multi_turn_agent", "abort"),
        pytest.param("multi_turn_agent", "keep", marks=pytest.mark.slow),
        pytest.param("multi_turn_completion_agent", "abort", marks=pytest.mark.slow),
        pytest.param("multi_turn_completion_agent", "keep", marks=pytest.mark.slow),
    ],
)
def test_each_token_has_the_logprob_that_the_weights_of_its_version_give_it(loop, mode):
    model = new_model()
    tensors = list(model.state_dict().items())
    layout = lay_out(tensors, version=NEW_VERSION)
    published = publish(layout, pieces_of(tensors, layout))

    async def update(fleet):
        (core,) = fleet.cores
        await until(lambda: fleet.num_sampled >= 60)
        await fleet.generator.replicas[0].pause(mode)
        await asyncio.wrap_future(core.stage_weights(published.manifest))
        await asyncio.wrap_future(core.commit_weights(NEW_VERSION))
        await fleet.generator.replicas[0].resume()

    episodes = play(loop, update)
    published.close()
    models = {0: AutoModelForCausalLM.from_pretrained(RECIPE / "model", dtype=torch.float32), NEW_VERSION: model}
    num_mixed_turns = 0
    for episode in episodes:
        assert episode.result.outcome in (Outcome.FINISHED, Outcome.MAX_TURNS, Outcome.MAX_TOKENS), episode.result.error
        (trajectory,) = episode.result.trajectories
        ids, versions = trajectory.ids(), trajectory.versions()
        assert [version for version in versions if version >= 0] == sorted(version for version in versions if version >= 0)
        with torch.no_grad():
            expected = {version: one(torch.tensor([ids])).logits[0].log_softmax(-1) for version, one in models.items()}
        for position, (token, version, logprob) in enumerate(zip(ids, versions, trajectory.logprobs(), strict=True)):
            if version >= 0:
                assert logprob == pytest.approx(expected[version][position - 1, token].item(), abs=1e-4), (position, version)
        num_mixed_turns += sum(len(set(step.policy_versions)) == 2 for step in trajectory.steps)
        assert all(step.finish_reason != FinishReason.ABORT for step in trajectory.steps)
    assert num_mixed_turns >= 2, "no turn held both versions"
    assert {version for episode in episodes for version in episode.result.trajectories[0].versions()} == {-1, 0, NEW_VERSION}
