"""Question-and-answer rows as others publish them: their text, answer and origin.

| shape | published as |
|---|---|
| `prompt` (messages), `reward_model.ground_truth`, `data_source`, `extra_info` | DAPO-Math-17k and whatever verl's users have |
| `question`, and an `answer` that ends with `#### 18` | GSM8K |
| `problem` and `answer`, also with capitals, `question` and `answer`, `input` and `output` | AIME 2024 and 2025 |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psrl.errors import RowError

GSM8K = "openai/gsm8k"
_GSM8K_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")
_PLAIN_ANSWER = re.compile(r"\s*[-+]?\d{1,20}\s*")
"""What a benchmark's answer column may hold beside GSM8K's solutions, which are whole texts."""
_PAIRS = (("problem", "answer"), ("Problem", "Answer"), ("input", "output"), ("question", "answer"))
_DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n"
)
_DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One row, whatever its shape was."""

    text: str
    """The problem alone: what a data set says beside it on the form of an answer is taken off, since a recipe asks for its own."""
    answer: str
    data_source: str
    index: Any = None
    """The row's own name for itself, such as DAPO-Math-17k's uuid."""


def question_of(raw: Any, *, source: str, row: int, data_source: str) -> Question:
    """Read one row; `data_source` is of rows that do not say theirs.

    Raises:
        RowError: Reasons: `unknown_shape`, `no_answer`.

    Example:
        {"question": "...", "answer": "... #### 1,018"} has the answer "1018".
    """

    def refuse(reason: str, detail: str) -> RowError:
        return RowError(source=source, row=row, reason=reason, detail=detail)

    if not isinstance(raw, Mapping):
        raise refuse("unknown_shape", f"a row is an object, this is {type(raw).__name__}")
    if "reward_model" in raw:
        return _of_verl(raw, data_source, refuse)
    for text_key, answer_key in _PAIRS:
        text, answer = raw.get(text_key), raw.get(answer_key)
        if not isinstance(text, str) or not isinstance(answer, str | int) or isinstance(answer, bool):
            continue
        if text_key != "question":
            return Question(text=text.strip(), answer=str(answer).strip(), data_source=data_source)
        solution = _GSM8K_ANSWER.search(str(answer))
        if solution is not None:
            return Question(text=text, answer=solution[1].replace(",", ""), data_source=GSM8K)
        if _PLAIN_ANSWER.fullmatch(str(answer)) is None:
            raise refuse("no_answer", f"does not end with '#### <number>': {str(answer)[-60:]!r}")
        return Question(text=text.strip(), answer=str(answer).strip(), data_source=data_source)
    known = "prompt/reward_model, question/answer, problem/answer, input/output"
    raise refuse("unknown_shape", f"its columns are none of {known}: {sorted(map(str, raw))}")


def _of_verl(raw: Mapping[str, Any], data_source: str, refuse: Any) -> Question:
    prompt, graded, extra = raw.get("prompt"), raw["reward_model"], raw.get("extra_info")
    said = [message for message in prompt if isinstance(message, Mapping)] if isinstance(prompt, list) else []
    asked = [message.get("content") for message in said if message.get("role") == "user"]
    if len(asked) != 1 or not isinstance(asked[0], str):
        raise refuse("unknown_shape", f"prompt must hold one message of the user, it is {prompt!r:.80}")
    answer = graded.get("ground_truth") if isinstance(graded, Mapping) else None
    if answer is None or not str(answer).strip():
        raise refuse("no_answer", f"reward_model has no ground_truth: {graded!r:.80}")
    own = raw.get("data_source")
    return Question(
        text=without_dapo_frame(asked[0]),
        answer=str(answer).strip(),
        data_source=own if isinstance(own, str) and own else data_source,
        index=extra.get("index") if isinstance(extra, Mapping) else None,
    )


def without_dapo_frame(text: str) -> str:
    """The problem without DAPO-Math-17k's words on `Answer: $Answer`, which would contradict a recipe that asks for a box."""
    return text.strip().removeprefix(_DAPO_BEFORE.strip()).removesuffix(_DAPO_AFTER).strip()
