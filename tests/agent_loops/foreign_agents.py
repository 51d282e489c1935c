"""Agents that nobody of psrl wrote, unmodified, each on a session in about ten lines: a library's class, a library's tool-calling loop,
and a command."""

import asyncio
from contextlib import closing

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from psrl.agent_loops import CommandAgentLoop, SessionAgentLoop
from psrl.config.sandbox import SandboxConfig
from psrl.sandbox.build import build_sandbox


class SandboxShell(LocalEnvironment):
    """mini-swe-agent's environment, with its commands in psrl's sandbox instead of on this machine."""

    def __init__(self):
        super().__init__()
        self._loop, self._sandbox = asyncio.Runner(), build_sandbox(SandboxConfig())
        self._loop.run(self._sandbox.start())

    def execute(self, action, cwd="", *, timeout=None):
        ended = self._loop.run(self._sandbox.run(["bash", "-c", action["command"]]))
        output = {"output": (ended.stdout + ended.stderr).decode(errors="replace"), "returncode": ended.exit_code, "exception_info": ""}
        self._check_finished(output)
        return output

    def close(self):
        self._loop.run(self._sandbox.stop())
        self._loop.close()


class MiniSWEAgentLoop(SessionAgentLoop):
    """mini-swe-agent's own loop with its own model class; it blocks, so it gets a thread."""

    def run_agent(self, task, address):
        model = LitellmModel(
            model_name="openai/policy",
            model_kwargs={"api_base": address.base_url, "api_key": address.api_key},
            cost_tracking="ignore_errors",
        )
        with closing(SandboxShell()) as shell:
            agent = DefaultAgent(model, shell, system_template="You use a shell.", instance_template="{{task}}", step_limit=8)
            agent.run(task.prompt[-1].content)
        return {"calls": agent.n_calls}


class PydanticAgentLoop(SessionAgentLoop):
    """An agent of Pydantic AI with a tool of its own."""

    async def run_agent(self, task, address):
        provider = OpenAIProvider(base_url=address.base_url, api_key=address.api_key)
        agent = Agent(OpenAIChatModel("policy", provider=provider), instructions="You can add numbers.")

        @agent.tool_plain
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        answer = await agent.run(task.prompt[-1].content)
        return {"answer_characters": len(answer.output)}


class LlmCommandAgentLoop(CommandAgentLoop):
    """The `llm` command line, which reads its models from a file and runs Python functions as tools."""

    def command(self, task, address, folder):
        models = [
            {"model_id": "policy", "model_name": "policy", "api_base": address.base_url, "api_key_name": "policy", "supports_tools": True}
        ]
        (folder / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))
        (folder / "tools.py").write_text('def add(a: int, b: int) -> int:\n    "Add two numbers."\n    return a + b\n')
        question = task.prompt[-1].content
        return ["llm", "-m", "policy", "--key", address.api_key, "--functions", str(folder / "tools.py"), "--no-stream", question]

    def environment(self, task, address, folder):
        return {**super().environment(task, address, folder), "LLM_USER_PATH": str(folder), "LLM_LOAD_PLUGINS": ""}
