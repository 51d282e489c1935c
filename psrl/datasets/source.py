"""Tasks in a seeded order that survives a resume.

Invariant: the tasks that follow depend only on the data, the seed and the position (epoch, index), so a source that loads the state
of another goes on exactly where that one stopped.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from psrl.config.data import DataConfig
from psrl.datasets.generators import build_generator
from psrl.datasets.rows import LoadedRows, load_rows
from psrl.errors import CheckpointError, ConfigError
from psrl.telemetry.json_lines import encode_line
from psrl.types import Task, TaskUid

PromptTokens = Callable[[Task], int]
"""How many tokens the first prompt of a task has, tools included."""
_TRAIN_UID = re.compile(r"train-(?P<epoch>\d+)-(?P<row>\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceReport:
    """What was left out before the start; for the log and metrics."""

    num_train: int
    num_val: int
    bad_row_counts: dict[str, int]
    """By reason, over both partitions."""
    num_overlong: int
    """Prompts left out because they are too long."""


class TaskSource:
    """Gives training tasks without end and validation tasks always the same."""

    def __init__(self, train: Sequence[Task], val: Sequence[Task], *, shuffle: bool, seed: int, report: SourceReport) -> None:
        """`train` may not be empty; uids are made here."""
        assert train, "a source needs training tasks"
        self._train = tuple(train)
        self._val = tuple(replace(task, uid=TaskUid(f"val-0-{row}")) for row, task in enumerate(val))
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._index = 0
        self._order = self._order_of(0)
        self._fingerprint = fingerprint_of(self._train)
        self.report = report

    def next_tasks(self, count: int) -> list[Task]:
        """The next `count` tasks. Uids are `train-<epoch>-<row>`; an epoch gives every row once."""
        tasks = []
        for _ in range(count):
            if self._index == len(self._order):
                self._epoch, self._index = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            row = self._order[self._index]
            tasks.append(replace(self._train[row], uid=_uid_of(self._epoch, row)))
            self._index += 1
        return tasks

    def task_of(self, uid: str) -> Task:
        """The training task that had this uid, to issue it again; the position stays.

        Raises:
            CheckpointError: No task of this data has it.
        """
        if _TRAIN_UID.fullmatch(uid) is None or row_of(uid) >= len(self._train):
            raise CheckpointError(f"{uid} is none of the {len(self._train)} training tasks")
        return replace(self._train[row_of(uid)], uid=TaskUid(uid))

    def validation_tasks(self) -> list[Task]:
        """All of them, in the order of the files; uids are `val-0-<row>`."""
        return list(self._val)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        return {
            "epoch": self._epoch,
            "index": self._index,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_train": len(self._train),
            "tasks": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another source stopped.

        Raises:
            ConfigError: That source had another number of tasks, other tasks, another seed or another order.
        """
        for key, own in (("seed", self._seed), ("shuffle", self._shuffle), ("num_train", len(self._train))):
            if state[key] != own:
                raise ConfigError(
                    key=f"data.{key}",
                    value=own,
                    rule=f"the checkpoint was made with {state[key]!r}, so its place in the order means nothing here",
                    fix="resume with the data settings of the run, or start a new run",
                )
        if state["tasks"] != self._fingerprint:
            rule = "the training tasks are not those of the checkpoint: rows were added, changed or moved"
            fix = "resume with the files of the run, or start a new run"
            raise ConfigError(key="data.train_files", value=f"{len(self._train)} tasks", rule=rule, fix=fix)
        self._epoch, self._index = state["epoch"], state["index"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        return _order_of(epoch, num_train=len(self._train), seed=self._seed, shuffle=self._shuffle)


def row_of(uid: str) -> int:
    """Index of the training task that a source calls `train-<epoch>-<row>`."""
    match = _TRAIN_UID.fullmatch(uid)
    assert match is not None, f"{uid} is no uid of a training task"
    return int(match["row"])


def uids_given(state: Mapping[str, Any]) -> list[TaskUid]:
    """The training tasks that a source with this state has given, in order: what a run's record is held against.

    Example:
        Two rows, not shuffled, epoch 1, index 1 -> train-0-0, train-0-1, train-1-0.
    """
    given = []
    for epoch in range(state["epoch"] + 1):
        rows = _order_of(epoch, num_train=state["num_train"], seed=state["seed"], shuffle=state["shuffle"])
        given += [_uid_of(epoch, row) for row in (rows if epoch < state["epoch"] else rows[: state["index"]])]
    return given


def fingerprint_of(tasks: Sequence[Task]) -> str:
    """Equal for equal tasks in the same order, wherever their files lie."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(encode_line(asdict(replace(task, uid=TaskUid("")))))
    return digest.hexdigest()[:16]


def _order_of(epoch: int, *, num_train: int, seed: int, shuffle: bool) -> list[int]:
    rows = list(range(num_train))
    if shuffle:
        random.Random(f"{seed}-{epoch}").shuffle(rows)
    return rows


def _uid_of(epoch: int, row: int) -> TaskUid:
    return TaskUid(f"train-{epoch}-{row}")


def build_source(data: DataConfig, *, prompt_tokens: PromptTokens) -> TaskSource:
    """Tasks of files or of a generator, checked.

    Raises:
        ConfigError: Files and generator both or neither, too many bad rows, or a prompt that is too long.
    """
    train = _train_rows(data)
    val = _val_rows(data, num_bad_before=len(train.bad_rows))
    kept_train, overlong_train = _check_lengths(train.tasks, data, prompt_tokens)
    kept_val, overlong_val = _check_lengths(val.tasks, data, prompt_tokens)
    if not kept_train:
        rule = f"leaves no training task: all {len(train.tasks)} prompts are longer"
        raise ConfigError(key="data.max_prompt_length", value=data.max_prompt_length, rule=rule, fix="raise it")
    if data.train_max_samples:
        kept_train = kept_train[: data.train_max_samples]
    if data.val_max_samples:
        kept_val = kept_val[: data.val_max_samples]
    counts = dict(train.bad_row_counts)
    for reason, count in val.bad_row_counts.items():
        counts[reason] = counts.get(reason, 0) + count
    report = SourceReport(
        num_train=len(kept_train), num_val=len(kept_val), bad_row_counts=counts, num_overlong=overlong_train + overlong_val
    )
    return TaskSource(kept_train, kept_val, shuffle=data.shuffle, seed=data.seed, report=report)


def build_validation_tasks(data: DataConfig, *, prompt_tokens: PromptTokens | None) -> list[Task]:
    """The validation tasks alone, as a `TaskSource` gives them; what is trained on need not be there.

    Args:
        data: The section.
        prompt_tokens: None: nobody here knows the model's tokens, so that no prompt is too long.

    Raises:
        ConfigError: There is none, too many rows are bad, or a prompt is too long.
    """
    tasks: Sequence[Task] = _val_rows(data).tasks
    if prompt_tokens is not None:
        tasks, _ = _check_lengths(tasks, data, prompt_tokens)
    if not tasks:
        rule, fix = "there is no validation task", "set data.val_files or a generator; longer prompts: data.max_prompt_length"
        raise ConfigError(key="data.val_files", value=data.val_files, rule=rule, fix=fix)
    return [replace(task, uid=TaskUid(f"val-0-{row}")) for row, task in enumerate(tasks[: data.val_max_samples or None])]


def build_training_tasks(data: DataConfig, *, prompt_tokens: PromptTokens | None) -> list[Task]:
    """The training tasks alone, each once in the order of the files, as the first epoch names them; validation rows need not be there.

    Args:
        data: The section.
        prompt_tokens: As `build_validation_tasks`.

    Raises:
        ConfigError: There is none, too many rows are bad, or a prompt is too long.
    """
    tasks: Sequence[Task] = _train_rows(data).tasks
    if prompt_tokens is not None:
        tasks, _ = _check_lengths(tasks, data, prompt_tokens)
    if not tasks:
        rule, fix = "there is no training task", "name files with rows; longer prompts: data.max_prompt_length"
        raise ConfigError(key="data.train_files", value=data.train_files, rule=rule, fix=fix)
    return [replace(task, uid=_uid_of(0, row)) for row, task in enumerate(tasks[: data.train_max_samples or None])]


def _train_rows(data: DataConfig) -> LoadedRows:
    if (data.generator.name is None) == (not data.train_files):
        rule = "exactly one of data.train_files and data.generator.name must be set"
        raise ConfigError(key="data.train_files", value=data.train_files, rule=rule, fix="name files, or a generator")
    if data.generator.name is not None:
        made = build_generator(data.generator.name).train_tasks(data.generator.num_train, seed=data.generator.seed)
        return LoadedRows(tasks=tuple(made), bad_rows=())
    return load_rows(data.train_files, prompt_key=data.prompt_key, max_bad_rows=data.max_bad_rows, partition="train")


def _val_rows(data: DataConfig, *, num_bad_before: int = 0) -> LoadedRows:
    if data.generator.name is not None:
        made = build_generator(data.generator.name).val_tasks(data.generator.num_val, seed=data.generator.seed)
        return LoadedRows(tasks=tuple(made), bad_rows=())
    if not data.val_files:
        return LoadedRows(tasks=(), bad_rows=())
    return load_rows(
        data.val_files, prompt_key=data.prompt_key, max_bad_rows=data.max_bad_rows, partition="val", num_bad_before=num_bad_before
    )


def _check_lengths(tasks: Sequence[Task], data: DataConfig, prompt_tokens: PromptTokens) -> tuple[list[Task], int]:
    """(tasks that fit, how many do not). Nothing is cut.

    Raises:
        ConfigError: One does not fit and `data.filter_overlong_prompts` is off.
    """
    kept = []
    for task in tasks:
        length = prompt_tokens(task)
        if length <= data.max_prompt_length:
            kept.append(task)
        elif not data.filter_overlong_prompts:
            raise ConfigError(
                key="data.max_prompt_length",
                value=data.max_prompt_length,
                rule=f"the prompt of {task.uid} has {length} tokens",
                fix=f"set it to at least {length}, or data.filter_overlong_prompts=true to leave such tasks out",
            )
    return kept, len(tasks) - len(kept)
