"""`psrl view`: the episodes of a run folder, to read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from psrl.errors import ConfigError
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trajectories import TRAIN_FILE, VAL_FILE, EpisodeRecord, read_trajectories
from psrl.types import Message, Trajectory

SAMPLED_STYLE = "green"
OBSERVED_STYLE = "dim"
ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


def view(
    run: Annotated[Path, typer.Argument(help="A run folder: runs/<recipe>/<start time>.")],
    episode: Annotated[int | None, typer.Option("--episode", "-n", help="Number of the episode to show whole.")] = None,
    validation: Annotated[bool, typer.Option("--val", help="Validation episodes instead of training ones.")] = False,
    step: Annotated[int | None, typer.Option("--step", help="Only episodes of this step.")] = None,
) -> None:
    """List the episodes of RUN, or show one: messages, tokens coloured by mask, rewards."""
    path = RunFolder.open(run).trajectories / (VAL_FILE if validation else TRAIN_FILE)
    if not path.is_file():
        other = "leave --val out" if validation else "add --val for validation episodes"
        raise ConfigError(key="RUN", value=str(run), rule=f"holds no {path.name}", fix=f"{other}, or name another run")
    records = [(number, record) for number, record in enumerate(read_trajectories(path)) if step is None or record.step == step]
    console = Console()
    if episode is None:
        console.print(_overview(records))
        return
    chosen = [record for number, record in records if number == episode]
    if not chosen:
        numbers = f"{records[0][0]} to {records[-1][0]}" if records else "none"
        raise ConfigError(
            key="--episode", value=episode, rule=f"is not among the episodes shown ({numbers})", fix="leave it out for a list"
        )
    _show(console, chosen[0])


def _overview(records: list[tuple[int, EpisodeRecord]]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name in ("episode", "step", "task", "outcome", "reward", "turns", "tokens"):
        table.add_column(name, no_wrap=True)
    table.add_column("last words")
    for number, record in records:
        result, score = record.episode.result, record.episode.score
        turns = sum(trajectory.num_turns for trajectory in result.trajectories)
        tokens = sum(trajectory.num_tokens for trajectory in result.trajectories)
        last = " ".join(result.turn_texts[-1].split())[-40:] if result.turn_texts else ""
        values = (number, record.step, record.episode.task.uid, result.outcome.value, _number(score.reward))
        table.add_row(*[str(value) for value in (*values, turns, tokens)], Text(last))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _show(console: Console, record: EpisodeRecord) -> None:
    episode = record.episode
    result, score = episode.result, episode.score
    console.print(Text(f"{episode.ticket.uid}  step {record.step}  policy version {episode.ticket.admitted_version}", "bold"))
    for message in result.messages:
        console.print(Panel(_message_text(message), title=message.role.value, title_align="left", border_style=ROLE_STYLES[message.role]))
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
