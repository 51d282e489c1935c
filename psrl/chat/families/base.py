"""What a chat template puts around turns, found by rendering tiny conversations.

Nothing here is a table per model: the end of a turn, the separator after it, the assistant's header and how tools are treated
are read off the template's own output.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from psrl.chat.families import chatml, llama
from psrl.chat.template import ChatTemplate
from psrl.errors import TemplateError
from psrl.types import Message, Role, ToolCall, ToolSchema

QUESTION = Message(role=Role.USER, content="psrlQuestion")
ANSWER = "psrlAnswer"
THOUGHT = "psrlThought"
PROBE_TOOL = ToolSchema(name="psrlTool", description="psrlTool", parameters={"type": "object", "properties": {}})
CALL = Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id="call-0-0", name="psrlTool", arguments={"text": ANSWER}),))
KNOWN: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("chatml", chatml.END_OF_TURN, chatml.OTHER_STOPS),
    ("llama", llama.END_OF_TURN, llama.OTHER_STOPS),
)


class ToolSupport(StrEnum):
    """Who puts tools into the prompt."""

    TEMPLATE = "template"
    """The chat template shows tools, or treats tool messages in its own way."""
    PLAIN_TEXT = "plain_text"
    """The template knows nothing of tools: see `families.plain`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """A short conversation that ends with an assistant's turn: what a template writes after it is rendered against it."""

    messages: tuple[Message, ...]
    num_markers: int
    """How often the turn's marker stands in its rendering."""
    tail: str
    """What is rendered after the last marker: the rest of the turn, its end and the separator."""

    def text_after(self, rendered: str) -> str:
        """The part of a longer rendering after this conversation's last marker.

        Example:
            "<|im_start|>assistant\\npsrlAnswer<|im_end|>\\n<|im_start|>user..." -> "<|im_end|>\\n<|im_start|>user...".
        """
        position = 0
        for _ in range(self.num_markers):
            found = rendered.find(ANSWER, position)
            if found < 0:
                raise TemplateError("the chat template leaves out an earlier assistant turn when messages follow it")
            position = found + len(ANSWER)
        return rendered[position:]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What a template puts between and around turns."""

    name: str
    """`chatml`, `llama` or `other`."""
    end_of_turn: str
    """What closes an assistant's turn, such as `<|im_end|>`; empty where no special token does."""
    end_of_turn_id: int | None
    separator: str
    """What stands between the end of a turn and the next message; the policy never samples it."""
    header: str
    """Beginning of the assistant's turn, written by the template."""
    other_stops: tuple[int, ...]
    """Further ids that end a turn in this family, where the vocabulary holds them."""
    tool_support: ToolSupport
    drops_reasoning_before: frozenset[Role]
    """Earlier reasoning is left out of the prompt once a message of such a role follows it."""
    plain: Anchor
    after_call: Anchor | None
    """Anchor for tool messages; None where the template does not write calls."""

    @property
    def opens_reasoning(self) -> bool:
        """Whether the header already opens the reasoning."""
        return self.header.rstrip().endswith("<think>")


def derive_family(template: ChatTemplate) -> Family:
    """Read a family off a template.

    Raises:
        TemplateError: The template cannot render a user's question with an assistant's answer.
    """
    plain = _anchor(template, (QUESTION, Message(role=Role.ASSISTANT, content=ANSWER)))
    if plain is None:
        raise TemplateError("the chat template does not write the content of an assistant's turn")
    end_of_turn, end_of_turn_id = _closer(template, plain.tail)
    without_header = template.text(plain.messages, header=False)
    with_header = template.text(plain.messages, header=True)
    if not with_header.startswith(without_header):
        raise TemplateError("the chat template writes the assistant's header elsewhere than at the end")
    name = "other"
    other_stops: tuple[str, ...] = ()
    for known, token, stops in KNOWN:
        if token in end_of_turn:
            name, other_stops = known, stops
    other_ids = (template.token_id(token) for token in other_stops)
    return Family(
        name=name,
        end_of_turn=end_of_turn,
        end_of_turn_id=end_of_turn_id,
        separator=plain.tail[len(end_of_turn) :],
        header=with_header[len(without_header) :],
        other_stops=tuple(token_id for token_id in other_ids if token_id is not None),
        tool_support=_tool_support(template),
        drops_reasoning_before=_drops_reasoning_before(template),
        plain=plain,
        after_call=_anchor(template, (QUESTION, CALL)),
    )


def _anchor(template: ChatTemplate, messages: tuple[Message, ...]) -> Anchor | None:
    """None where the template refuses these messages or does not write the marker."""
    try:
        rendered = template.text(messages, header=False)
    except TemplateError:
        return None
    if ANSWER not in rendered:
        return None
    return Anchor(messages=messages, num_markers=rendered.count(ANSWER), tail=rendered[rendered.rfind(ANSWER) + len(ANSWER) :])


def _closer(template: ChatTemplate, tail: str) -> tuple[str, int | None]:
    """(text, id) through the first special token of what follows an assistant's turn."""
    ids = template.encode(tail)
    for position, token_id in enumerate(ids):
        if token_id in template.special_ids:
            return template.decode(ids[: position + 1]), token_id
    return "", None


def _tool_support(template: ChatTemplate) -> ToolSupport:
    """A template knows tools if it shows them, or if it writes the role `tool` unlike a role that it cannot know."""
    try:
        shows_tools = PROBE_TOOL.name in template.text([QUESTION], [PROBE_TOOL], header=True)
    except TemplateError:
        shows_tools = False
    if shows_tools:
        return ToolSupport.TEMPLATE
    as_tool = _text_of_role(template, "tool")
    as_unknown = _text_of_role(template, "psrlRole")
    is_treated = ANSWER in as_tool and as_tool.replace("tool", "psrlRole") != as_unknown
    return ToolSupport.TEMPLATE if is_treated else ToolSupport.PLAIN_TEXT


def _text_of_role(template: ChatTemplate, role: str) -> str:
    """Rendering of an answered question followed by a message of `role`; empty where the template refuses it."""
    history = [QUESTION.to_template(), {"role": "assistant", "content": "psrlReply"}, {"role": role, "content": ANSWER}]
    try:
        return template.text(history, header=True)
    except TemplateError:
        return ""


def _drops_reasoning_before(template: ChatTemplate) -> frozenset[Role]:
    """Roles whose messages make the template leave out the reasoning of the turn before them."""
    dropped = set()
    for role, said in ((Role.USER, Message(role=Role.ASSISTANT, content=ANSWER, reasoning=THOUGHT)), (Role.TOOL, _thoughtful_call())):
        follower = Message(role=role, content="psrlFollower", tool_call_id="call-0-0" if role is Role.TOOL else None)
        try:
            is_kept = THOUGHT in template.text([QUESTION, said, follower], header=True)
        except TemplateError:
            is_kept = False
        if not is_kept:
            dropped.add(role)
    return frozenset(dropped)


def _thoughtful_call() -> Message:
    return Message(role=Role.ASSISTANT, tool_calls=CALL.tool_calls, reasoning=THOUGHT)
