"""The files that `psrl prepare swe` leaves: the rows of training and test, and `left_out.jsonl` with what became none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from psrl.errors import RowError
from psrl.recipes.row_files import write_left_out, write_rows
from psrl.types import SweProblem
from psrl.types.swe import SWE_KEY

NAMED = 10
"""Problems that are named in print; all of them are in left_out.jsonl."""


def write_problems(parts: Mapping[Path, Sequence[SweProblem]], sources: Mapping[str, str]) -> None:
    """The JSONL files that `data.train_files` reads: all of them appear whole, or every one stays as it was.

    Args:
        parts: Problems by file.
        sources: `data_source` by id.
    """
    write_rows({file: [_row_of(problem, sources[problem.instance_id]) for problem in problems] for file, problems in parts.items()})


def tell_left_out(left_out: Sequence[RowError], folder: Path) -> None:
    """Count them by reason and name the first ones in print; each with its reason goes to `left_out.jsonl`."""
    file = write_left_out(folder, left_out)
    if not left_out:
        return
    counts = Counter(error.reason for error in left_out).most_common()
    print(f"{len(left_out)} left out: {', '.join(f'{reason} {count}' for reason, count in counts)}; each in {file}")
    for line in _named(left_out):
        print(line)


def _row_of(problem: SweProblem, data_source: str) -> dict[str, object]:
    prompt = [{"role": "user", "content": problem.statement}]
    return {"prompt": prompt, "data_source": data_source, "extra_info": {SWE_KEY: problem.to_row()}}


def _named(left_out: Sequence[RowError]) -> Iterator[str]:
    for error in left_out[:NAMED]:
        where = error.source if error.row < 0 else f"{error.source} row {error.row}"
        # Rows are other people's: what they hold must not steer a terminal.
        text = "".join(each if each.isprintable() else "?" for each in " ".join(error.detail.split()))
        yield f"  {where.encode('utf-8', 'backslashreplace').decode()}: {error.reason}: {text:.160}"
    if len(left_out) > NAMED:
        yield f"  and {len(left_out) - NAMED} more"
