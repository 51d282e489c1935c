"""Small Python projects with one bug each: the tasks of `swe_tiny`, and scripted episodes to imitate.

Invariant: a training and a validation project never share a buggy function, whatever their seeds: a hash of the function says to which
split it belongs. The ten kinds of bugs come equally often.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from psrl.datasets.demonstrations import Demonstration
from psrl.datasets.generators import generators
from psrl.datasets.generators.swe_projects.episodes import DILIGENT, LAZY, demonstrate
from psrl.datasets.generators.swe_projects.project import Case, draw_case, problem_of
from psrl.datasets.generators.swe_projects.shapes import BugKind
from psrl.types import Message, Role, SweProblem, Task, TaskUid
from psrl.types.swe import SWE_KEY

LAZY_SHARE = 0.15
"""The last part of the demonstrations is lazy: the model first learns how to mend, then that it mostly need not read."""


@generators.register("swe_projects")
class SweProjectsGenerator:
    """Projects with a bug, mended by shell commands."""

    def train_tasks(self, count: int, *, seed: int) -> list[Task]:
        """All different."""
        return _tasks(f"swe-projects-train-{seed}", count, is_val=False)

    def val_tasks(self, count: int, *, seed: int) -> list[Task]:
        """All different."""
        return _tasks(f"swe-projects-val-{seed}", count, is_val=True)

    def demonstrations(self, count: int, *, seed: int) -> list[Demonstration]:
        """Diligent episodes, then lazy ones; to be learned in this order."""
        rng = random.Random(f"swe-projects-demonstrations-{seed}")
        num_diligent = count - round(count * LAZY_SHARE)
        cases = _cases(rng, is_val=False)
        return [demonstrate(next(cases), DILIGENT if index < num_diligent else LAZY, rng) for index in range(count)]


def _cases(rng: random.Random, *, is_val: bool) -> Iterator[Case]:
    """Cases without end, the kinds in turn."""
    while True:
        for kind in BugKind:
            yield draw_case(rng, kind, is_val=is_val)


def _tasks(name: str, count: int, *, is_val: bool) -> list[Task]:
    rng = random.Random(name)
    found: dict[str, Task] = {}
    cases = _cases(rng, is_val=is_val)
    while len(found) < count:
        case = next(cases)
        problem = problem_of(case, rng)
        found[problem.instance_id] = _task(problem, case.bug.shape.kind)
    return list(found.values())


def _task(problem: SweProblem, kind: BugKind) -> Task:
    return Task(
        uid=TaskUid(problem.instance_id),
        prompt=(Message(role=Role.USER, content=problem.statement),),
        data_source=f"swe_projects/{kind}",
        extra_info={SWE_KEY: problem.to_row()},
    )
