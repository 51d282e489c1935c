"""Finds out whether a chat template is append-only, and says where it is not.

A template is append-only if the prompt of a turn begins with the prompt of the turn before it and that turn as it was written.
Many are not: they drop earlier reasoning, or add an empty reasoning block to the last turn only. Trajectories stay append-only
all the same, since the renderer never renders a turn again; what the probe reports is where the model then reads something else
than the template would have shown it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from psrl.chat.families import ToolSupport
from psrl.chat.renderer import HfRenderer, HistoryThinking
from psrl.errors import TemplateError
from psrl.types import Message, Role, ToolCall, ToolSchema

TOOL = ToolSchema(
    name="run",
    description="Run a program.",
    parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
)
THOUGHT = "I can add these."


class Verdict(StrEnum):
    """What the template does to the conversation before new messages."""

    EXACT = "exact"
    """Nothing: the renderer's ids are the template's own, token for token."""
    REWRITES_TURN = "rewrites_turn"
    """It shows the last turn otherwise than the model wrote it."""
    REWRITES_PROMPT = "rewrites_prompt"
    """It shows something otherwise that came before the last turn."""
    REFUSED = "refused"
    """It raises an error on such a conversation."""
    DIFFERS = "differs"
    """The renderer puts other ids after the turn than the template does: training on this template would be wrong."""


class ReasoningPolicy(StrEnum):
    """What the template does with reasoning that a message carries apart from its content."""

    NOT_WRITTEN = "not_written"
    KEPT = "kept"
    DROPPED_BEFORE_USER = "dropped_before_user"
    """Kept while tools answer, dropped once a user message follows."""
    DROPPED = "dropped"
    """Kept in the last turn only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """A kind of place between a turn and the messages that follow it."""

    followers: tuple[Role, ...]
    has_call: bool = False
    """The turn before it asks for a tool."""
    has_reasoning: bool = False
    """The turn before it carries reasoning."""
    is_after_tool_use: bool = False
    """The turn before it answers with what a tool said, after a call with the same reasoning or none."""

    def __str__(self) -> str:
        """Words for a report, such as `tool, tool after a call with reasoning`."""
        turn = "a call" if self.has_call else "an answer"
        reasoning = " with reasoning" if self.has_reasoning else ""
        use = " after tool use" if self.is_after_tool_use else ""
        return f"{', '.join(self.followers)} after {turn}{reasoning}{use}"


BOUNDARIES = tuple(
    Boundary(followers=followers, has_call=has_call, has_reasoning=has_reasoning, is_after_tool_use=is_after_tool_use)
    for followers, has_call, is_after_tool_use in (
        ((Role.USER,), False, False),
        ((Role.USER, Role.USER), False, False),
        ((Role.SYSTEM, Role.USER), False, False),
        ((Role.TOOL,), True, False),
        ((Role.TOOL, Role.TOOL), True, False),
        ((Role.TOOL, Role.USER), True, False),
        ((Role.USER,), False, True),
    )
    for has_reasoning in (False, True)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeCase:
    """What happened at one kind of boundary."""

    boundary: Boundary
    verdict: Verdict
    detail: str
    """Empty when exact; else what the template shows instead, or its error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """What a tokenizer folder does to token truth."""

    family: str
    end_of_turn: str
    separator: str
    header: str
    opens_reasoning: bool
    stop_token_ids: tuple[int, ...]
    stop_tokens: tuple[str, ...]
    tool_support: ToolSupport
    adaptations: tuple[str, ...]
    """What the renderer changes in messages since the template cannot take them as they are."""
    reasoning: ReasoningPolicy
    history_thinking: HistoryThinking
    cases: tuple[ProbeCase, ...]

    @property
    def is_append_only(self) -> bool:
        """Whether no kind of boundary that the template accepts changes what came before it."""
        return all(case.verdict in (Verdict.EXACT, Verdict.REFUSED) for case in self.cases)

    @property
    def faults(self) -> tuple[ProbeCase, ...]:
        """Cases in which the renderer itself is wrong; a run must not start with any."""
        return tuple(case for case in self.cases if case.verdict is Verdict.DIFFERS)

    def case(self, boundary: Boundary) -> ProbeCase:
        """The case of one of `BOUNDARIES`."""
        return next(case for case in self.cases if case.boundary == boundary)

    def lines(self) -> list[str]:
        """The report for people, one finding a line."""
        stops = ", ".join(f"{token} ({token_id})" for token, token_id in zip(self.stop_tokens, self.stop_token_ids, strict=True))
        tools = {
            ToolSupport.TEMPLATE: "written by the chat template",
            ToolSupport.PLAIN_TEXT: "unknown to the chat template: described in the system message, answered as user messages",
        }
        reasoning = {
            ReasoningPolicy.NOT_WRITTEN: "the template does not write it",
            ReasoningPolicy.KEPT: "kept by the template",
            ReasoningPolicy.DROPPED_BEFORE_USER: "dropped by the template once a user message follows",
            ReasoningPolicy.DROPPED: "dropped by the template",
        }
        handled = {
            HistoryThinking.KEEP: "trajectories keep it (history_thinking=keep)",
            HistoryThinking.STRIP: "a new branch begins there (history_thinking=strip)",
        }
        is_dropped = self.reasoning in (ReasoningPolicy.DROPPED_BEFORE_USER, ReasoningPolicy.DROPPED)
        found = [
            f"family: {self.family}; a turn ends with {self.end_of_turn!r}, then {self.separator!r}; header {self.header!r}",
            f"stop tokens: {stops}",
            f"tools: {tools[self.tool_support]}",
            *self.adaptations,
            f"reasoning of earlier turns: {reasoning[self.reasoning]}" + (f"; {handled[self.history_thinking]}" if is_dropped else ""),
            f"append-only: {'yes' if self.is_append_only else 'no; trajectories are all the same, as sampled'}",
        ]
        return found + [f"  {case.boundary}: {case.verdict}: {case.detail}" for case in self.cases if case.verdict is not Verdict.EXACT]


def probe(renderer: HfRenderer) -> ProbeReport:
    """Try every kind of boundary on the renderer's template; a fraction of a second, no model needed."""
    family = renderer.family
    return ProbeReport(
        family=family.name,
        end_of_turn=family.end_of_turn,
        separator=family.separator,
        header=family.header,
        opens_reasoning=family.opens_reasoning,
        stop_token_ids=renderer.stop_token_ids,
        stop_tokens=tuple(renderer.decode([token_id]) for token_id in renderer.stop_token_ids),
        tool_support=family.tool_support,
        adaptations=family.adaptations,
        reasoning=_reasoning_policy(renderer),
        history_thinking=renderer.history_thinking,
        cases=tuple(_try(renderer, boundary) for boundary in BOUNDARIES),
    )


def _reasoning_policy(renderer: HfRenderer) -> ReasoningPolicy:
    history, _ = _conversation(Boundary(followers=(), has_reasoning=True))
    if THOUGHT not in renderer.prompt_text(history, (), header=False):
        return ReasoningPolicy.NOT_WRITTEN
    dropped = renderer.family.drops_reasoning_before
    if not dropped:
        return ReasoningPolicy.KEPT
    return ReasoningPolicy.DROPPED if Role.TOOL in dropped else ReasoningPolicy.DROPPED_BEFORE_USER


def _try(renderer: HfRenderer, boundary: Boundary) -> ProbeCase:
    history, following = _conversation(boundary)
    try:
        verdict, detail = _judge(renderer, history, following)
    except TemplateError as error:
        verdict, detail = Verdict.REFUSED, str(error)
    return ProbeCase(boundary=boundary, verdict=verdict, detail=detail)


def _judge(renderer: HfRenderer, history: Sequence[Message], following: Sequence[Message]) -> tuple[Verdict, str]:
    """Compare the template's rendering of everything with what the model had before it, and then with the renderer."""
    prompt = renderer.prompt_text(history[:-1], [TOOL])
    turn_end = renderer.prompt_text(history, [TOOL], header=False)
    everything = renderer.prompt_text([*history, *following], [TOOL])
    sampled = renderer.template.encode(turn_end.removesuffix(renderer.family.separator))
    is_closed = sampled[-1] in (*renderer.stop_token_ids, renderer.family.closer_id)
    added = renderer.following(sampled[-1] if is_closed else renderer.stop_token_ids[0], following)
    expected = renderer.template.encode(everything)
    if expected[len(expected) - len(added) :] != added:
        return Verdict.DIFFERS, _first_difference(everything[-len(renderer.decode(added)) :], renderer.decode(added))
    if not everything.startswith(prompt):
        return Verdict.REWRITES_PROMPT, _first_difference(prompt, everything)
    if not turn_end.startswith(prompt):
        return Verdict.REWRITES_TURN, _first_difference(prompt, turn_end)
    if not everything.startswith(turn_end):
        return Verdict.REWRITES_TURN, _first_difference(turn_end, everything)
    if not is_closed:
        return Verdict.REWRITES_TURN, f"the template leaves out the end of the turn: {turn_end[-30:]!r}"
    if [*sampled, *added] != expected:
        return Verdict.DIFFERS, _first_difference(everything, renderer.decode([*sampled, *added]))
    return Verdict.EXACT, ""


def _first_difference(before: str, after: str) -> str:
    """Where two renderings part, with a little of both."""
    position = next((index for index, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    return f"{before[position : position + 30]!r} becomes {after[position : position + 30]!r}"


def _conversation(boundary: Boundary) -> tuple[list[Message], list[Message]]:
    """(messages that end with the turn before the boundary, messages after it)."""
    reasoning = THOUGHT if boundary.has_reasoning else None
    num_answers = max(1, boundary.followers.count(Role.TOOL))
    calls = tuple(ToolCall(id=f"call-0-{i}", name=TOOL.name, arguments={"code": f"print({i})"}) for i in range(num_answers))
    history = [Message(role=Role.SYSTEM, content="Be brief."), Message(role=Role.USER, content="What is 2 + 3?")]
    if boundary.is_after_tool_use:
        history.append(Message(role=Role.ASSISTANT, tool_calls=calls, reasoning=reasoning))
        history.append(Message(role=Role.TOOL, content="5", tool_call_id="call-0-0", name=TOOL.name))
    if boundary.has_call:
        history.append(Message(role=Role.ASSISTANT, tool_calls=calls, reasoning=reasoning))
    else:
        history.append(Message(role=Role.ASSISTANT, content="It is 5.", reasoning=reasoning))
    following = [
        Message(role=role, content=f"{index}", tool_call_id=f"call-0-{index}", name=TOOL.name)
        if role is Role.TOOL
        else Message(role=role, content="And 3 + 4?")
        for index, role in enumerate(boundary.followers)
    ]
    return history, following
