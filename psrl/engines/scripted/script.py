"""The script file: which answer a request gets.

Example of a file:
    {"vocab_size": 512, "max_model_len": 1024, "turns": [
        {"when_prompt_contains": [7, 8], "token_ids": [40, 41, 2], "latency_s": 0.1, "per_token_s": 0.005},
        {"failure": "error"},
        {"token_ids": [5, 6, 2], "new_version_at": [1], "finish_reason": "length"},
        {"random": {"low": 3, "high": 512, "min_tokens": 1, "max_tokens": 40, "last_ids": [2]}, "finish_reason": "stop"},
        {"random": {"low": 3, "high": 512, "num_tokens": "lognormal:median=60,sigma=1,max=900", "by_seed": true},
         "latency_s": 0.02, "per_token_s": 0.01, "finish_reason": "stop"}]}

Turns with `when_prompt_contains` answer every prompt that has these ids in a row, the first that fits; the others answer the
remaining requests in turn, over and over (with `"by_prompt": true` the prompt chooses among them, so that the same prompt always
gets the same answer, whatever else is asked). The ids of a turn repeat until a stop id or max_tokens, unless it has a finish reason.

Seconds are numbers or distributions (`types.latency`), drawn once for each request, by its seed and prompt. With `"turn_header": [ids]`,
the ids that open an assistant's turn in a prompt, a prompt that ends with a part of the answer that its beginning gets is answered with the
rest: a turn that was given back goes on where it was.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from psrl.errors import ConfigError, EngineError
from psrl.types import FinishReason
from psrl.types.latency import Latency

LOWEST_LOGPROB = -8.0


class ScriptedFailure(StrEnum):
    """How a request goes wrong."""

    ERROR = "error"
    """500."""
    HANG = "hang"
    """No answer until it is aborted."""
    DISCONNECT = "disconnect"
    """The connection is cut inside the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomIds:
    """Ids and logprobs drawn from the prompt: the same prompt gets the same ones, in every process."""

    low: int
    high: int
    """First id above the range."""
    min_tokens: int = 1
    max_tokens: int = 0
    """Most ids before the last one."""
    num_tokens: Latency | None = None
    """How many ids before the last one, instead of between min_tokens and max_tokens; rounded, at least 1."""
    by_seed: bool = False
    """The request's sampling seed counts too: episodes of a group get different answers to the same prompt."""
    last_ids: tuple[int, ...] = ()
    """One of them is put at the end, such as a stop id; none: the turn ends with a drawn id."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.low < self.high and (self.num_tokens or 1 <= self.min_tokens <= self.max_tokens)):
            raise ValueError(f"random needs 0 <= low < high and num_tokens or 1 <= min_tokens <= max_tokens, got {self}")

    def draw(self, prompt: Sequence[int], seed: int) -> tuple[list[int], list[float]]:
        """(ids [S], logprobs [S])."""
        draw = random.Random(hash((self.seed, seed if self.by_seed else 0, tuple(prompt))))
        drawn = self.num_tokens.draw(draw) if self.num_tokens is not None else draw.randint(self.min_tokens, self.max_tokens)
        ids = draw.choices(range(self.low, self.high), k=max(1, round(drawn)))
        if self.last_ids:
            ids.append(draw.choice(self.last_ids))
        return ids, [LOWEST_LOGPROB * draw.random() for _ in ids]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One turn as it will be sampled."""

    ids: list[int]
    """Before they repeat; as many as logprobs."""
    logprobs: list[float]
    latency_s: float
    per_token_s: float

    def after(self, begun: Sequence[int], *, repeats: bool) -> Answer | None:
        """What is left when `begun` was sampled already; None when that is no part of it. With `repeats` the ids begin again and again."""
        length = len(self.ids)
        if not length or (len(begun) >= length and not repeats):
            return None
        if any(token != self.ids[index % length] for index, token in enumerate(begun)):
            return None
        at = len(begun) % length
        before = slice(0, at if repeats else 0)
        ids, logprobs = self.ids[at:] + self.ids[before], self.logprobs[at:] + self.logprobs[before]
        return dataclasses.replace(self, ids=ids, logprobs=logprobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedTurn:
    """One answer."""

    token_ids: tuple[int, ...] = ()
    random: RandomIds | None = None
    """Instead of token_ids."""
    logprob: float = -0.5
    """Of every one of token_ids."""
    latency_s: float | Latency = 0.0
    """Before the first token."""
    per_token_s: float | Latency = 0.0
    finish_reason: FinishReason | None = None
    """How the turn ends after its last id; None repeats the ids."""
    new_version_at: tuple[int, ...] = ()
    """Ascending: from each of these tokens on, the version is marked one higher than the weights served."""
    failure: ScriptedFailure | None = None
    when_prompt_contains: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.token_ids and self.random is None and self.failure is None:
            raise ValueError("a turn needs token_ids, random or a failure")
        if self.token_ids and self.random is not None:
            raise ValueError("a turn has either token_ids or random")
        if list(self.new_version_at) != sorted(self.new_version_at):
            raise ValueError(f"new_version_at must ascend, got {list(self.new_version_at)}")

    def answer_to(self, prompt: Sequence[int], seed: int) -> Answer:
        """What a request is given; the same for the same prompt and seed."""
        if self.random is not None:
            ids, logprobs = self.random.draw(prompt, seed)
        else:
            ids, logprobs = list(self.token_ids), [self.logprob] * len(self.token_ids)
        draw = random.Random(hash((seed, tuple(prompt))))
        return Answer(ids=ids, logprobs=logprobs, latency_s=_drawn(self.latency_s, draw), per_token_s=_drawn(self.per_token_s, draw))


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A whole file."""

    turns: tuple[ScriptedTurn, ...]
    vocab_size: int = 1_000_000
    max_model_len: int = 1_000_000
    by_prompt: bool = False
    turn_header: tuple[int, ...] = ()
    _fitted: tuple[ScriptedTurn, ...] = field(init=False)
    _cycle: tuple[ScriptedTurn, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_fitted", tuple(turn for turn in self.turns if turn.when_prompt_contains))
        object.__setattr__(self, "_cycle", tuple(turn for turn in self.turns if not turn.when_prompt_contains))

    def turn_for(self, prompt: list[int], *, number: int) -> ScriptedTurn:
        """The answer of the `number`-th request (from 0) that no condition fits.

        Raises:
            EngineError: The script has no turn for it.
        """
        for turn in self._fitted:
            if _contains(prompt, turn.when_prompt_contains):
                return turn
        if not self._cycle:
            raise EngineError("the script has no turn for this prompt")
        if self.by_prompt:
            return random.Random(hash(tuple(prompt))).choice(self._cycle)
        return self._cycle[number % len(self._cycle)]


def read_script(path: Path) -> Script:
    """Read a script file.

    Raises:
        EngineError: It is not JSON, has an unknown field, or a turn that says nothing.
    """
    try:
        raw = json.loads(path.read_text())
        turns = tuple(_turn(entry) for entry in raw.pop("turns"))
        return Script(turns=turns, turn_header=tuple(raw.pop("turn_header", ())), **raw)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise EngineError(f"script {path} cannot be read: {type(error).__name__}: {error}") from error


def _turn(raw: dict[str, Any]) -> ScriptedTurn:
    unknown = set(raw) - {one.name for one in fields(ScriptedTurn)}
    if unknown:
        raise ValueError(f"unknown fields {sorted(unknown)}")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}
    if raw.get("failure") is not None:
        values["failure"] = ScriptedFailure(raw["failure"])
    if raw.get("finish_reason") is not None:
        values["finish_reason"] = FinishReason(raw["finish_reason"])
    values |= {name: Latency.parse(str(raw[name]), key=name) for name in ("latency_s", "per_token_s") if name in raw}
    if raw.get("random") is not None:
        given = dict(raw["random"])
        if "num_tokens" in given:
            given["num_tokens"] = Latency.parse(str(given["num_tokens"]), key="num_tokens")
        values["random"] = RandomIds(**given | {"last_ids": tuple(given.get("last_ids", ()))})
    return ScriptedTurn(**values)


def _drawn(seconds: float | Latency, draw: random.Random) -> float:
    return seconds.draw(draw) if isinstance(seconds, Latency) else seconds


def turn_begins_at(prompt: list[int], header: tuple[int, ...]) -> int:
    """Where the last turn of the assistant begins: behind the last `header`; without one, at the prompt's end."""
    for start in range(len(prompt) - len(header), -1, -1):
        if header and tuple(prompt[start : start + len(header)]) == header:
            return start + len(header)
    return len(prompt)


def _contains(prompt: list[int], wanted: tuple[int, ...]) -> bool:
    start = 0
    for _ in range(prompt.count(wanted[0])):
        start = prompt.index(wanted[0], start)
        if tuple(prompt[start : start + len(wanted)]) == wanted:
            return True
        start += 1
    return False
