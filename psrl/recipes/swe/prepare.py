"""`psrl prepare swe`: rows of published data sets, or of a folder of projects of yours, to rows that psrl trains on.

Every problem that cannot be used is left out and counted by its reason; `left_out.jsonl` beside the rows says why each.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from psrl.config.reward import ExecutionConfig
from psrl.config.sandbox import SandboxConfig, engine_url_of
from psrl.datasets.swe_rows import SweFormat, format_of, problem_of_raw_row
from psrl.errors import ConfigError, EnvironmentFault, RewardError, RowError, SandboxError
from psrl.recipes.retool.smollm2 import make_smollm2_folder
from psrl.recipes.swe.images import ASK_TIMEOUT_S, ImagePins
from psrl.recipes.swe.sources import rows_of_hub, rows_of_source
from psrl.recipes.swe.splits import balanced_subset, split_problems
from psrl.recipes.swe.task_folders import read_task_folder, task_folders, with_tests_found
from psrl.recipes.swe.validation import Grader, Validator, all_of
from psrl.rewards.execution import ProjectGrader
from psrl.sandbox import BackendSandboxes
from psrl.sandbox.docker_engine import connected
from psrl.telemetry.progress import ProgressLine
from psrl.types import SweProblem
from psrl.types.swe import SWE_KEY

DEFAULT_OUTPUT = Path("data/swe")
MODEL_FOLDER = "SmolLM2-135M-Instruct"
TASKS_SOURCE = "tasks"
"""`data_source` of rows of a folder of projects."""
SPLITS = ("repo", "instance")
BACKENDS = ("bubblewrap", "docker", "process")
GRADING_TIMEOUT_S = 3600.0
"""Of one run of a problem's tests with all around it; the tests alone have the problem's own limit."""
NAMED = 10
"""Problems that are named in print; all of them are in left_out.jsonl."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A problem, and which data set it is of."""

    problem: SweProblem
    data_source: str


def prepare(
    source: Path | None = None,
    output: Path | None = None,
    *,
    hub: str | None = None,
    split: str | None = None,
    format: str | None = None,
    tasks: Path | None = None,
    subset: int = 0,
    seed: int = 1,
    test_share: float = 0.1,
    split_by: str = "repo",
    allow_tags: bool = False,
    allow_network: bool = False,
    validate: bool = False,
    k: int = 3,
    concurrency: int = 2,
    backend: str | None = None,
    with_model: bool = True,
) -> Path:
    """Write train.jsonl and test.jsonl below `output`, and return that folder.

    Args:
        source: File or folder with rows of SWE-bench, SWE-Gym or SWE-smith.
        output: Where to write; `data/swe` if not given, which is where config.yaml looks.
        hub: Instead of `source`: a data set of the hub, or `verified`, `lite`, `full`, `gym`, `smith`.
        split: Of the hub's data set (`test` if not given), or a part of the names of the folder's files.
        format: `swe_bench`, `swe_gym` or `swe_smith`; told by each row's columns if not given.
        tasks: Instead of `source`: a folder of projects.
        subset: At most so many problems, balanced over the repositories; 0 takes all.
        seed: Of the subset and of what is held out.
        test_share: Of the problems that are held out.
        split_by: `repo` holds whole repositories out, `instance` single problems.
        allow_tags: Keep images whose digest is not known by their tag.
        allow_network: The sandboxes of these problems may use the network.
        validate: Run gold and null `k` times each, and leave problems out whose tests do not tell them apart.
        k: Runs of each kind.
        concurrency: Problems that are run at once.
        backend: Sandboxes to run them in; `docker` where problems have images, else `bubblewrap`, if not given.
        with_model: False leaves the model out, for those who bring their own or only evaluate.

    Raises:
        ConfigError: No rows, an option out of range, or no problem that can be used.
    """
    _check_choices(source=source, hub=hub, tasks=tasks, split=split, format=format, split_by=split_by, backend=backend)
    _check_numbers(subset=subset, seed=seed, test_share=test_share, k=k, concurrency=concurrency)
    folder = output or DEFAULT_OUTPUT
    backend = backend or ("bubblewrap" if tasks else "docker")
    if tasks is not None:
        prepared, left_out = asyncio.run(_of_tasks(tasks, backend, k=k, num_at_once=concurrency))
    else:
        rows = rows_of_hub(hub, split=split or "test") if hub else rows_of_source(source or Path(), split=split)
        prepared, left_out = problems_of_rows(rows, swe_format=SweFormat(format) if format else None, allow_network=allow_network)
        prepared, not_pinned = with_pinned_images(prepared, allow_tags=allow_tags)
        left_out += not_pinned
    sources = {each.problem.instance_id: each.data_source for each in prepared}
    problems = [each.problem for each in prepared]
    if subset:
        problems = balanced_subset(problems, subset, seed=seed)
    if validate:
        problems, broken = asyncio.run(_validated(problems, backend, k=k, num_at_once=concurrency, cache=folder / "validation.jsonl"))
        left_out += broken
    _tell_left_out(left_out, folder)
    if not problems:
        given = ("--tasks", tasks) if tasks else ("--hub", hub) if hub else ("--source", source)
        rule = f"gives no usable problem {dict(Counter(error.reason for error in left_out))}"
        raise ConfigError(key=given[0], value=str(given[1]), rule=rule, fix=f"mend what {folder / 'left_out.jsonl'} names")
    for name, part in zip(("train", "test"), split_problems(problems, test_share, seed=seed, by=split_by), strict=True):
        num_repos = len({problem.repo for problem in part})
        write_problems(folder / f"{name}.jsonl", part, sources)
        print(f"{len(part)} problems of {num_repos} repositories written to {folder / f'{name}.jsonl'}")
    if with_model:
        print(f"model written to {make_smollm2_folder(folder / MODEL_FOLDER)}")
    return folder


def problems_of_rows(
    rows: Iterable[tuple[str, int, Any]], *, swe_format: SweFormat | None = None, allow_network: bool = False
) -> tuple[list[Prepared], list[RowError]]:
    """(problems of published rows, why the other rows are left out); of two with one id the first is kept."""
    prepared: dict[str, Prepared] = {}
    left_out: list[RowError] = []
    for source, row, raw in rows:
        try:
            problem = problem_of_raw_row(raw, source=source, row=row, swe_format=swe_format, allow_network=allow_network)
            if problem.instance_id in prepared:
                raise RowError(source=source, row=row, reason="duplicate", detail=f"{problem.instance_id} was there before")
        except RowError as error:
            left_out.append(error)
            continue
        assert isinstance(raw, Mapping), raw
        prepared[problem.instance_id] = Prepared(problem=problem, data_source=str(swe_format or format_of(raw)))
    return list(prepared.values()), left_out


def with_pinned_images(prepared: Sequence[Prepared], *, allow_tags: bool) -> tuple[list[Prepared], list[RowError]]:
    """(problems whose image is named by its digest, those whose image is not); with `allow_tags` all are kept."""
    pins = ImagePins()
    kept: list[Prepared] = []
    left_out: list[RowError] = []
    for each in prepared:
        name = each.problem.image
        assert name is not None, each.problem.instance_id
        pinned = pins.pinned(name) or (name if allow_tags else None)
        if pinned is not None:
            kept.append(replace(each, problem=replace(each.problem, image=pinned)))
        else:
            detail = f"{name}: the Docker Engine of this machine knows no digest ({pins.why_not or 'it does not hold the image'})"
            left_out.append(RowError(source=each.problem.instance_id, row=-1, reason="image_not_pinned", detail=detail))
    pins.close()
    if any(error.reason == "image_not_pinned" for error in left_out):
        print("images are pinned where this machine's Docker Engine holds them: docker pull them first, or give --allow-tags")
    return kept, left_out


def write_problems(file: Path, problems: Sequence[SweProblem], sources: Mapping[str, str]) -> None:
    """The JSONL that `data.train_files` reads. The file appears whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as lines:
        for problem in problems:
            row = {
                "prompt": [{"role": "user", "content": problem.statement}],
                "data_source": sources[problem.instance_id],
                "extra_info": {SWE_KEY: problem.to_row()},
            }
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
    unfinished.rename(file)


async def _validated(
    problems: Sequence[SweProblem], backend: str, *, k: int, num_at_once: int, cache: Path
) -> tuple[list[SweProblem], list[RowError]]:
    async with _grading(backend, num_at_once) as grader:
        return await Validator(grader, k=k, num_at_once=num_at_once, cache=cache).run(problems)


async def _of_tasks(root: Path, backend: str, *, k: int, num_at_once: int) -> tuple[list[Prepared], list[RowError]]:
    """(problems of the folders of `root`, why the others are left out)."""
    folders = task_folders(root)
    progress = ProgressLine("tested", len(folders))
    free = asyncio.Semaphore(num_at_once)
    num_left_out = 0

    async def one(folder: Path, grader: Grader) -> SweProblem | RowError:
        try:
            async with free:
                return await with_tests_found(read_task_folder(folder), grader, k=k)
        except RowError as error:
            return error
        except (SandboxError, EnvironmentFault, RewardError) as error:
            return RowError(source=folder.name, row=-1, reason="cannot_be_run", detail=f"{type(error).__name__}: {error}")

    async def counted(folder: Path, grader: Grader) -> SweProblem | RowError:
        nonlocal num_left_out
        found = await one(folder, grader)
        num_left_out += isinstance(found, RowError)
        progress.done(f"{num_left_out} left out")
        return found

    async with _grading(backend, num_at_once) as grader:
        found = await all_of(counted(folder, grader) for folder in folders)
    kept = [Prepared(problem=each, data_source=TASKS_SOURCE) for each in found if isinstance(each, SweProblem)]
    return kept, [each for each in found if isinstance(each, RowError)]


def _tell_left_out(left_out: Sequence[RowError], folder: Path) -> None:
    file = folder / "left_out.jsonl"
    file.unlink(missing_ok=True)
    if not left_out:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as lines:
        for error in left_out:
            entry = {"source": error.source, "row": error.row, "reason": error.reason, "detail": error.detail}
            lines.write(json.dumps(entry, ensure_ascii=False) + "\n")
    counts = Counter(error.reason for error in left_out).most_common()
    print(f"{len(left_out)} left out: {', '.join(f'{reason} {count}' for reason, count in counts)}; each in {file}")
    for line in _named(left_out):
        print(line)


def _named(left_out: Sequence[RowError]) -> Iterator[str]:
    for error in left_out[:NAMED]:
        where = error.source if error.row < 0 else f"{error.source} row {error.row}"
        yield f"  {where}: {error.reason}: {' '.join(error.detail.split()):.160}"
    if len(left_out) > NAMED:
        yield f"  and {len(left_out) - NAMED} more"


@asynccontextmanager
async def _grading(backend: str, num_at_once: int) -> AsyncIterator[Grader]:
    """A grader that keeps no verdict, so that every run is one.

    Raises:
        SandboxUnavailableError: The backend cannot be used here; a single image that cannot is a problem's own fault.
    """
    section = SandboxConfig(backend=backend, packages=[] if backend == "docker" else ["pytest"])
    sandboxes = BackendSandboxes(section)
    if backend == "docker":
        (await asyncio.to_thread(connected, engine_url_of(section), timeout_s=ASK_TIMEOUT_S)).close()
    else:
        await sandboxes.preflight()
    settings = ExecutionConfig(timeout_s=GRADING_TIMEOUT_S, memory_mb=4096, num_processes=512, disk_mb=4096, cache_size=0)
    # Problems ask for the network only where --allow-network was given.
    grader = ProjectGrader(sandboxes, settings, num_concurrent=num_at_once, allow_network=True)
    try:
        yield grader
    finally:
        await grader.close()


def _check_choices(**given: Any) -> None:
    places = [f"--{name}" for name in ("source", "hub", "tasks") if given[name] is not None]
    if len(places) != 1:
        rule = "rows come from exactly one of --source, --hub and --tasks"
        fix = "give --source FILE_OR_FOLDER, --hub NAME or --tasks FOLDER"
        raise ConfigError(key="--source", value=" ".join(places) or None, rule=rule, fix=fix)
    if given["tasks"] is not None:
        for name in ("split", "format"):
            if given[name] is not None:
                rule = "is of published rows and has no effect on --tasks"
                raise ConfigError(key=f"--{name}", value=given[name], rule=rule, fix=f"leave --{name} out")
    for name, choices in (("format", tuple(SweFormat)), ("split_by", SPLITS), ("backend", BACKENDS)):
        if given[name] is not None and given[name] not in choices:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(key=option, value=given[name], rule="is no choice", fix=f"give {option} one of {', '.join(choices)}")


def _check_numbers(*, subset: int, seed: int, test_share: float, k: int, concurrency: int) -> None:
    for name, value, least in (("subset", subset, 0), ("seed", seed, 0), ("k", k, 1), ("concurrency", concurrency, 1)):
        if value < least:
            raise ConfigError(key=f"--{name}", value=value, rule=f"must be at least {least}", fix=f"give --{name} {max(least, 1)}")
    if not 0 <= test_share <= 1:
        raise ConfigError(key="--test-share", value=test_share, rule="is a share of the problems", fix="give a number from 0 to 1")
