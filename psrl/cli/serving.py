"""`psrl serve`: a model (`psrl serve MODEL_PATH_OR_RECIPE`), or code execution (`psrl serve sandbox`)."""

from __future__ import annotations

import click
import typer
from typer.core import TyperGroup

from psrl.cli.serve import serve
from psrl.cli.serve_sandbox import serve_sandbox

MODEL, SANDBOX = "model", "sandbox"


class ServeGroup(TyperGroup):
    """`sandbox` names a command; everything else is what `psrl serve MODEL` is given, its options and --help included."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Without anything there is only help."""
        return super().parse_args(context, args or ["--help"])

    def resolve_command(self, context: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """See the class."""
        if args[0] == SANDBOX:
            return super().resolve_command(context, args)
        command = self.get_command(context, MODEL)
        assert command is not None, "registered below"
        return "", command, args  # errors and help say `psrl serve`


serving = typer.Typer(
    cls=ServeGroup,
    help="A model behind an OpenAI API (psrl serve MODEL), or code execution (psrl serve sandbox).",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    no_args_is_help=False,
)
serving.command(MODEL)(serve)
serving.command(SANDBOX)(serve_sandbox)
