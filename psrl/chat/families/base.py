"""What a chat template puts around turns, found by rendering tiny conversations.

Nothing here is a table per model: the end of a turn, the separator after it, the assistant's header and how tools are treated
are read off the template's own output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from psrl.chat.families import chatml, gemma, harmony, llama
from psrl.chat.template import ChatTemplate
from psrl.errors import TemplateError
from psrl.types import Message, Role, ToolCall, ToolSchema

INSTRUCTION = Message(role=Role.SYSTEM, content="psrlInstruction")
QUESTION = Message(role=Role.USER, content="psrlQuestion")
ANSWER = "psrlAnswer"
UNNAMED_TOOL = "unknown"
"""What answers a call that named no tool, in templates that write the name beside the answer."""
THOUGHT = "psrlThought"
PROBE_TOOL = ToolSchema(name="psrlTool", description="psrlTool", parameters={"type": "object", "properties": {}})
CALL = Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id="call-0-0", name="psrlTool", arguments={"text": ANSWER}),))
KNOWN: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("chatml", chatml.END_OF_TURN, chatml.OTHER_STOPS),
    ("llama", llama.END_OF_TURN, llama.OTHER_STOPS),
    ("gemma", gemma.END_OF_TURN, gemma.OTHER_STOPS),
    ("harmony", harmony.END_OF_TURN, harmony.OTHER_STOPS),
)


class ToolSupport(StrEnum):
    """Who puts tools into the prompt."""

    TEMPLATE = "template"
    """The chat template shows tools, or treats tool messages in its own way."""
    PLAIN_TEXT = "plain_text"
    """The template knows nothing of tools: see `families.plain`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """A short conversation that ends with an assistant's turn: what a template writes after it is read off against it."""

    messages: tuple[Message, ...]
    num_markers: int
    """How often the turn's marker stands in its rendering."""
    tail: str
    """What is rendered after the last marker: the rest of the turn, its end and the separator."""

    def answered_by(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The conversation and `messages`, its call named like the tool that answers: some templates write that name again."""
        first = messages[0]
        turn = self.messages[-1]
        calls = tuple(replace(call, id=first.tool_call_id or call.id, name=first.name or UNNAMED_TOOL) for call in turn.tool_calls)
        return (*self.messages[:-1], replace(turn, tool_calls=calls), *messages)

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
    """`chatml`, `llama`, `gemma`, `harmony` or `other`."""
    end_of_turn: str
    """What closes an assistant's turn, such as `<|im_end|>`; empty where no special token does."""
    end_of_turn_id: int | None
    closer: str
    """What closes a turn once messages follow it: the same, but for GPT-OSS, whose `<|return|>` becomes `<|end|>`."""
    closer_id: int | None
    separator: str
    """What stands between the end of a turn and the next message; the policy never samples it."""
    header: str
    """Beginning of the assistant's turn, written by the template."""
    other_stops: tuple[int, ...]
    """Further ids that end a turn in this family, where the vocabulary holds them."""
    tool_support: ToolSupport
    must_alternate: bool
    """The template refuses two user messages in a row: see `families.shape`."""
    takes_system: bool
    """A conversation may begin with a system message."""
    takes_later_system: bool
    """A system message later in the conversation is shown, or refused with an error; false where it would be lost or break the turns."""
    takes_one_text_per_call: bool
    """The template refuses a call beside which both reasoning and content stand."""
    drops_reasoning_before: frozenset[Role]
    """Earlier reasoning is left out of the prompt once a message of such a role follows it."""
    plain: Anchor
    after_call: Anchor | None
    """Anchor for tool messages; None where the template does not write calls."""

    @property
    def opens_reasoning(self) -> bool:
        """Whether the header already opens the reasoning."""
        return self.header.rstrip().endswith("<think>")

    @property
    def adaptations(self) -> tuple[str, ...]:
        """What is changed in messages for this template, in words; see `families.shape`."""
        found = []
        if self.closer != self.end_of_turn:
            found.append(f"past turns: the template ends them with {self.closer!r}; sampled ones keep what was sampled")
        if self.must_alternate:
            found.append("roles must alternate: user messages side by side are joined to one")
        if not self.takes_system:
            found.append("system messages: refused by the template, shown as the user's")
        elif not self.takes_later_system:
            found.append("system messages after the start: not shown by the template, therefore shown as the user's")
        if self.takes_one_text_per_call:
            found.append("text beside a call: part of its reasoning, since the template takes one of the two")
        return tuple(found)


def derive_family(template: ChatTemplate) -> Family:
    """Read a family off a template.

    Raises:
        TemplateError: The template cannot render a user's question with an assistant's answer.
    """
    plain = _anchor(template, (QUESTION, Message(role=Role.ASSISTANT, content=ANSWER)))
    if plain is None:
        raise TemplateError("the chat template does not write the content of an assistant's turn")
    end_of_turn, end_of_turn_id = _closer(template, plain.tail)
    closer, closer_id = _closer(template, plain.text_after(template.text([*plain.messages, QUESTION], header=True)))
    without_header = template.text([QUESTION], header=False)
    with_header = template.text([QUESTION], header=True)
    if not with_header.startswith(without_header):
        raise TemplateError("the chat template writes the assistant's header elsewhere than at the end")
    name = "other"
    other_stops: tuple[str, ...] = ()
    for known, token, stops in KNOWN:
        if token in end_of_turn:
            name, other_stops = known, stops
    other_ids = (template.token_id(token) for token in other_stops)
    after_call = _anchor(template, (QUESTION, CALL))
    thoughtful = replace(CALL, reasoning=THOUGHT)
    must_alternate = not _renders(template, [QUESTION, QUESTION])
    later_system = [*plain.messages, INSTRUCTION, QUESTION]
    return Family(
        name=name,
        end_of_turn=end_of_turn,
        end_of_turn_id=end_of_turn_id,
        closer=closer,
        closer_id=closer_id,
        separator=plain.tail[len(end_of_turn) :],
        header=with_header[len(without_header) :],
        other_stops=tuple(token_id for token_id in other_ids if token_id is not None),
        tool_support=_tool_support(template),
        must_alternate=must_alternate,
        takes_system=_accepts(template, [INSTRUCTION, QUESTION]),
        takes_later_system=not must_alternate and (_accepts(template, later_system) or not _renders(template, later_system)),
        takes_one_text_per_call=after_call is not None and not _renders(template, [QUESTION, replace(thoughtful, content="psrlReply")]),
        drops_reasoning_before=_drops_reasoning_before(template, thoughtful),
        plain=plain,
        after_call=after_call,
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
        if token_id in template.added_tokens:
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


def _renders(template: ChatTemplate, messages: Sequence[Message]) -> bool:
    """Whether the template takes these messages without an error."""
    try:
        template.text(messages, header=True)
    except TemplateError:
        return False
    return True


def _accepts(template: ChatTemplate, messages: Sequence[Message]) -> bool:
    """Whether it takes them and shows all their contents."""
    if not _renders(template, messages):
        return False
    rendered = template.text(messages, header=True)
    return all(message.content in rendered for message in messages)


def _drops_reasoning_before(template: ChatTemplate, thoughtful_call: Message) -> frozenset[Role]:
    """Roles whose messages make the template leave out the reasoning of the turn before them."""
    dropped = set()
    for role, said in ((Role.USER, Message(role=Role.ASSISTANT, content=ANSWER, reasoning=THOUGHT)), (Role.TOOL, thoughtful_call)):
        follower = Message(role=role, content="psrlFollower", tool_call_id="call-0-0" if role is Role.TOOL else None)
        try:
            is_kept = THOUGHT in template.text([QUESTION, said, follower], header=True)
        except TemplateError:
            is_kept = False
        if not is_kept:
            dropped.add(role)
    return frozenset(dropped)
