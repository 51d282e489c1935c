"""What an episode and a turn of mini-SWE-agent cost beside the same commands played natively, with turns that cost nothing.

    python benchmarks/mini_swe.py [--turns 21] [--episodes 8] [--at-once 16]

The policy is in this process and says `true` until it submits, so what is left is psrl's and mini-SWE-agent's own: sandbox, the agent's
process, the session and the commands. The session router runs in this process too. The ratio of the two ways is what to look at.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import uvicorn
import yaml

from psrl.agent_loops import EpisodeRunner, LoopParts
from psrl.chat import load_renderer
from psrl.config.rollout import AgentConfig, MultiTurnConfig, NameConfig, RolloutConfig
from psrl.config.sandbox import SandboxConfig
from psrl.gateway.__main__ import build_router
from psrl.protocols import Generator
from psrl.sandbox import BackendSandboxes, limits_of
from psrl.session_client.client import SessionClient
from psrl.types import (
    EpisodeTicket,
    EpisodeUid,
    FinishReason,
    GenerateRequest,
    Generation,
    GroupUid,
    LoopResult,
    Message,
    Outcome,
    PolicyVersion,
    Role,
    Score,
    SweProblem,
    Task,
    TaskUid,
)

MODEL = Path(__file__).parent.parent / "psrl" / "recipes" / "retool_tiny" / "model"
AGENT = {
    "task_kind": "benchmark",
    "agent": {"system_template": "Mend.", "instance_template": "{{task}}"},
    "model": {"model_class": "litellm_textbased", "action_regex": r"^\$ (.+)$"},
}
PROBLEM = SweProblem(
    instance_id="calc",
    repo="calc",
    task_kind="benchmark",
    statement="Mend it.",
    files={"calc.py": "def add(a, b):\n    return a - b\n"},
    gold_patch="",
    test_paths=("tests",),
    fail_to_pass=("tests/test_calc.py::test_adds",),
)
TASK = Task(
    uid=TaskUid("train-0-0"),
    prompt=(Message(role=Role.USER, content=PROBLEM.statement),),
    data_source="benchmark",
    extra_info={"swe": PROBLEM.to_row()},
)
WAYS = {
    "mini_swe_agent": AgentConfig(default_agent_loop="mini_swe_agent"),
    "multi_turn_agent": AgentConfig(
        default_agent_loop="multi_turn_agent", env=NameConfig(name="mini_swe_env"), data=NameConfig(name="mini_swe_agent_data")
    ),
}


class Policy(Generator):
    """Says `true` for all turns but the last one, at once."""

    def __init__(self) -> None:
        self.renderer = load_renderer(MODEL, tool_format="hermes", history_thinking="keep")
        self.num_turns = 1

    async def generate(self, request: GenerateRequest) -> Generation:
        """The turn whose number ends the request's id."""
        is_last = int(request.request_id.rpartition("-")[2]) == self.num_turns - 1
        text = "$ echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" if is_last else "$ true"
        ids = [*self.renderer.template.encode(text), self.renderer.stop_token_ids[0]]
        return Generation(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            policy_versions=[0] * len(ids),
            finish_reason=FinishReason.STOP,
            prompt_tokens=len(request.token_ids),
            cached_tokens=0,
            latency_s=0.0,
        )


class NoScorer:
    """Nothing is judged here."""

    async def score(self, task: Task, result: LoopResult) -> Score:
        """None."""
        assert result.outcome is Outcome.FINISHED, result
        return Score(reward=None)

    async def close(self) -> None:
        """Nothing is held."""


@asynccontextmanager
async def running_sessions(policy: Policy) -> AsyncIterator[SessionClient]:
    """A session router on a free port of this process."""
    limits = {"max_sessions": 1000, "idle_timeout_s": 600.0, "turn_timeout_s": 60.0}
    router = build_router(policy.renderer, policy, admin_key="benchmark", model_name="tiny", **limits)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(router.app(), log_level="warning", access_log=False, timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    client = SessionClient(f"http://127.0.0.1:{listener.getsockname()[1]}", admin_key="benchmark")
    try:
        yield client
    finally:
        await client.aclose()
        server.should_exit = True
        await serving


def ticket(number: int) -> EpisodeTicket:
    """Of one episode."""
    uid = EpisodeUid(f"train-0-0-e{number}")
    return EpisodeTicket(uid=uid, group=GroupUid("train-0-0"), admitted_version=PolicyVersion(0), seed=number)


async def main() -> None:
    """Measure both ways, alone and many at once."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=16)
    options = parser.parse_args()
    policy, sandbox = Policy(), SandboxConfig(wall_s=30)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "agent.yaml"
        path.write_text(yaml.safe_dump(AGENT))
        async with running_sessions(policy) as sessions:
            for name, agent in WAYS.items():
                rollout = RolloutConfig(
                    prompt_length=1000,
                    response_length=100 * options.turns,
                    multi_turn=MultiTurnConfig(enable=True, max_turns=options.turns + 1),
                    agent=replace(agent, agent_loop_config_path=str(path)),
                )
                parts = LoopParts(
                    renderer=policy.renderer,
                    generator=policy,
                    sandboxes=BackendSandboxes(sandbox, run="benchmark"),
                    sandbox_limits=limits_of(sandbox),
                    rollout=rollout,
                    sessions=sessions,
                )
                await measure(name, EpisodeRunner(parts, NoScorer()), policy, options)


async def measure(name: str, runner: EpisodeRunner, policy: Policy, options: argparse.Namespace) -> None:
    """Print one row."""
    await runner.run(TASK, ticket(0))  # libraries, templates
    medians = {}
    for num_turns in (1, options.turns):
        policy.num_turns = num_turns
        taken = []
        for number in range(options.episodes):
            began = time.perf_counter()
            await runner.run(TASK, ticket(number))
            taken.append(time.perf_counter() - began)
        medians[num_turns] = statistics.median(taken)
    per_turn_s = (medians[options.turns] - medians[1]) / (options.turns - 1)
    began = time.perf_counter()
    await asyncio.gather(*(runner.run(TASK, ticket(number)) for number in range(options.at_once)))
    rate = options.at_once * options.turns / (time.perf_counter() - began)
    print(f"{name:18} episode of one turn {medians[1] * 1e3:6.1f} ms   further turn {per_turn_s * 1e3:5.1f} ms   ", end="")
    print(f"{options.at_once} at once: {rate:5.0f} turns/s", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
