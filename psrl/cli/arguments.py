"""Arguments that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[str, typer.Argument(help="A shipped recipe's name, a YAML file, or a folder with config.yaml.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, such as psrl.rollout_n=4.")]


def quoted(path: Path) -> str:
    """For Hydra's grammar, in which a path may hold characters that mean something."""
    escaped = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
