"""The software-engineering part of a task: a project with a bug, and what says that it is mended.

A row holds it as `extra_info["swe"]`, an object with these fields. Nothing of it but `statement` reaches the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from psrl.errors import RowError
from psrl.types.swe_rules import RULES
from psrl.types.task import Task

SWE_KEY = "swe"
"""Of `Task.extra_info`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweProblem:
    """One project, its bug and its tests."""

    instance_id: str
    repo: str
    """Whose problems belong together: subsets are balanced over it."""
    task_kind: str
    """What the agent's YAML was written for, such as `swe` or `swe_tiny`; a run refuses rows of another kind."""
    statement: str
    """The issue, as the agent reads it."""
    image: str | None = None
    """Image that holds the project at `workdir`, pinned by digest (`name@sha256:...`); None: `files` hold it."""
    workdir: str = "/testbed"
    files: Mapping[str, str] = field(default_factory=dict)
    """Text by path below `workdir`; written there where there is no image."""
    gold_patch: str
    """A diff that mends it, as `git apply` takes it."""
    test_paths: tuple[str, ...]
    """Files and folders below `workdir` that belong to the tests: they are put back before grading, whatever a patch did to them."""
    test_patch: str = ""
    """A diff of the tests that is applied when grading, after `test_paths` were put back; the agent never sees it."""
    hidden_paths: tuple[str, ...] = ()
    """Files of the tests that are not there while the agent plays, and that no patch of its can hold; grading has them."""
    fail_to_pass: tuple[str, ...]
    """Tests that fail before the gold patch and pass after it, as the report names them."""
    pass_to_pass: tuple[str, ...] = ()
    """Tests that pass before and after."""
    test_command: str | None = None
    """Shell command whose output `log_parser` reads; None: psrl's own runner of pytest, with a report of its own."""
    log_parser: str | None = None
    """Of the output of `test_command`: the name of a parser of the `swebench` package."""
    setup_commands: tuple[str, ...] = ()
    """Shell commands of the image's owner, run in a fresh place before the episode and before grading."""
    timeout_s: float = 60.0
    """Of one run of the tests."""
    allow_network: bool = False

    @classmethod
    def of_task(cls, task: Task) -> SweProblem:
        """The problem of a task.

        Raises:
            RowError: `extra_info["swe"]` is missing or does not have the fields above.
        """
        return cls.of_row(task.extra_info.get(SWE_KEY), source=task.data_source, uid=task.uid)

    @classmethod
    def of_row(cls, raw: Any, *, source: str, uid: str) -> SweProblem:
        """The problem of a row's `extra_info["swe"]`; lists become tuples, nulls become the defaults (Parquet writes both).

        Raises:
            RowError: See `of_task`.
        """

        def refuse(detail: str) -> RowError:
            return RowError(source=source, row=-1, reason="bad_swe_problem", detail=f"{uid}: {detail}")

        if not isinstance(raw, Mapping):
            raise refuse(f"extra_info.{SWE_KEY} must be an object, it is {raw!r:.80}")
        known = {each.name: each for each in fields(cls)}
        unknown = sorted(set(raw) - set(known))
        if unknown:
            raise refuse(f"unknown field {unknown[0]!r}; known are {', '.join(known)}")
        given = {name: _plain(value) for name, value in raw.items() if value is not None}
        missing = [
            name for name, each in known.items() if each.default is MISSING and each.default_factory is MISSING and name not in given
        ]
        if missing:
            raise refuse(f"the field {missing[0]!r} is missing")
        for name, value in given.items():
            fits, words = RULES[name]
            if not fits(value):
                raise refuse(f"{name} must be {words}; it is {value!r:.80}")
        if ("test_command" in given) != ("log_parser" in given):
            raise refuse("test_command and log_parser come together: one's output is what the other reads")
        return cls(**given)

    def to_row(self) -> dict[str, Any]:
        """What `of_row` reads."""
        return asdict(self)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
