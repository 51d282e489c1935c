"""`DataProto`: a batch of tasks in the shape that verl's users know.

`batch` holds tensors, `non_tensor_batch` arrays of objects, both with the same first dimension. Per-task choices travel in
`non_tensor_batch["env_class"]`, `["data_class"]` and `["agent_name"]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from psrl.errors import MessageError
from psrl.types.ids import TaskUid
from psrl.types.message import Message
from psrl.types.task import Task

OPTIONAL_KEYS = ("agent_name", "env_class", "data_class")


@dataclass(frozen=True, kw_only=True)
class DataProto:
    """Rows as columns."""

    batch: dict[str, Any] = field(default_factory=dict)
    non_tensor_batch: dict[str, Sequence[Any]] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {key: len(column) for key, column in {**self.batch, **self.non_tensor_batch}.items()}
        if len(set(lengths.values())) > 1:
            raise MessageError(f"DataProto columns have different lengths: {lengths}")

    def __len__(self) -> int:
        columns = {**self.batch, **self.non_tensor_batch}
        return len(next(iter(columns.values()))) if columns else 0

    @staticmethod
    def from_tasks(tasks: Sequence[Task]) -> DataProto:
        """Turn tasks into columns."""
        columns: dict[str, Sequence[Any]] = {
            "uid": [task.uid for task in tasks],
            "raw_prompt": [[message.to_template() for message in task.prompt] for task in tasks],
            "data_source": [task.data_source for task in tasks],
            "reward_model": [{"ground_truth": task.ground_truth} for task in tasks],
            "extra_info": [task.extra_info for task in tasks],
            "agent_name": [task.agent_name for task in tasks],
            "env_class": [task.env_class for task in tasks],
            "data_class": [task.data_class for task in tasks],
        }
        return DataProto(non_tensor_batch=columns)

    def tasks(self) -> list[Task]:
        """Turn columns into tasks; the per-task choices are optional columns."""
        rows = self.non_tensor_batch
        chosen = {key: rows[key] if key in rows else [None] * len(self) for key in OPTIONAL_KEYS}
        return [
            Task(
                uid=TaskUid(rows["uid"][i]),
                prompt=tuple(Message.from_openai(message) for message in rows["raw_prompt"][i]),
                data_source=rows["data_source"][i],
                ground_truth=rows["reward_model"][i]["ground_truth"],
                extra_info=dict(rows["extra_info"][i]),
                agent_name=chosen["agent_name"][i],
                env_class=chosen["env_class"][i],
                data_class=chosen["data_class"][i],
            )
            for i in range(len(self))
        ]
