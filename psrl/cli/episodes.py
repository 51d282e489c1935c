"""Episodes for people: a list of many, or one with messages, tokens coloured by mask, and rewards."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from psrl.telemetry.report_episodes import cut
from psrl.telemetry.trajectories import EpisodeRecord, lengths_of_turns
from psrl.types import LoopResult, Message, Trajectory

SAMPLED_STYLE = "green"
OBSERVED_STYLE = "dim"
LAST_CHARACTERS = 40
"""Of an episode's last turn; its end says how it ended."""
ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


def episode_table(records: Sequence[tuple[int, EpisodeRecord]]) -> Table:
    """One row per (number, record)."""
    table = Table(box=SIMPLE_HEAD)
    for name in ("episode", "step", "task", "outcome", "reward", "turns", "tokens"):
        table.add_column(name, no_wrap=True)
    table.add_column("last words")
    for number, record in records:
        result, score = record.episode.result, record.episode.score
        turns, tokens = turns_of(result), tokens_of(result)
        last = " ".join(result.turn_texts[-1].split()) if result.turn_texts else ""
        last = f"...{last[-LAST_CHARACTERS:]}" if len(last) > LAST_CHARACTERS else last
        values = (number, record.step, record.episode.task.uid, result.outcome.value, _number(score.reward))
        table.add_row(*[str(value) for value in (*values, turns, tokens)], Text(last))
    return table


def turns_of(result: LoopResult) -> str:
    """As captured, else as the agent counted."""
    lengths = lengths_of_turns(result.trajectories)
    calls = result.counts.get("agent/calls")
    return str(len(lengths)) if lengths or calls is None else f"{calls:.0f}"


def tokens_of(result: LoopResult) -> str:
    """Unknown where an agent took turns of which nothing was captured, as at somebody else's endpoint."""
    if not result.trajectories and result.counts.get("agent/calls"):
        return "unknown"
    return str(sum(trajectory.num_tokens for trajectory in result.trajectories))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def print_episode(console: Console, record: EpisodeRecord) -> None:
    """Everything that a person wants to know of one episode."""
    episode = record.episode
    result, score = episode.result, episode.score
    console.print(Text(f"{episode.ticket.uid}  step {record.step}  policy version {episode.ticket.admitted_version}", "bold"))
    for message in result.messages:
        console.print(Panel(_message_text(message), title=message.role.value, title_align="left", border_style=ROLE_STYLES[message.role]))
    if result.submission is not None:
        title = f"submission: {result.submission.exit_status}"
        console.print(Panel(Text(cut(result.submission.patch) or "nothing was changed"), title=Text(title), title_align="left"))
        if result.submission.text:
            console.print(Panel(Text(cut(result.submission.text)), title="its words", title_align="left"))
    for index, trajectory in enumerate(result.trajectories):
        pieces = record.pieces[index] if index < len(record.pieces) else tuple(f"{token} " for token in trajectory.ids())
        console.print(Panel(_token_text(trajectory, pieces), title=f"tokens of {trajectory.uid}", title_align="left"))
    console.print(Text.assemble(("sampled (trained on)", SAMPLED_STYLE), "  ", ("observed", OBSERVED_STYLE)))
    parts = ", ".join(f"{name} {value:.3g}" for name, value in score.parts.items())
    console.print(
        f"outcome {result.outcome.value}, reward {_number(score.reward)}, accuracy {_number(score.accuracy)}"
        + (f" ({parts})" if parts else "")
    )
    console.print(Text(f"reference answer: {episode.task.ground_truth}"))
    if result.error:
        console.print(Text(f"error: {result.error}", "red"))


def _message_text(message: Message) -> Text:
    text = Text()
    if message.reasoning:
        text.append(message.reasoning + "\n", "italic dim")
    text.append(message.content)
    for call in message.tool_calls:
        arguments = ", ".join(f"{name}={value}" for name, value in call.arguments.items())
        text.append(f"\n-> {call.name}({arguments})", "bold")
    return text


def _token_text(trajectory: Trajectory, pieces: tuple[str, ...]) -> Text:
    text = Text()
    for piece, mask in zip(pieces, trajectory.loss_mask(), strict=True):
        text.append(piece, SAMPLED_STYLE if mask else OBSERVED_STYLE)
    return text
