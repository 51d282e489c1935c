"""The script file: which answer a request gets.

Example of a file:
    {"vocab_size": 512, "max_model_len": 1024, "turns": [
        {"when_prompt_contains": [7, 8], "token_ids": [40, 41, 2], "latency_s": 0.1, "per_token_s": 0.005},
        {"failure": "error"},
        {"token_ids": [5, 6, 2]}]}

Turns with `when_prompt_contains` answer every prompt that has these ids in a row, the first that fits; the others answer the
remaining requests in turn, over and over. The ids of a turn repeat until a stop id or max_tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from psrl.errors import EngineError


class ScriptedFailure(StrEnum):
    """How a request goes wrong."""

    ERROR = "error"
    """500."""
    HANG = "hang"
    """No answer until it is aborted."""
    DISCONNECT = "disconnect"
    """The connection is cut inside the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedTurn:
    """One answer."""

    token_ids: tuple[int, ...] = ()
    logprob: float = -0.5
    """Of every token."""
    latency_s: float = 0.0
    """Before the first token."""
    per_token_s: float = 0.0
    failure: ScriptedFailure | None = None
    when_prompt_contains: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A whole file."""

    turns: tuple[ScriptedTurn, ...]
    vocab_size: int = 1_000_000
    max_model_len: int = 1_000_000
    _fitted: tuple[ScriptedTurn, ...] = field(init=False)
    _cycle: tuple[ScriptedTurn, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_fitted", tuple(turn for turn in self.turns if turn.when_prompt_contains))
        object.__setattr__(self, "_cycle", tuple(turn for turn in self.turns if not turn.when_prompt_contains))

    def turn_for(self, prompt: Sequence[int], *, number: int) -> ScriptedTurn:
        """The answer of the `number`-th request (from 0) that no condition fits.

        Raises:
            EngineError: The script has no turn for it.
        """
        for turn in self._fitted:
            wanted = list(turn.when_prompt_contains)
            if any(list(prompt[start : start + len(wanted)]) == wanted for start in range(len(prompt) - len(wanted) + 1)):
                return turn
        if not self._cycle:
            raise EngineError("the script has no turn for this prompt")
        return self._cycle[number % len(self._cycle)]


def read_script(path: Path) -> Script:
    """Read a script file.

    Raises:
        EngineError: It is not JSON, or has an unknown field or an empty turn.
    """
    try:
        raw = json.loads(path.read_text())
        turns = tuple(_turn(entry) for entry in raw.pop("turns"))
        return Script(turns=turns, **raw)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"script {path} cannot be read: {type(error).__name__}: {error}") from error


def _turn(raw: dict[str, Any]) -> ScriptedTurn:
    unknown = set(raw) - {one.name for one in fields(ScriptedTurn)}
    if unknown:
        raise ValueError(f"unknown fields {sorted(unknown)}")
    failure = ScriptedFailure(raw["failure"]) if raw.get("failure") else None
    turn = ScriptedTurn(
        **{
            **raw,
            "failure": failure,
            "token_ids": tuple(raw.get("token_ids", ())),
            "when_prompt_contains": tuple(raw.get("when_prompt_contains", ())),
        }
    )
    if not turn.token_ids and failure is None:
        raise ValueError("a turn needs token_ids or a failure")
    return turn
