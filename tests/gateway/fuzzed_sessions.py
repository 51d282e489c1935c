"""Sessions of random agents against a random policy, with a record of what the engine saw.

The agent speaks OpenAI's JSON, as a client does: it sends back what it was given, and now and then edits, drops, retries or begins anew.
The policy writes words, calls (whole, broken, parallel), reasoning, any token of the vocabulary, or is cut.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import orjson

from psrl.errors import SessionRequestError
from psrl.gateway.sessions import Session
from psrl.gateway.turns import TurnTaker
from psrl.types import FinishReason, Generation, SessionId
from tests.gateway.gateway_kit import session_spec

WORDS = ["add", " 5", "\n", "naïve", "日本語", "🙂", "a\u0301", "\t", "{}", '"', "\\n", "<b>", "x = 1\n", "é", "​", "  ", "end.", "0.5", "−"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} something",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
    for name in ("run", "search_web")
]


@dataclass
class RecordingPolicy:
    """An engine that draws turns and keeps every request it saw. Implements `protocols.Generator`."""

    renderer: object
    draw: random.Random
    vocab_size: int
    write_call: object
    seen: list[tuple[list[int], Generation]] = field(default_factory=list)

    async def generate(self, request):
        if self.draw.random() < 0.1:
            await asyncio.sleep(0)
        ids = self.turn_ids()
        reason = FinishReason.STOP
        if len(ids) > 2 and self.draw.random() < 0.05:
            ids, reason = ids[: self.draw.randrange(1, len(ids) - 1)], FinishReason.ABORT
        elif self.draw.random() < 0.08 or len(ids) > request.sampling.max_tokens:
            ids, reason = ids[: max(1, min(len(ids) - 1, request.sampling.max_tokens))], FinishReason.LENGTH
        first_version = self.draw.randrange(3)
        versions = [first_version + (2 * index > len(ids)) for index in range(len(ids))]
        generation = Generation(
            token_ids=ids,
            logprobs=[-self.draw.random() for _ in ids],
            policy_versions=versions,
            finish_reason=reason,
            prompt_tokens=len(request.token_ids),
            cached_tokens=0,
            latency_s=0.0,
        )
        self.seen.append((list(request.token_ids), generation))
        return generation

    def turn_ids(self):
        draw = self.draw
        kind = draw.random()
        if kind < 0.25:
            body = [draw.randrange(self.vocab_size) for _ in range(draw.randrange(0, 12))]
            body = [token for token in body if token not in self.renderer.stop_token_ids]
        else:
            text = self.thought() if draw.random() < 0.4 else ""
            text += "".join(draw.choice(WORDS) for _ in range(draw.randrange(0, 8)))
            for _ in range(draw.choice((0, 0, 1, 1, 2, 3))):
                text += self.call()
            body = self.renderer.template.encode(text)
        return [*body, draw.choice(self.renderer.stop_token_ids)]

    def thought(self):
        words = "".join(self.draw.choice(WORDS) for _ in range(self.draw.randrange(0, 6)))
        return f"<think>\n{words}\n</think>\n\n"

    def call(self):
        name = self.draw.choice(("run", "search_web", "nothing"))
        code = "".join(self.draw.choice(WORDS) for _ in range(self.draw.randrange(0, 6)))
        text = self.write_call(name, {"code": code, "n": self.draw.randrange(9)})
        return text[: self.draw.randrange(len(text))] if self.draw.random() < 0.1 else text


class FuzzedAgent:
    """One agent with its own session; may run several conversations in it."""

    def __init__(self, draw, dialect, taker, session):
        self.draw, self.dialect, self.taker, self.session = draw, dialect, taker, session
        self.num_refused = 0

    def text(self):
        return "".join(self.draw.choice(WORDS) for _ in range(self.draw.randrange(0, 6)))

    def first_messages(self):
        messages = [{"role": "user", "content": self.text() or "hi"}]
        if self.draw.random() < 0.6:
            messages.insert(0, {"role": "system", "content": self.text() or "Be brief."})
        return messages

    async def converse(self, num_turns):
        messages = self.first_messages()
        tools = TOOLS if self.draw.random() < 0.7 else None
        for _ in range(num_turns):
            body = {"model": "m", "messages": messages, "temperature": self.draw.choice((1.0, 0.3))}
            if tools:
                body["tools"] = tools
            if self.draw.random() < 0.1:
                body["stop"] = [self.draw.choice((" 5", "end.", "}"))]
            answer = await self.ask(body)
            if answer is None:
                return
            if self.draw.random() < 0.07:
                answer = await self.ask(body) or answer  # the same again
            messages = self.next_messages(messages, answer)
            if self.draw.random() < 0.05:
                tools = None if tools else TOOLS

    async def ask(self, body):
        """The assistant's message; None where the session has no room left or the template can't write the conversation."""
        try:
            read_before = self.session.read_before[self.dialect.path]
            request = self.dialect.read_request(orjson.loads(orjson.dumps(body)), history=lambda _: [], read_before=read_before)
            placed = await self.taker.place(self.session, request)
            turn = await self.taker.take(self.session, request, placed)
        except SessionRequestError as error:
            if error.code not in ("template", "context_length_exceeded"):
                raise
            self.num_refused += 1
            return None
        return orjson.loads(orjson.dumps(self.dialect.write_answer(turn, request)))["choices"][0]["message"]

    def next_messages(self, messages, answer):
        draw = self.draw
        echo = dict(answer)
        if draw.random() < 0.5:
            echo.pop("reasoning_content", None)
        if draw.random() < 0.2:
            echo = {key: value for key, value in echo.items() if value is not None}
        messages = [*messages, echo]
        for call in answer.get("tool_calls") or []:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": self.text()})
        if messages[-1] is echo or draw.random() < 0.1:
            messages.append({"role": "user", "content": self.text() or "go on"})
        fate = draw.random()
        if fate < 0.05:  # compaction
            return [*self.first_messages()[:-1], {"role": "user", "content": f"So far: {self.text()}"}]
        if fate < 0.10:  # an earlier message is rewritten
            edited = draw.randrange(len(messages) - 1)
            messages[edited] = {**messages[edited], "content": self.text() or "edited"}
        return messages


async def play_session(renderer, dialect, write_call, *, seed, vocab_size):
    """One session; returns (session, policy)."""
    draw = random.Random(seed)
    policy = RecordingPolicy(renderer, draw, vocab_size, write_call)
    session = Session(SessionId(f"s{seed}"), session_spec(f"train-0-{seed:06d}-e0", seed=seed), renderer)
    agent = FuzzedAgent(draw, dialect, TurnTaker(renderer, policy), session)
    if draw.random() < 0.15:
        await asyncio.gather(*(agent.converse(draw.randrange(1, 4)) for _ in range(2)))
    else:
        await agent.converse(draw.randrange(1, 6))
    return session, policy


def check_exact(session, policy):
    """What was captured is what the engine saw; each sampled token is trained on once, as it was sampled."""
    turns = session.tree.turns
    assert len(turns) <= len(policy.seen)
    record = session.record()
    for turn in turns:
        context = [token for one in turn.path() for part in (one.observation_ids, one.generation.token_ids) for token in part]
        prompt = context[: len(context) - len(turn.generation.token_ids)]
        ids = turn.generation.token_ids
        assert is_what_was_sampled(policy.seen, prompt, ids), f"turn {turn.ordinal} is not what the engine saw"
    assert len(record.trajectories) == len(session.tree.leaves())
    for trajectory, leaf in zip(record.trajectories, session.tree.leaves(), strict=True):
        context = [token for one in leaf.path() for part in (one.observation_ids, one.generation.token_ids) for token in part]
        assert trajectory.ids() == context
        mask = trajectory.loss_mask()
        assert sum(mask) == trajectory.num_sampled > 0
    trained = sorted(
        (tuple(step.sampled_ids), tuple(step.logprobs), tuple(step.policy_versions)) for one in record.trajectories for step in one.steps
    )
    sampled = sorted((tuple(t.generation.token_ids), tuple(t.generation.logprobs), tuple(t.generation.policy_versions)) for t in turns)
    assert trained == sampled
    return len(turns), len(record.trajectories)


def is_what_was_sampled(seen, prompt, ids):
    """Whether the engine was asked with `prompt` and gave `ids`: at once (perhaps with more, after a stop text), or in parts."""
    for saw, generation in seen:
        part = generation.token_ids
        if saw == prompt and part[: len(ids)] == ids:
            return True
        is_part = saw == prompt and generation.finish_reason is FinishReason.ABORT and ids[: len(part)] == part
        if is_part and is_what_was_sampled(seen, prompt + part, ids[len(part) :]):
            return True
    return False


def num_continued(session):
    """How many turns continue another one of the session."""
    return sum(turn.parent is not None for turn in session.tree.turns)


def play_many(renderer, dialect, write_call, *, seeds, vocab_size):
    """Many sessions; returns how many (sessions, turns, leaves, continued turns)."""

    async def play():
        totals = [0, 0, 0, 0]
        for seed in seeds:
            session, policy = await play_session(renderer, dialect, write_call, seed=seed, vocab_size=vocab_size)
            num_turns, num_leaves = check_exact(session, policy) if policy.seen else (0, 0)
            totals = [a + b for a, b in zip(totals, (1, num_turns, num_leaves, num_continued(session)), strict=True)]
        return totals

    return asyncio.run(play())
