"""What a finished command reports: the fields of its summary, one a line."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table


def print_summary(summary: Any) -> None:
    """Print a summary dataclass; fields that are None are left out."""
    table = Table.grid(padding=(0, 2))
    for name, value in dataclasses.asdict(summary).items():
        if value is not None:
            table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    Console(soft_wrap=True).print(table)
