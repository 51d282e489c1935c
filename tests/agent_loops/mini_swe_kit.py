"""Episodes of mini-swe-agent on the calc project, with scripted policies: gold mends it and submits, null submits at once."""

import asyncio
import json
import os
from pathlib import Path

import yaml
from calc_project import PROBLEM, TEXT_YAML
from episode_kit import ScriptedGenerator, make_rollout, make_task, make_ticket, renderer

from psrl.agent_loops import EpisodeRunner, LoopParts
from psrl.agent_loops.deadline import Truncations
from psrl.config.sandbox import SandboxConfig
from psrl.sandbox import BackendSandboxes, limits_of
from psrl.sandbox.reaper import labelled_processes
from psrl.types import Message, Role, SweProblem
from tests.gateway.gateway_kit import running_gateway

CALLS_YAML = {**TEXT_YAML, "model": {"observation_template": TEXT_YAML["model"]["observation_template"]}}
MEND = "sed -i 's/a - b/a + b/' calc.py"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git diff"


def block(command: str) -> str:
    """A turn of the text-based agent."""
    return f"I run it.\n```sh\n{command}\n```"


def call(command: object) -> str:
    """A turn of the agent with tool calls."""
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


GOLD_TURNS = [block("cat calc.py"), block(MEND), block(SUBMIT)]
NULL_TURNS = [block(SUBMIT)]


def write_yaml(folder: Path, content: dict, name: str = "agent.yaml") -> str:
    """The path of the file."""
    (folder / name).write_text(yaml.safe_dump(content))
    return str(folder / name)


def swe_task(problem: SweProblem = PROBLEM, **fields):
    """A row's task."""
    prompt = (Message(role=Role.USER, content=problem.statement),)
    return make_task(prompt=prompt, extra_info={"swe": problem.to_row()}, data_source=problem.task_kind, **fields)


def swe_rollout(path: str, *, agent=None, **fields):
    """The black-box loop's settings."""
    settings = {"loop": "mini_swe_agent", "response_length": 6000, "prompt_length": 2000, **fields}
    return make_rollout(agent={"agent_loop_config_path": path, **(agent or {})}, **settings)


def sandboxes(**settings):
    """Real bubblewrap."""
    return BackendSandboxes(SandboxConfig(**settings)), limits_of(SandboxConfig(**settings))


async def play_episode(
    path, script, scorer, *, task=None, ticket=None, generator=None, settings=None, meanwhile=None, truncations=None, **rollout
):
    """One episode on a real router, in real sandboxes; the policy says what the script says. `meanwhile(work)` runs beside it."""
    generator = generator or ScriptedGenerator(script)
    places, limits = sandboxes(**(settings or {}))
    async with running_gateway(renderer(), generator) as sessions:
        parts = LoopParts(
            renderer=renderer(),
            generator=generator,
            sandboxes=places,
            sandbox_limits=limits,
            rollout=swe_rollout(path, **rollout),
            sessions=sessions,
            truncations=truncations or Truncations(),
        )
        work = asyncio.ensure_future(EpisodeRunner(parts, scorer).run(task or swe_task(), ticket or make_ticket()))
        if meanwhile is not None:
            await meanwhile(work)
        return None if work.cancelled() else await work


def sandbox_processes() -> list[int]:
    """Pids of this process's sandboxes and of what runs in them."""
    return [pid for pid, label in labelled_processes().items() if label.startswith("run.") and f".{os.getpid()}." in label]


def agent_processes() -> list[int]:
    """Pids of the episodes' agents; the warm process that they are forked from is not one of them."""
    labels = [pid for pid, label in labelled_processes().items() if label.startswith("agent.") and f".{os.getpid()}." in label]
    return [pid for pid in labels if parent_of(pid) in labels]


def parent_of(pid: int) -> int | None:
    """None where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    except OSError:
        return None
