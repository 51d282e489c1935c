"""`psrl doctor`: does everything that a run needs work on this machine?"""

from typing import Annotated

import typer


def doctor(recipe: Annotated[str, typer.Argument(help="Recipe whose settings are checked.")] = "retool_tiny") -> None:
    """Start each part of RECIPE for a moment and say what works and how to mend what does not."""
    from rich.console import Console
    from rich.text import Text

    from psrl.config.load import load_config

    config = load_config(recipe, [])
    from psrl.runtime.doctor import run_checks

    console = Console(soft_wrap=True)
    num_failed = 0
    for result in run_checks(config):
        mark = Text("ok  ", "bold green") if result.is_ok else Text("FAIL", "bold red")
        console.print(Text.assemble(mark, f" {result.name}: {result.detail}"))
        if not result.is_ok:
            num_failed += 1
            console.print(Text.assemble(("     fix: ", "bold"), result.fix))
    if num_failed:
        console.print(f"{num_failed} checks failed")
        raise typer.Exit(1)
