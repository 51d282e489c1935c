"""The `psrl` program: its commands, and how an error becomes one line and an exit code.

Exit codes: 0 done, 1 a PsrlError, 2 wrong settings or usage, 130 interrupted before the runtime could save.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.text import Text

from psrl.cli.doctor import doctor
from psrl.cli.evaluate import evaluate
from psrl.cli.prepare import OWN_OPTIONS, PrepareCommand, prepare
from psrl.cli.regrade import regrade
from psrl.cli.rollout import rollout
from psrl.cli.serving import serving
from psrl.cli.sft import sft
from psrl.cli.simulate import simulate
from psrl.cli.train import train
from psrl.cli.view import view
from psrl.errors import ConfigError, PsrlError

DEBUG_FLAG = "--debug"
app = typer.Typer(
    name="psrl",
    help="Train language models by reinforcement learning to act. Add --debug anywhere for tracebacks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train")(train)
app.command("sft")(sft)
app.command("eval")(evaluate)
app.command("rollout")(rollout)
app.command("regrade")(regrade)
app.command("prepare", cls=PrepareCommand, context_settings=OWN_OPTIONS)(prepare)
app.command("doctor")(doctor)
app.add_typer(serving, name="serve")
app.command("simulate")(simulate)
app.command("view")(view)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = [word for word in given if word != DEBUG_FLAG]
    try:
        app(args=words, prog_name="psrl")
    except PsrlError as error:
        if len(words) != len(given):
            raise
        print_error(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        sys.exit(130)


def print_error(error: PsrlError) -> None:
    """Class and message on stderr; a ConfigError's fix on a line of its own."""
    console = Console(stderr=True, soft_wrap=True)
    text = Text.assemble((type(error).__name__, "bold red"), ": ")
    if isinstance(error, ConfigError):
        text.append_text(Text.assemble((error.key, "bold"), f" = {error.value!r}: {error.rule}\n", ("Fix: ", "bold green"), error.fix))
    else:
        text.append(str(error) or "no message")
        text.append("\n(--debug shows where it was raised)", style="dim")
    console.print(text)
