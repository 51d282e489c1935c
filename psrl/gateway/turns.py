"""One turn of a session: placed in the tree, sampled by the engine, captured, and made into an answer.

Invariant: a turn is captured exactly if it was sampled whole while its session was open, and then before its answer is given out. Ids,
logprobs and versions are the engine's; parsers only say what the agent is shown of them.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from psrl.engine_client.whole_turn import whole_turn
from psrl.errors import EngineError, EngineRequestError, SessionRequestError, TemplateError
from psrl.gateway.dialects.base import ChatRequest, ChatTurn, TurnEnd
from psrl.gateway.sampling import broken_parameters, cut_at_stop
from psrl.gateway.sessions import Session, closing_error
from psrl.gateway.tito import Branch
from psrl.protocols import Generator, Renderer
from psrl.types import (
    FinishReason,
    GenerateRequest,
    Generation,
    Message,
    Outcome,
    Role,
    SamplingParams,
    ToolCall,
    ToolCallError,
    turn_priority,
    turn_seed,
)

LONG_CONTENT = 50_000
"""Characters that are new in a request, above which rendering leaves the event loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedTurn:
    """A request that may be sampled."""

    number: int
    """Of the turns that the session began, from 0; its seed derives from it."""
    branch: Branch
    max_tokens: int
    is_last: bool
    """Whether a turn of `max_tokens` has reached a limit of the session's, not one that the agent asked for."""


class TurnTaker:
    """Plays turns for all sessions of a gateway; holds no state of any."""

    def __init__(self, renderer: Renderer, generator: Generator) -> None:
        """Both are shared."""
        self._renderer = renderer
        self._generator = generator

    async def place(self, session: Session, request: ChatRequest) -> PlacedTurn:
        """Check a request against the session's contract and limits, and render what is new of it.

        Raises:
            SessionRequestError: 400, the session allows no such turn; the message says what to do.
        """
        for name in broken_parameters(request.sampling, session.spec.contract):
            session.counts[f"sampling_overrides/{name}"] += 1
        max_turns = session.spec.limits.max_turns
        if session.num_turns_granted >= max_turns:
            raise _limit(session, Outcome.MAX_TURNS, "max_turns", f"the session has had its {max_turns} turns")
        session.num_turns_granted += 1
        try:
            branch = await self._branch(session, request)
            room = _room(session, branch)
        except BaseException:
            session.num_turns_granted -= 1
            raise
        asked = request.sampling.max_tokens
        number = session.num_turns_begun
        session.num_turns_begun += 1
        return PlacedTurn(
            number=number, branch=branch, max_tokens=room if asked is None else min(room, asked), is_last=asked is None or asked >= room
        )

    async def take(self, session: Session, request: ChatRequest, placed: PlacedTurn) -> ChatTurn:
        """Sample, capture, and read the answer.

        Raises:
            SessionRequestError: 503, no engine answered; 502, the engine refused the request; 409, the session ended meanwhile.
        """
        is_captured = False
        try:
            sampled = await self._sample(session, placed)
            generation, stop_text = cut_at_stop(sampled, request.sampling.stop, self._renderer.decode)
            turn = self._capture(session, request, placed, generation, stop_text)
            is_captured = True
            return turn
        except SessionRequestError:
            raise
        except Exception as error:  # what fails here is psrl's or the engine's, and must not be judged as the agent's
            session.ran_into(Outcome.INFRA_ERROR, f"{type(error).__name__}: {error}")
            if isinstance(error, EngineRequestError):
                raise SessionRequestError(status=502, code="engine_refused", message=str(error)) from error
            if isinstance(error, EngineError):
                raise SessionRequestError(status=503, code="engine_unavailable", message=str(error)) from error
            raise
        finally:
            session.num_turns_granted -= not is_captured

    async def _branch(self, session: Session, request: ChatRequest) -> Branch:
        tree, messages, tools = session.tree, request.messages, request.tools
        known = tree.continued_by(messages, tools)
        new_characters = sum(len(message.content) for message in messages[known.num_messages if known else 0 :])
        try:
            if new_characters > LONG_CONTENT:
                return await asyncio.to_thread(tree.place, messages, tools, known)
            return tree.place(messages, tools, known)
        except TemplateError as error:
            raise SessionRequestError(status=400, code="template", message=str(error), param="messages") from error

    async def _sample(self, session: Session, placed: PlacedTurn) -> Generation:
        spec = session.spec
        contract = spec.contract
        request = GenerateRequest(
            request_id=f"{session.id}-{placed.number}",
            token_ids=placed.branch.context_ids,
            sampling=SamplingParams(
                max_tokens=placed.max_tokens,
                temperature=contract.temperature,
                top_p=contract.top_p,
                top_k=contract.top_k,
                seed=turn_seed(contract.seed, placed.number),
                stop_token_ids=self._renderer.stop_token_ids,
            ),
            session=session.id,
            priority=turn_priority(spec.admitted_version, is_validation=spec.is_validation),
        )

        def before_resume() -> None:
            session.counts["resumed_turns"] += 1
            if session.is_closing:
                raise closing_error(session.id)

        return await whole_turn(self._generator, request, before_resume=before_resume)

    def _capture(
        self, session: Session, request: ChatRequest, placed: PlacedTurn, generation: Generation, stop_text: str | None
    ) -> ChatTurn:
        parsed = self._renderer.parse(generation.token_ids, turn=placed.number, tools=placed.branch.tools)
        is_cut = generation.finish_reason is FinishReason.LENGTH
        calls = () if is_cut else tuple(call for call in parsed.calls if isinstance(call, ToolCall))
        content = parsed.content
        for call in parsed.calls:
            if isinstance(call, ToolCallError):
                session.counts[f"tool_errors/{call.cause}"] += 1
                content = "\n".join(part for part in (content, call.written) if part)
        if stop_text is not None and stop_text in content:
            content = content[: content.index(stop_text)]
        session.counts["tool_calls"] += len(calls)
        session.counts["tool_turns"] += bool(calls)
        answer = Message(role=Role.ASSISTANT, content=content, reasoning=parsed.reasoning or None, tool_calls=calls)
        turn = session.tree.capture(
            placed.branch,
            generation,
            id=f"{session.id}-{placed.number}",
            answer=answer,
            text=parsed.text,
            temperature=session.spec.contract.temperature,
        )
        session.took_turn(placed.number)
        if is_cut and placed.is_last:
            session.ran_into(Outcome.MAX_TOKENS, f"turn {placed.number} was cut at {placed.max_tokens} tokens by the session's limits")
        return ChatTurn(
            id=turn.id,
            created=int(time.time()),
            answer=answer,
            end=TurnEnd.LENGTH if is_cut else TurnEnd.TOOL_CALLS if calls else TurnEnd.STOP,
            stop_text=stop_text,
            generation=generation,
            token_texts=tuple(self._renderer.decode([token]) for token in generation.token_ids) if request.wants_logprobs else (),
        )


def _room(session: Session, branch: Branch) -> int:
    """How many tokens the turn may have; SessionRequestError where there is none left."""
    limits = session.spec.limits
    most = limits.prompt_length + limits.response_length
    num_context = len(branch.context_ids)
    if branch.parent is None and not session.tree.turns and num_context > limits.prompt_length:
        text = f"the first prompt has {num_context} tokens, this model's maximum context length for it is {limits.prompt_length}"
        raise _limit(session, Outcome.MAX_TOKENS, "context_length_exceeded", text)
    room = min(most - num_context, limits.response_length - (num_context - branch.num_first_prompt))
    if room <= 0:
        text = f"the context has {num_context} tokens, this model's maximum context length is {most}"
        raise _limit(session, Outcome.MAX_TOKENS, "context_length_exceeded", text)
    return min(room, limits.max_tokens_per_turn) if limits.max_tokens_per_turn else room


def _limit(session: Session, end: Outcome, code: str, message: str) -> SessionRequestError:
    session.ran_into(end, message)
    return SessionRequestError(status=400, code=code, message=message, param="messages")
