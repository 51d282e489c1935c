"""`psrl doctor`: does everything that a run needs work on this machine? `psrl doctor tokens`: what does a chat template do?"""

from typing import Annotated

import typer

TOKENS = "tokens"


def doctor(
    recipe: Annotated[str, typer.Argument(help="Recipe whose settings are checked; or `tokens`.")] = "retool_tiny",
    model: Annotated[str | None, typer.Option(help="With `tokens`: the model's folder.")] = None,
    tool_format: Annotated[str | None, typer.Option("--format", help="With `tokens`: the tool-call format that will be used.")] = None,
) -> None:
    """Start each part of RECIPE for a moment and say what works and how to mend what does not.

    `psrl doctor tokens --model FOLDER [--format NAME]` says what that tokenizer and its chat template do to the tokens of a conversation.
    """
    from rich.console import Console
    from rich.text import Text

    if recipe == TOKENS:
        if model is None:
            raise typer.BadParameter("is needed: psrl doctor tokens --model FOLDER", param_hint="--model")
        from psrl.chat.token_report import token_lines

        Console(soft_wrap=True, highlight=False, markup=False, emoji=False).print("\n".join(token_lines(model, tool_format)))
        return
    if model is not None or tool_format is not None:
        raise typer.BadParameter("goes with `tokens`: psrl doctor tokens --model FOLDER", param_hint="--model, --format")
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
