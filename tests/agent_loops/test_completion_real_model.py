"""The shipped tiny model on the torch engine, with its real interpreter: the same episodes natively and through the gateway."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import torch
from episode_kit import LastTurnScorer, make_ticket

import psrl
from psrl.agent_loops import EpisodeRunner, LoopParts
from psrl.chat import load_renderer
from psrl.config.rollout import AgentConfig, MultiTurnConfig, NameConfig, RolloutConfig
from psrl.config.sandbox import SandboxConfig
from psrl.datasets.generators import build_generator
from psrl.engine_client.client import HttpGenerator
from psrl.engines.server import build_app
from psrl.engines.torch.architecture import read_architecture
from psrl.engines.torch.core import TorchCore
from psrl.engines.torch.weights import load_folder
from psrl.sandbox.build import build_interpreter
from psrl.tools.config import load_tools
from psrl.types import Outcome
from tests.gateway.gateway_kit import running_app, running_gateway

RECIPE = Path(psrl.__file__).parent / "recipes" / "retool_tiny"
NUM_TASKS = 24


def rollout_of(loop):
    """The recipe's own limits."""
    return RolloutConfig(
        prompt_length=64,
        response_length=144,
        multi_turn=MultiTurnConfig(enable=True, max_turns=3, max_tokens_per_turn=48, max_tool_response_length=100),
        agent=AgentConfig(default_agent_loop=loop, env=NameConfig(name="tool_env"), data=NameConfig(name="tool_agent_data")),
    )


async def play_all(loops):
    """Every task with every loop; {loop: episodes}."""
    weights = load_folder(RECIPE / "model", read_architecture(RECIPE / "model"), dtype=torch.float32, device=torch.device("cpu"))
    core = TorchCore(weights, model_name="tiny", max_num_seqs=32, num_cache_slots=32, max_model_len=256, num_threads=1)
    renderer = load_renderer(str(RECIPE / "model"), tool_format="hermes")
    tasks = [
        replace(task, uid=f"train-0-{index}") for index, task in enumerate(build_generator("arithmetic").train_tasks(NUM_TASKS, seed=3))
    ]
    async with AsyncExitStack() as stack:
        stack.callback(core.close)
        interpreter = build_interpreter(SandboxConfig(backend="process", num_workers=1))
        stack.push_async_callback(interpreter.stop)
        url = await stack.enter_async_context(running_app(build_app(core)))
        generator = HttpGenerator([url], request_timeout_s=60.0)
        stack.push_async_callback(generator.close)
        sessions = await stack.enter_async_context(running_gateway(renderer, generator))
        tools = load_tools(str(RECIPE / "tools.yaml"), program_runner=interpreter)
        played = {}
        for loop in loops:
            parts = LoopParts(renderer=renderer, generator=generator, tools=tools, rollout=rollout_of(loop), sessions=sessions)
            runner = EpisodeRunner(parts, LastTurnScorer())
            tickets = [make_ticket(f"{task.uid}-e0", seed=index) for index, task in enumerate(tasks)]
            played[loop] = await asyncio.gather(*(runner.run(task, ticket) for task, ticket in zip(tasks, tickets, strict=True)))
        return played


def test_the_same_seeds_sample_the_same_episodes_token_for_token():
    loops = ("multi_turn_agent", "multi_turn_completion_agent")
    played = asyncio.run(asyncio.wait_for(play_all(loops), timeout=300))
    natives, throughs = (played[loop] for loop in loops)
    for native, through in zip(natives, throughs, strict=True):
        assert through.result.error is None
        assert through.result.counts["tokens/drift"] == 0
        assert through.result.outcome is native.result.outcome
        ours, theirs = (episode.result.trajectories[0] for episode in (through, native))
        assert (ours.ids(), ours.loss_mask(), ours.versions()) == (theirs.ids(), theirs.loss_mask(), theirs.versions())
        torch.testing.assert_close(ours.logprobs(), theirs.logprobs(), rtol=0, atol=1e-4)
        assert through.result.messages == native.result.messages
    assert {episode.result.outcome for episode in natives} >= {Outcome.FINISHED}
    assert sum(episode.result.counts["tool_calls"] for episode in natives) >= NUM_TASKS / 4
