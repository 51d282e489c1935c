"""Which options of `psrl prepare swe` go together: what could have no effect is refused, so that nobody waits for it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from psrl.datasets.swe_rows import SweFormat
from psrl.errors import ConfigError

SPLITS = ("repo", "instance")
ROW_BACKENDS = ("docker",)
"""For published rows, whose projects are in images."""
TASK_BACKENDS = ("bubblewrap", "docker")
PLACES = ("source", "hub", "tasks")
OF_ROWS = ("split", "format", "allow_tags", "allow_network")
HUB_NAMES = {
    "full": "SWE-bench/SWE-bench",
    "lite": "SWE-bench/SWE-bench_Lite",
    "verified": "SWE-bench/SWE-bench_Verified",
    "gym": "SWE-Gym/SWE-Gym",
    "smith": "SWE-bench/SWE-smith",
}
"""Short names of `--hub`."""
OF_RUNS = ("k", "concurrency", "backend")


def check_options(
    *,
    source: Path | None,
    hub: str | None,
    tasks: Path | None,
    split: str | None,
    format: str | None,
    split_by: str,
    backend: str | None,
    allow_tags: bool,
    allow_network: bool,
    validate: bool,
    k: int | None,
    concurrency: int | None,
) -> None:
    """All but numbers.

    Raises:
        ConfigError: Names the option.
    """
    given = {"source": source, "hub": hub, "tasks": tasks, "split": split, "format": format, "backend": backend}
    given |= {"k": k, "concurrency": concurrency, "allow_tags": allow_tags or None, "allow_network": allow_network or None}
    named = {name: value for name, value in given.items() if value is not None}
    places = [f"--{name}" for name in PLACES if name in named]
    if len(places) != 1:
        rule = "rows come from exactly one of --source, --hub and --tasks"
        fix = "give --source FILE_OR_FOLDER, --hub NAME or --tasks FOLDER"
        raise ConfigError(key="--source", value=" ".join(places) or None, rule=rule, fix=fix)
    _check_choice("format", format, tuple(SweFormat))
    _check_choice("split_by", split_by, SPLITS)
    if tasks is not None:
        for name in OF_ROWS:
            if name in named:
                raise _without_effect(name, named[name], "is of published rows and has no effect on --tasks", f"leave {_flag(name)} out")
        _check_choice("backend", backend, TASK_BACKENDS)
        return
    if source is not None and split is not None and source.is_file():
        rule = "chooses among the files of a folder, and --source names one file"
        raise _without_effect("split", split, rule, "leave --split out, or name the folder")
    _check_choice("backend", backend, ROW_BACKENDS, why="is no backend for published rows, whose projects are in images")
    for name in OF_RUNS:
        if name in named and not validate:
            rule = "is of the runs of --validate, without which nothing is run"
            raise _without_effect(name, named[name], rule, f"add --validate, or leave {_flag(name)} out")


def check_numbers(*, subset: int, seed: int, test_share: float, k: int, concurrency: int) -> None:
    """Ranges.

    Raises:
        ConfigError: Names the option.
    """
    for name, value, least in (("subset", subset, 0), ("seed", seed, 0), ("k", k, 1), ("concurrency", concurrency, 1)):
        if value < least:
            raise ConfigError(key=f"--{name}", value=value, rule=f"must be at least {least}", fix=f"give --{name} {max(least, 1)}")
    if not 0 <= test_share <= 1:
        raise ConfigError(key="--test-share", value=test_share, rule="is a share of the problems", fix="give a number from 0 to 1")


def _check_choice(name: str, value: str | None, choices: Collection[str], *, why: str = "is no choice") -> None:
    if value is not None and value not in choices:
        raise ConfigError(key=_flag(name), value=value, rule=why, fix=f"give {_flag(name)} one of {', '.join(choices)}, or leave it out")


def _without_effect(name: str, value: object, rule: str, fix: str) -> ConfigError:
    return ConfigError(key=_flag(name), value=value, rule=rule, fix=fix)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
