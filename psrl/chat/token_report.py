"""What a model folder's tokenizer and chat template do to token truth, in lines for a person: `psrl doctor tokens`.

Beside the probe it says which tool-call format the family writes, and what it costs to drop reasoning of earlier turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psrl.chat.families import ToolSupport
from psrl.chat.parsers import tool_formats
from psrl.chat.probe import TOOL, probe
from psrl.chat.renderer import HfRenderer, HistoryThinking, load_renderer
from psrl.errors import TemplateError
from psrl.types import Message, Role, ToolCall

NUM_TURNS = 10
REASONING = "The question asks for a sum. I add the two numbers, check the last digit, and see that the sum is right. "
CALL = ToolCall(id="call-0-0", name=TOOL.name, arguments={"code": "print(2 + 3)"})


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchCost:
    """Tokens of a ten-turn conversation with reasoning, when the template's dropping of reasoning is followed."""

    num_branches: int
    """How often the prompt had to be rendered anew; 0 where the template keeps reasoning before a user message."""
    num_again: int
    """Tokens computed again: after the place where the prompt changes, without the new message."""
    stripped_length: int
    """Of the last prompt under `strip`."""
    kept_length: int
    """Of the last prompt under `keep`, which computes nothing twice."""


def token_lines(model_path: str, tool_format: str | None) -> list[str]:
    """The report of a folder; without `tool_format` the one that its template writes is taken.

    Raises:
        ConfigError: The folder has no tokenizer, or the format is unknown.
        TemplateError: The tokenizer has no chat template, or one that cannot be used.
    """
    named = tool_format or "hermes"
    renderer = load_renderer(model_path, tool_format=named, history_thinking=HistoryThinking.KEEP)
    lines = probe(renderer).lines()
    if renderer.template.prints_date:
        lines.append(f"date: the template prints today's; it is always told {renderer.template.current_date} (option current_date)")
    lines.append(f"tool-call format: {_format_line(renderer, tool_format)}")
    cost = branch_cost(renderer)
    if not cost.num_branches:
        return [*lines, f"{NUM_TURNS} turns with reasoning: keep and strip are the same, no token is computed twice"]
    return [
        *lines,
        f"{NUM_TURNS} turns with reasoning, keep: the last prompt has {cost.kept_length} tokens, none is computed twice",
        f"{NUM_TURNS} turns with reasoning, strip: the last prompt has {cost.stripped_length} tokens, "
        f"{cost.num_again} are computed again in {cost.num_branches} branches",
    ]


def written_formats(renderer: HfRenderer) -> tuple[str, ...]:
    """Formats that read a call as the template writes it; empty where it writes none, or in no format that psrl knows."""
    if renderer.family.tool_support is ToolSupport.PLAIN_TEXT:
        return ()
    question = Message(role=Role.USER, content="2 + 3?")
    try:
        turn = _turn_text(renderer, [question], Message(role=Role.ASSISTANT, tool_calls=(CALL,)))
    except TemplateError:
        return ()
    read = tuple(name for name in tool_formats.names if _reads(renderer, name, turn))
    exact = tuple(name for name in read if tool_formats.resolve(name)().call_text(CALL.name, CALL.arguments) in turn)
    return exact or read


def branch_cost(renderer: HfRenderer) -> BranchCost:
    """Play the conversation once under `keep` and once as `strip` would.

    Where the template writes no reasoning, the policy is taken to write it in <think></think>; no later prompt shows it then.
    """
    history = [Message(role=Role.USER, content="What is 12 + 30?")]
    kept = stripped = renderer.open(history, [])
    num_branches = num_again = 0
    for turn in range(NUM_TURNS - 1):
        said = Message(role=Role.ASSISTANT, content=f"The sum is {turn + 42}.", reasoning=REASONING * 3)
        question = Message(role=Role.USER, content=f"And {turn + 13} + 30?")
        text = _turn_text(renderer, history, said)
        if REASONING not in text:
            opening = "" if renderer.family.opens_reasoning else "<think>\n"
            text = f"{opening}{said.reasoning}\n</think>\n\n{text}"
        sampled = renderer.template.encode(text)
        history.append(said)
        new = renderer.following(sampled[-1], [question])
        kept = [*kept, *sampled, *new]
        context = [*stripped, *sampled]
        if renderer.drops_reasoning(history, [question]):
            stripped = renderer.open([*history, question], [])
            num_branches += 1
            num_again += max(0, len(stripped) - _num_common(context, stripped) - len(new))
        else:
            stripped = [*context, *new]
        history.append(question)
    return BranchCost(num_branches=num_branches, num_again=num_again, stripped_length=len(stripped), kept_length=len(kept))


def _format_line(renderer: HfRenderer, asked: str | None) -> str:
    written = written_formats(renderer)
    if renderer.family.tool_support is ToolSupport.PLAIN_TEXT:
        return f"the template writes no calls, so any can be taught; {asked or 'hermes'} is used"
    if not written:
        return f"the template's calls are in no format that psrl knows; one of {', '.join(tool_formats.names)} must be taught"
    if asked is None or asked in written:
        return f"{' or '.join(written)}, as the template writes calls"
    return f"the template writes {' or '.join(written)}; {asked} does not read its calls: use --format {written[0]}"


def _turn_text(renderer: HfRenderer, history: list[Message], said: Message) -> str:
    """A turn as the template shows it while it is the last, from after the header to its end."""
    before = renderer.prompt_text(history, [], header=False)
    whole = renderer.prompt_text([*history, said], [], header=False)
    if not whole.startswith(before):
        raise TemplateError("the chat template shows a question otherwise once it is answered")
    turn = whole[len(before) :]
    header = _num_common(turn, renderer.family.header)  # less than all of it where the header's <think> is not shown again
    return turn[header:].removesuffix(renderer.family.separator)


def _reads(renderer: HfRenderer, name: str, turn: str) -> bool:
    form = tool_formats.resolve(name)()
    ends = [renderer.decode([token_id]) for token_id in renderer.stop_token_ids]
    spoken = next((turn.removesuffix(end) for end in ends if turn.endswith(end)), turn)
    _, rest = form.split_reasoning(spoken, is_open=renderer.family.opens_reasoning)
    calls = form.parse(rest, turn=0, tools=[TOOL]).calls
    return [(call.name, call.arguments) for call in calls if isinstance(call, ToolCall)] == [(CALL.name, CALL.arguments)]


def _num_common(before: Sequence[object], after: Sequence[object]) -> int:
    return next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
