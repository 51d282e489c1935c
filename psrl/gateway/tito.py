"""Tokens in, tokens out: a session as a tree of turns, each with the tokens that it added.

Invariant: the context of a turn is the concatenation of `observation_ids` and `sampled_ids` on the path to it, exactly as the engine
saw it. A sampled id enters as it came and is never encoded again; only messages that the policy did not write are encoded.

A request continues the turn whose conversation it extends. What extends none (an earlier message was rewritten, the history was
compacted, a sub-agent began, the tools changed) opens a branch: from the last turn that is unchanged, or anew. Assistant messages that
the agent wrote itself are context: they have no sampled ids, so they are never trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from psrl.errors import TemplateError
from psrl.protocols import Renderer
from psrl.types import EpisodeUid, Generation, Message, Role, Step, ToolSchema, Trajectory, TrajectoryUid


@dataclass(eq=False, kw_only=True, slots=True)
class Turn:
    """A captured turn: what came since its parent, and what was sampled."""

    ordinal: int
    """Position among the session's captured turns."""
    id: str
    """As the agent was told."""
    parent: Turn | None
    tools: tuple[ToolSchema, ...]
    prompt: tuple[Message, ...]
    """Messages between the parent's answer and this turn; the whole conversation where there is no parent."""
    answer: Message
    """What the agent was given."""
    text: str
    """The decoded turn, for people."""
    observation_ids: list[int]  # [O]
    generation: Generation
    temperature: float
    num_messages: int
    """Of the conversation through `answer`."""
    num_tokens: int
    """Of the context through the sampled ids."""
    num_first_prompt: int
    """Tokens before the first turn of this branch."""
    children: list[Turn] = field(default_factory=list)

    def path(self) -> list[Turn]:
        """From the first turn of the branch to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def conversation(self) -> list[Message]:
        """Every message through the answer, answers as the policy gave them (with their reasoning)."""
        return [message for turn in self.path() for message in (*turn.prompt, turn.answer)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """Where a request stands in the tree, before its turn is sampled."""

    parent: Turn | None
    tools: tuple[ToolSchema, ...]
    messages: tuple[Message, ...]
    """The whole request."""
    prompt: tuple[Message, ...]
    """What of it came since the parent's answer."""
    observation_ids: list[int]  # [O]
    context_ids: list[int]  # [P]
    num_first_prompt: int


class SessionTree:
    """The turns of one session. Not safe for threads but for `place`, which changes nothing."""

    def __init__(self, renderer: Renderer) -> None:
        """The renderer is shared."""
        self._renderer = renderer
        self._turns: list[Turn] = []
        self._first_turns: dict[bytes, list[Turn]] = {}
        self._newest: tuple[Branch, Turn, list[int]] | None = None
        """The turn captured last, with its branch and the ids through it: what most requests continue, found without a search."""

    @property
    def turns(self) -> Sequence[Turn]:
        """All turns, in the order in which they were captured."""
        return self._turns

    def continued_by(self, messages: tuple[Message, ...], tools: tuple[ToolSchema, ...]) -> Turn | None:
        """The turn with the longest conversation that `messages` extend by at least one; of several, the newest. None: they begin anew."""
        return self._newest_unchanged(messages, tools) or self._last_unchanged(messages, tools)

    def place(self, messages: tuple[Message, ...], tools: tuple[ToolSchema, ...], known: Turn | None) -> Branch:
        """Render what is new of a request after `known`, the turn that it continues. Its cost is that of the new messages.

        Raises:
            TemplateError: The template refuses the conversation.
        """
        if known is None:
            return self._anew(messages, tools)
        following = messages[known.num_messages :]
        conversation = known.conversation()
        if self._renderer.begins_branch(conversation, following):
            return self._anew(messages, tools, shown=(*conversation, *following))
        sampled = known.generation.token_ids
        try:
            observation_ids = self._renderer.following(sampled[-1] if sampled else None, following)
        except TemplateError:
            if all(message.role is not Role.ASSISTANT for message in following):
                raise
            return self._anew(messages, tools)  # the template can't continue with a message that the agent wrote itself
        return Branch(
            parent=known,
            tools=tools,
            messages=messages,
            prompt=following,
            observation_ids=observation_ids,
            context_ids=self._ids_through(known) + observation_ids,
            num_first_prompt=known.num_first_prompt,
        )

    def capture(self, branch: Branch, generation: Generation, *, id: str, answer: Message, text: str, temperature: float) -> Turn:
        """Add the turn that was sampled for `branch`."""
        before = branch.parent.num_messages if branch.parent else 0
        turn = Turn(
            ordinal=len(self._turns),
            id=id,
            parent=branch.parent,
            tools=branch.tools,
            prompt=branch.prompt,
            answer=answer,
            text=text,
            observation_ids=branch.observation_ids,
            generation=generation,
            temperature=temperature,
            num_messages=before + len(branch.prompt) + 1,
            num_tokens=len(branch.context_ids) + len(generation.token_ids),
            num_first_prompt=branch.num_first_prompt,
        )
        siblings = branch.parent.children if branch.parent else self._first_turns.setdefault(_key_of(branch.tools), [])
        siblings.append(turn)
        self._turns.append(turn)
        self._newest = (branch, turn, branch.context_ids + generation.token_ids)
        return turn

    def leaves(self) -> list[Turn]:
        """Turns that none continues, in the order in which they were captured."""
        return [turn for turn in self._turns if not turn.children]

    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Of each leaf, the ordinals of the turns that lead to it."""
        return tuple(tuple(turn.ordinal for turn in leaf.path()) for leaf in self.leaves())

    def trajectories(self, uid: EpisodeUid) -> tuple[Trajectory, ...]:
        """One per leaf. A turn on several paths is sampled in the first of them and context in the others.

        Example:
            Turns A, then B and C both after A: leaf B has A and B with mask 1; leaf C has C with mask 1, and A with mask 0.
        """
        taken: set[int] = set()
        made = []
        for index, leaf in enumerate(self.leaves()):
            trajectory = Trajectory(uid=TrajectoryUid(f"{uid}-t{index}"))
            waiting: list[int] = []
            for turn in leaf.path():
                if turn.ordinal in taken:
                    waiting += [*turn.observation_ids, *turn.generation.token_ids]
                    continue
                taken.add(turn.ordinal)
                trajectory.append(_step_of(turn, [*waiting, *turn.observation_ids]))
                waiting = []
            made.append(trajectory)
        return tuple(made)

    def _anew(self, messages: tuple[Message, ...], tools: tuple[ToolSchema, ...], *, shown: tuple[Message, ...] | None = None) -> Branch:
        """A branch without a parent. `shown` is the conversation with what the agent's echoes of it left out."""
        ids = self._renderer.open(messages if shown is None else shown, tools)
        return Branch(
            parent=None,
            tools=tools,
            messages=messages,
            prompt=messages,
            observation_ids=ids,
            context_ids=ids,
            num_first_prompt=len(ids),
        )

    def _ids_through(self, turn: Turn) -> list[int]:
        newest = self._newest  # once: `place` may run in a thread while a capture replaces it
        if newest is not None and newest[1] is turn:
            return newest[2]
        ids: list[int] = []
        for one in turn.path():
            ids += one.observation_ids
            ids += one.generation.token_ids
        return ids

    def _newest_unchanged(self, messages: tuple[Message, ...], tools: tuple[ToolSchema, ...]) -> Turn | None:
        """The newest turn, if `messages` extend it by no answer of another turn: then no turn has a longer conversation."""
        newest = self._newest
        if newest is None:
            return None
        branch, turn, _ = newest
        answer_at = len(branch.messages)
        extends = (
            len(messages) > answer_at + 1
            and tools == branch.tools
            and messages[:answer_at] == branch.messages
            and says_the_same(messages[answer_at], turn.answer)
            and all(message.role is not Role.ASSISTANT for message in messages[answer_at + 1 :])
        )
        return turn if extends else None

    def _last_unchanged(self, messages: tuple[Message, ...], tools: tuple[ToolSchema, ...]) -> Turn | None:
        """The same by a search from the first turns."""
        best: Turn | None = None
        pending = [(turn, 0) for turn in self._first_turns.get(_key_of(tools), ())]
        while pending:
            turn, begin = pending.pop()
            answer_at = begin + len(turn.prompt)
            if answer_at + 1 >= len(messages) or messages[begin:answer_at] != turn.prompt:
                continue
            if not says_the_same(messages[answer_at], turn.answer):
                continue
            if best is None or (turn.num_messages, turn.ordinal) > (best.num_messages, best.ordinal):
                best = turn
            pending += [(child, answer_at + 1) for child in turn.children]
        return best


def says_the_same(echo: Message, answer: Message) -> bool:
    """Whether an assistant message that an agent sends back is the answer that it was given.

    Clients drop reasoning, trim white space and make ids of calls anew; all that leaves the answer what it was. The ids of the turn
    are those that were sampled either way.
    """
    return (
        echo.role is Role.ASSISTANT
        and echo.content.strip() == answer.content.strip()
        and [(call.name, call.arguments) for call in echo.tool_calls] == [(call.name, call.arguments) for call in answer.tool_calls]
        and (not echo.reasoning or echo.reasoning.strip() == (answer.reasoning or "").strip())
    )


def _step_of(turn: Turn, observation_ids: list[int]) -> Step:
    return Step(
        observation_ids=observation_ids,
        sampled_ids=list(turn.generation.token_ids),
        logprobs=list(turn.generation.logprobs),
        policy_versions=list(turn.generation.policy_versions),
        temperature=turn.temperature,
        finish_reason=turn.generation.finish_reason.value,
    )


def _key_of(tools: tuple[ToolSchema, ...]) -> bytes:
    return orjson.dumps([tool.to_template() for tool in tools], option=orjson.OPT_SORT_KEYS)
