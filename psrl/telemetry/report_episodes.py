"""Episodes on the report's page: which to show, their messages, and their tokens coloured by who wrote them and how sure it was.

Everything that a model or a dataset wrote is hostile here: it passes through `safe` before it enters the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby

from psrl.telemetry.json_lines import encode_line
from psrl.telemetry.trajectories import EpisodeRecord, lengths_of_turns
from psrl.types import Message, Submission, Trajectory

MAX_TOKENS_SHOWN = 700
"""Of one trajectory; the middle of longer ones is left out and counted."""
MAX_TEXT_SHOWN = 6000
LOGPROB_LEVELS = (-0.05, -0.35, -1.0, -2.3)
"""Lower ends of the colour levels p0 to p3 (95%, 70%, 37%, 10%); below the last one p4."""

Decode = Callable[[list[int]], str]


def safe(text: str) -> str:
    """Text as HTML that only shows itself: markup is escaped, control and direction characters become visible."""
    return escape("".join(_visible(character) for character in text), quote=True)


def chosen_episodes(records: Sequence[EpisodeRecord], count: int) -> list[EpisodeRecord]:
    """About `count` episodes that tell the most: early and late ones, each right and wrong, tasks not repeated, in order of steps."""
    judged = [record for record in records if record.episode.result.trajectories or record.episode.result.messages]
    half = (judged[0].step + judged[-1].step) / 2 if judged else 0.0
    bins = [
        [record for record in judged if (record.step > half) is is_late and is_right(record) is right]
        for is_late in (False, True)
        for right in (True, False)
    ]
    # The ends are the most telling: the first of the early ones, the last of the late ones.
    queues = [_distinct_tasks(part if index < 2 else part[::-1]) for index, part in enumerate(bins)]
    chosen: list[EpisodeRecord] = []
    while len(chosen) < count and any(queues):
        for queue in queues:
            if queue and len(chosen) < count:
                chosen.append(queue.pop(0))
    return sorted(chosen, key=lambda record: record.step)


def is_right(record: EpisodeRecord) -> bool:
    """Whether the episode solved its task; by the sign of the reward where there is no accuracy."""
    score = record.episode.score
    return score.accuracy >= 0.5 if score.accuracy is not None else (score.reward or 0.0) > 0


def episode_html(record: EpisodeRecord, decode: Decode | None, *, is_open: bool = False) -> str:
    """One `<details>`: headline, messages, tokens."""
    episode = record.episode
    result, score = episode.result, episode.score
    mark = "right" if is_right(record) else "wrong"
    reward = "no reward" if score.reward is None else f"{score.reward:+.2f}"
    kind = "validation, " if episode.ticket.is_validation else ""
    turn_lengths = lengths_of_turns(result.trajectories)
    head = (
        f'<summary><span class="badge {mark}">{"✓" if mark == "right" else "✗"} {reward}</span>'
        f"<span class=what>{kind}step {record.step} · {len(turn_lengths)} turns · {sum(turn_lengths)} tokens</span>"
        f"<span class=outcome>{safe(result.outcome.value)}</span><span class=peek>{safe(_peek(episode.task.prompt))}</span></summary>"
    )
    facts = [
        ("episode", episode.ticket.uid),
        ("data source", episode.task.data_source),
        ("reference", str(episode.task.ground_truth)),
        ("seed", str(episode.ticket.seed)),
        ("policy version", str(episode.ticket.admitted_version)),
        ("seconds", f"{episode.timings.total_s:.2f}"),
        *((f"reward: {name}", f"{value:+.3g}") for name, value in score.parts.items()),
        *((name, f"{value:g}") for name, value in result.counts.items()),
        *((("error", result.error),) if result.error else ()),
    ]
    listed = "".join(f"<div><dt>{safe(name)}</dt><dd>{safe(cut(value))}</dd></div>" for name, value in facts)
    messages = "".join(_message_html(message) for message in result.messages)
    tokens = "".join(
        _tokens_html(trajectory, index, record.pieces[index] if index < len(record.pieces) else None, decode, is_open)
        for index, trajectory in enumerate(result.trajectories)
    )
    return (
        f"<details class=episode{' open' if is_open else ''}>{head}<dl>{listed}</dl>"
        f"<div class=messages>{messages}{_submission_html(result.submission)}</div>{tokens}</details>"
    )


def _distinct_tasks(records: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
    """Each task's first episode first, then the others."""
    seen: set[str] = set()
    first: list[EpisodeRecord] = []
    rest: list[EpisodeRecord] = []
    for record in records:
        (rest if record.episode.ticket.group in seen else first).append(record)
        seen.add(record.episode.ticket.group)
    return first + rest


def _peek(prompt: Sequence[Message]) -> str:
    text = " ".join(prompt[-1].content.split()) if prompt else ""
    return text if len(text) <= 110 else text[:110] + "…"


def cut(text: str) -> str:
    """Head and tail of a text that is too long to show, with the number of characters between them."""
    if len(text) <= MAX_TEXT_SHOWN:
        return text
    half = MAX_TEXT_SHOWN // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _message_html(message: Message) -> str:
    role = message.role.value
    name = f" {safe(message.name)}" if message.name else ""
    reasoning = f"<pre class=reasoning>{safe(cut(message.reasoning))}</pre>" if message.reasoning else ""
    content = f"<pre>{safe(cut(message.content))}</pre>" if message.content else ""
    calls = "".join(f"<pre class=call>{safe(call.name)}({safe(cut(_arguments(call.arguments)))})</pre>" for call in message.tool_calls)
    return f'<div class="message {role}"><span class=role>{role}{name}</span>{reasoning}{content}{calls}</div>'


def _submission_html(submission: Submission | None) -> str:
    if submission is None:
        return ""
    parts = [("patch", submission.patch or "nothing was changed"), *((("its words", submission.text),) if submission.text else ())]
    shown = "".join(f'<pre title="{name}">{safe(cut(text))}</pre>' for name, text in parts)
    return f'<div class="message tool"><span class=role>{safe(submission.exit_status)}</span>{shown}</div>'


def _arguments(arguments: dict[str, object]) -> str:
    if len(arguments) == 1 and isinstance(value := next(iter(arguments.values())), str):
        # The usual single `code` argument reads better as the program than as escaped JSON.
        return f"{next(iter(arguments))}=\n{value}\n" if "\n" in value else f"{next(iter(arguments))}={value}"
    return encode_line(arguments).decode().strip()


def _tokens_html(trajectory: Trajectory, branch: int, pieces: Sequence[str] | None, decode: Decode | None, is_open: bool) -> str:
    ids, mask = trajectory.ids(), trajectory.loss_mask()
    logprobs, versions, turns = trajectory.logprobs(), trajectory.versions(), trajectory.turn_indices()
    if not ids:
        return ""
    head = MAX_TOKENS_SHOWN // 2
    shown = range(len(ids)) if len(ids) <= MAX_TOKENS_SHOWN else [*range(head), -1, *range(len(ids) - head, len(ids))]
    parts = []
    for is_gap, indices in groupby(shown, key=lambda index: index < 0):
        if is_gap:
            parts.append(f"<span class=gap>… {len(ids) - MAX_TOKENS_SHOWN} tokens left out …</span>")
            continue
        for index in indices:
            text = pieces[index] if pieces is not None else decode([ids[index]]) if decode is not None else f"{ids[index]} "
            tip = f"{index}: id {ids[index]}"
            style = "obs"
            if mask[index]:
                style = f"p{logprob_level(logprobs[index])}"
                chance = math.exp(logprobs[index]) if logprobs[index] <= 0 else 1.0
                tip += f" · logprob {logprobs[index]:.4g} ({chance:.1%}) · version {versions[index]} · turn {turns[index]}"
            parts.append(f'<i class={style} title="{tip}">{_token_text(text)}</i>')
    title = f"branch {branch}: " if branch else ""
    summary = f"<summary>{title}{len(ids)} tokens, {sum(mask)} sampled</summary>"
    return f"<details class=tokens{' open' if is_open else ''}>{summary}<div class=stream>{''.join(parts)}</div></details>"


def logprob_level(logprob: float) -> int:
    """Colour level 0 (nearly certain) to 4 (below 10%); NaN is 4."""
    return next((level for level, low in enumerate(LOGPROB_LEVELS) if logprob >= low), len(LOGPROB_LEVELS))


def _token_text(text: str) -> str:
    # A line feed is shown and obeyed, so that the stream keeps the shape of the conversation.
    return safe(text).replace("\n", "<s>↵</s>\n") or "<s>∅</s>"


def _visible(character: str) -> str:
    code = ord(character)
    if character in "\n\t":
        return character
    if code < 32:
        return chr(0x2400 + code)
    is_direction = 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069 or code in (0x200E, 0x200F)
    return "\ufffd" if is_direction or 0xD800 <= code <= 0xDFFF or 0x7F <= code < 0xA0 else character
