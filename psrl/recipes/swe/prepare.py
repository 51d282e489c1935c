"""`psrl prepare swe`: rows of published data sets, or of a folder of projects of yours, to rows that psrl trains on.

Every problem that cannot be used is left out and counted by its reason; `left_out.jsonl` beside the rows says why each.
"""

from __future__ import annotations

import asyncio
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
from psrl.recipes.published_rows import rows_of_hub, rows_of_source
from psrl.recipes.retool.smollm2 import make_smollm2_folder
from psrl.recipes.row_files import LEFT_OUT_FILE
from psrl.recipes.swe.images import ASK_TIMEOUT_S, ImagePins
from psrl.recipes.swe.options import HUB_NAMES, check_numbers, check_options
from psrl.recipes.swe.row_files import tell_left_out, write_problems
from psrl.recipes.swe.splits import balanced_subset, split_problems
from psrl.recipes.swe.task_folders import read_task_folder, task_folders, with_tests_found
from psrl.recipes.swe.validation import Grader, Validator, all_of
from psrl.rewards.execution import ProjectGrader
from psrl.sandbox import BackendSandboxes
from psrl.sandbox.docker_engine import connected
from psrl.telemetry.progress import ProgressLine
from psrl.types import SweProblem

DEFAULT_OUTPUT = Path("data/swe")
MODEL_FOLDER = "SmolLM2-135M-Instruct"
TASKS_SOURCE = "tasks"
"""`data_source` of rows of a folder of projects."""
DEFAULT_K = 3
DEFAULT_CONCURRENCY = 2
GRADING_TIMEOUT_S = 3600.0
"""Of one run of a problem's tests with all around it; the tests alone have the problem's own limit."""


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
    k: int | None = None,
    concurrency: int | None = None,
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
        k: Runs of each kind; 3 if not given.
        concurrency: Problems that are run at once; 2 if not given.
        backend: Sandboxes to run them in; `docker` where problems have images, else `bubblewrap`, if not given.
        with_model: False leaves the model out, for those who bring their own or only evaluate.

    Raises:
        ConfigError: No rows, an option out of range or without effect, or no problem that can be used.
    """
    check_options(
        source=source, hub=hub, tasks=tasks, split=split, format=format, split_by=split_by, backend=backend, allow_tags=allow_tags,
        allow_network=allow_network, validate=validate, k=k, concurrency=concurrency,
    )  # fmt: skip
    k = DEFAULT_K if k is None else k
    concurrency = DEFAULT_CONCURRENCY if concurrency is None else concurrency
    check_numbers(subset=subset, seed=seed, test_share=test_share, k=k, concurrency=concurrency)
    folder = output or DEFAULT_OUTPUT
    backend = backend or ("bubblewrap" if tasks else "docker")
    if tasks is not None:
        prepared, left_out = asyncio.run(_of_tasks(tasks, backend, k=k, num_at_once=concurrency))
    else:
        rows = raw_rows(source, hub, split=split)
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
    tell_left_out(left_out, folder)
    if not problems:
        given = ("--tasks", tasks) if tasks else ("--hub", hub) if hub is not None else ("--source", source)
        raise _nothing_usable(*given, left_out, folder)
    train, test = split_problems(problems, test_share, seed=seed, by=split_by)
    parts = {folder / "train.jsonl": train, folder / "test.jsonl": test}
    write_problems(parts, sources)
    for file, part in parts.items():
        print(f"{len(part)} problems of {len({problem.repo for problem in part})} repositories written to {file}")
    if with_model:
        print(f"model written to {make_smollm2_folder(folder / MODEL_FOLDER)}")
    return folder


def _nothing_usable(option: str, value: object, left_out: Sequence[RowError], folder: Path) -> ConfigError:
    if not left_out:
        return ConfigError(key=option, value=str(value), rule="has no row", fix="name one that holds rows")
    rule = f"gives no usable problem {dict(Counter(error.reason for error in left_out))}"
    return ConfigError(key=option, value=str(value), rule=rule, fix=f"mend what {folder / LEFT_OUT_FILE} names")


def problems_of_rows(
    rows: Iterable[tuple[str, int, Any]], *, swe_format: SweFormat | None = None, allow_network: bool = False
) -> tuple[list[Prepared], list[RowError]]:
    """(problems of published rows, why the other rows are left out); of two with one id the first is kept."""
    prepared: dict[str, Prepared] = {}
    left_out: list[RowError] = []
    for source, row, raw in rows:
        try:
            problem = problem_of_raw_row(raw, source=source, row=row, swe_format=swe_format, allow_network=allow_network)
            SweProblem.of_row(problem.to_row(), source=source, uid=problem.instance_id)  # as a run will read it
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


async def _validated(
    problems: Sequence[SweProblem], backend: str, *, k: int, num_at_once: int, cache: Path
) -> tuple[list[SweProblem], list[RowError]]:
    async with _grading(backend, num_at_once, has_images=any(problem.image for problem in problems)) as grader:
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
                found = await with_tests_found(read_task_folder(folder), grader, k=k)
            return SweProblem.of_row(found.to_row(), source=folder.name, uid=folder.name)  # as a run will read it
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

    async with _grading(backend, num_at_once, has_images=False) as grader:
        found = await all_of(counted(folder, grader) for folder in folders)
    kept = [Prepared(problem=each, data_source=TASKS_SOURCE) for each in found if isinstance(each, SweProblem)]
    return kept, [each for each in found if isinstance(each, RowError)]


@asynccontextmanager
async def _grading(backend: str, num_at_once: int, *, has_images: bool) -> AsyncIterator[Grader]:
    """A grader that keeps no verdict, so that every run is one.

    Raises:
        SandboxUnavailableError: The backend cannot be used here; a single image that cannot is a problem's own fault.
    """
    section = SandboxConfig(backend=backend, packages=[] if has_images else ["pytest"])
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


def raw_rows(source: Path | None, hub: str | None, *, split: str | None) -> Iterator[tuple[str, int, Any]]:
    """Published rows: of the hub where one of its sets is named, else of files."""
    if hub is not None:
        return rows_of_hub(HUB_NAMES.get(hub, hub), split=split or "test")
    return rows_of_source(source or Path(), split=split)
