"""Rows of Parquet and JSONL files, in the schema that verl's users have, to tasks.

A row that cannot be used is an error with a reason, counted and named; nothing is repaired in silence.

    {"prompt": [{"role": "user", "content": "What is 2 + 2?"}], "data_source": "my/data",
     "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 7}, "agent_name": "multi_turn_agent"}

`env_class` and `data_class` choose environment and data adapter; other columns are kept in `extra_info` under their names.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psrl.errors import ConfigError, MessageError, RowError
from psrl.types import Message, Role, Task, TaskUid

BATCH_ROWS = 1024
NAMED_ROWS = 10
"""Bad rows that an error names; the rest is in the counts."""
OWN_COLUMNS = frozenset({"data_source", "reward_model", "extra_info", "agent_name", "env_class", "data_class"})


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRows:
    """What came of the files."""

    tasks: tuple[Task, ...]
    bad_rows: tuple[RowError, ...]
    """In the order of the files."""

    @property
    def bad_row_counts(self) -> dict[str, int]:
        """How many rows failed for each reason."""
        return dict(Counter(error.reason for error in self.bad_rows))


def load_rows(files: Sequence[str], *, prompt_key: str, max_bad_rows: int, partition: str, num_bad_before: int = 0) -> LoadedRows:
    """Read all rows of all files.

    Args:
        files: Parquet or JSONL.
        prompt_key: The column with the messages.
        max_bad_rows: More bad rows than this, in all partitions together, refuse the start.
        partition: First part of the uids: `train` gives `train-0`, `train-1`, ... by position over all files.
        num_bad_before: Bad rows of partitions that were read before.

    Raises:
        ConfigError: A file is missing or of an unknown kind, too many rows are bad, or no good row is left.
    """
    tasks: list[Task] = []
    bad_rows: list[RowError] = []
    position = 0
    for file in files:
        for row, raw in enumerate(read_raw_rows(file, key=f"data.{partition}_files")):
            try:
                tasks.append(task_of_row(raw, prompt_key=prompt_key, source=file, row=row, uid=f"{partition}-{position}"))
            except RowError as error:
                bad_rows.append(error)
            position += 1
    loaded = LoadedRows(tasks=tuple(tasks), bad_rows=tuple(bad_rows))
    if num_bad_before + len(bad_rows) > max_bad_rows:
        before = f", beside {num_bad_before} in the files before" if num_bad_before else ""
        raise ConfigError(
            key="data.max_bad_rows",
            value=max_bad_rows,
            rule=f"{len(bad_rows)} of {position} rows cannot be used{before} {loaded.bad_row_counts}: " + named(bad_rows),
            fix=f"correct the rows, or set data.max_bad_rows={num_bad_before + len(bad_rows)} to leave them out",
        )
    if not tasks:
        raise ConfigError(
            key=f"data.{partition}_files",
            value=list(files),
            rule="hold no usable row",
            fix="run the recipe's prepare step, or name other files",
        )
    return loaded


def named(errors: Sequence[RowError]) -> str:
    """The first bad rows in words."""
    rest = len(errors) - NAMED_ROWS
    return "; ".join(str(error) for error in errors[:NAMED_ROWS]) + (f"; and {rest} more" if rest > 0 else "")


def read_raw_rows(file: str, *, key: str = "data.train_files") -> Iterator[Any]:
    """The rows as plain Python; a JSONL line that is no JSON is given as the error it raises.

    Raises:
        ConfigError: The file is missing, unreadable or of an unknown kind; `key` is the setting that named it.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(key=key, value=file, rule="is no file", fix="run the recipe's prepare step, or correct the path")
    if path.suffix == ".parquet":
        yield from _read_parquet(path, key)
    elif path.suffix in (".jsonl", ".json"):
        with path.open("rb") as lines:
            for line in lines:
                if line.strip():
                    yield _json_or_error(line)
    else:
        raise ConfigError(key=key, value=file, rule=f"has the ending {path.suffix!r}", fix="give .parquet or .jsonl files")


def _read_parquet(path: Path, key: str) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as parquet:
            for batch in parquet.iter_batches(batch_size=BATCH_ROWS):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(key=key, value=str(path), rule=f"cannot be read as Parquet ({error})", fix="make the file again") from error


def _json_or_error(line: bytes) -> Any:
    try:
        return json.loads(line)
    except RecursionError:
        return ValueError("brackets in brackets, too deep to be read")
    except ValueError as error:
        return error


def task_of_row(raw: Any, *, prompt_key: str, source: str, row: int, uid: str) -> Task:
    """One row as a task.

    Raises:
        RowError: Reasons: `not_json`, `not_an_object`, `no_prompt`, `bad_message`, `ends_with_assistant`, `bad_field`.
    """

    def refuse(reason: str, detail: str) -> RowError:
        return RowError(source=source, row=row, reason=reason, detail=detail)

    if isinstance(raw, ValueError):
        raise refuse("not_json", str(raw))
    if not isinstance(raw, Mapping):
        raise refuse("not_an_object", f"a row is an object, this is {type(raw).__name__}")
    prompt = raw.get(prompt_key)
    if not isinstance(prompt, list) or not prompt:
        raise refuse("no_prompt", f"column {prompt_key!r} must be a non-empty list of messages, it is {prompt!r:.80}")
    try:
        messages = tuple(message_of(entry) for entry in prompt)
    except MessageError as error:
        raise refuse("bad_message", str(error)) from error
    if messages[-1].role is Role.ASSISTANT:
        raise refuse("ends_with_assistant", "the policy writes the assistant's turn")
    reward_model = _part(raw, "reward_model", dict, refuse) or {}
    rest = {name: value for name, value in raw.items() if name not in OWN_COLUMNS | {prompt_key}}
    return Task(
        uid=TaskUid(uid),
        prompt=messages,
        data_source=_part(raw, "data_source", str, refuse) or "unknown",
        ground_truth=reward_model.get("ground_truth"),
        extra_info={**rest, **(_part(raw, "extra_info", dict, refuse) or {})},
        agent_name=_part(raw, "agent_name", str, refuse),
        env_class=_part(raw, "env_class", str, refuse),
        data_class=_part(raw, "data_class", str, refuse),
    )


def message_of(entry: Any) -> Message:
    """One message of a row.

    Raises:
        MessageError: It is none, or says more than role and content can.
    """
    if not isinstance(entry, dict):
        raise MessageError(f"a message is an object with role and content, this is {type(entry).__name__}: {entry!r:.80}")
    if entry.get("tool_calls"):
        raise MessageError("write calls as text in the content, exactly as the model should write them, not as tool_calls")
    return Message.from_openai(entry)


def _part(raw: Mapping[str, Any], name: str, kind: type, refuse: Any) -> Any:
    value = raw.get(name)
    if value is not None and not isinstance(value, kind):
        raise refuse("bad_field", f"{name} must be {kind.__name__}, it is {type(value).__name__}: {value!r:.80}")
    return value
