"""`psrl sft`: supervised fine-tuning on demonstrations."""

from psrl.cli.arguments import Overrides, Recipe


def sft(recipe: Recipe, overrides: Overrides = None) -> None:
    """Fine-tune RECIPE's model on its demonstrations (section `sft`) and save it to sft.output_path."""
    from psrl.config.load import Purpose, load_config
    from psrl.config.machine import read_machine
    from psrl.config.plan import make_sft_plan

    config = load_config(recipe, overrides or [], purpose=Purpose.SFT)
    make_sft_plan(config, read_machine())
    import typer

    from psrl.runtime.sft import run_sft

    typer.echo(f"model saved to {run_sft(config)}")
