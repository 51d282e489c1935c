"""Small real parts for tests of episodes: a tokenizer with a ChatML template behind the real renderer, an in-process generator
that says what a script says, tools, and builders of tasks and tickets."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from psrl.chat.parsers import tool_formats
from psrl.chat.renderer import HfRenderer
from psrl.chat.template import ChatTemplate
from psrl.config.rollout import AgentConfig, MultiTurnConfig, NameConfig, RolloutConfig
from psrl.protocols import ToolResult
from psrl.recipes.tiny_tokenizer import build_tokenizer
from psrl.types import (
    EpisodeTicket,
    EpisodeUid,
    FinishReason,
    GenerateRequest,
    Generation,
    GroupUid,
    LoopResult,
    Message,
    PolicyVersion,
    Role,
    Score,
    Task,
    TaskUid,
    ToolSchema,
)

VERSION = 3
LOGPROB = -0.5


@cache
def renderer() -> HfRenderer:
    """Byte-level tokens, ChatML, Hermes calls."""
    return HfRenderer(ChatTemplate(build_tokenizer(["What is 3 + 4?"], vocab_size=512), None), tool_format=tool_formats.resolve("hermes")())


def ids_of(text: str) -> list[int]:
    """Of a turn, its end included."""
    return [*renderer().template.encode(text), renderer().stop_token_ids[0]]


@dataclass(frozen=True)
class Reply:
    """What the scripted policy says in one turn."""

    text: str
    finish_reason: FinishReason = FinishReason.STOP


Script = Callable[[GenerateRequest], Reply]


class ScriptedGenerator:
    """Keeps the Generator contract: cuts at max_tokens with `length`, ends with the stop id otherwise."""

    def __init__(self, script: Script | Sequence[str | Reply]) -> None:
        self._script = script
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        await asyncio.sleep(0)
        turn = int(request.request_id.partition("-r")[0].rpartition("-")[2])
        reply = self._script(request) if callable(self._script) else self._script[turn]
        reply = Reply(reply) if isinstance(reply, str) else reply
        ids, reason = ids_of(reply.text), reply.finish_reason
        if reason is not FinishReason.STOP:
            ids = ids[:-1]
        if len(ids) > request.sampling.max_tokens:
            ids, reason = ids[: request.sampling.max_tokens], FinishReason.LENGTH
        return Generation(
            token_ids=ids,
            logprobs=[LOGPROB] * len(ids),
            policy_versions=[VERSION] * len(ids),
            finish_reason=reason,
            prompt_tokens=len(request.token_ids),
            cached_tokens=0,
            latency_s=0.001,
        )


class EchoTool:
    """Answers with its argument `text`; records what it ran."""

    def __init__(self, name: str = "echo") -> None:
        parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        self.schema = ToolSchema(name=name, description="Says it again.", parameters=parameters)
        self.ran: list[str] = []

    async def call(self, arguments) -> ToolResult:
        if not isinstance(arguments.get("text"), str):
            return ToolResult(text="Error: text must be a string", error_cause="bad_arguments")
        self.ran.append(arguments["text"])
        return ToolResult(text=arguments["text"], queue_s=0.25, run_s=0.5)

    async def close(self) -> None:
        pass


class LastTurnScorer:
    """1 where the last turn holds the ground truth, else 0."""

    def __init__(self) -> None:
        self.scored: list[LoopResult] = []

    async def score(self, task: Task, result: LoopResult) -> Score:
        self.scored.append(result)
        solved = float(str(task.ground_truth) in result.turn_texts[-1])
        return Score(reward=solved, accuracy=solved)

    async def close(self) -> None:
        pass


def call_text(text: str, tool: str = "echo") -> str:
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {{"text": "{text}"}}}}\n</tool_call>'


def make_task(uid: str = "train-0-0", **fields) -> Task:
    prompt = (Message(role=Role.USER, content="What is 3 + 4?"),)
    return Task(**{"uid": TaskUid(uid), "prompt": prompt, "data_source": "test", "ground_truth": 7, **fields})


def make_ticket(uid: str = "train-0-0-e0", **fields) -> EpisodeTicket:
    return EpisodeTicket(
        **{"uid": EpisodeUid(uid), "group": GroupUid("train-0-0"), "admitted_version": PolicyVersion(VERSION), "seed": 5, **fields}
    )


def make_rollout(
    *, loop: str = "multi_turn_agent", env: str | None = None, data: str | None = None, max_turns: int = 8, agent=None, turns=None, **fields
) -> RolloutConfig:
    """Many turns, a thousand tokens, unless said otherwise."""
    return RolloutConfig(
        **{
            "prompt_length": 1000,
            "response_length": 1000,
            "multi_turn": MultiTurnConfig(enable=True, max_turns=max_turns, **(turns or {})),
            "agent": AgentConfig(default_agent_loop=loop, env=NameConfig(name=env), data=NameConfig(name=data), **(agent or {})),
            **fields,
        }
    )
