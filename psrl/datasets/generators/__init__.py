"""Tasks made by a program instead of files: `data.generator.name` and `sft.generator`.

A generator is made anew for each use and must give the same tasks for the same seed in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from psrl.datasets.demonstrations import Demonstration
from psrl.registry import Registry
from psrl.types import Task


class TaskGenerator(Protocol):
    """Makes tasks of one kind. The training and the validation tasks never share a prompt."""

    def train_tasks(self, count: int, *, seed: int) -> list[Task]:
        """`count` tasks; uids are the source's business and may be anything."""

    def val_tasks(self, count: int, *, seed: int) -> list[Task]:
        """`count` tasks, all different."""

    def demonstrations(self, count: int, *, seed: int) -> Sequence[Demonstration]:
        """`count` scripted episodes on training tasks; empty where the generator has none."""


generators: Registry[Callable[[], TaskGenerator]] = Registry("task generator", key="data.generator.name")


def build_generator(name: str) -> TaskGenerator:
    """The generator of a registered name or a dotted path.

    Raises:
        ConfigError: No such generator.
    """
    import psrl.datasets.generators.arithmetic
    import psrl.datasets.generators.swe_projects  # noqa: F401  (both register themselves)

    return generators.resolve(name)()
