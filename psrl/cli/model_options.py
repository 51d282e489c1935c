"""`--model FOLDER_OR_URL`, `--model-name`, `--api-key-env`: whose model plays."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psrl.cli.arguments import quoted
from psrl.config.endpoint import Endpoint, is_endpoint, read_endpoint, refuse_address_without_scheme
from psrl.errors import ConfigError

Model = Annotated[str | None, typer.Option("--model", help="Model folder, or URL of an OpenAI-compatible API; else the recipe's.")]
ModelName = Annotated[str | None, typer.Option("--model-name", help="With a URL: the model's name there.")]
ApiKeyEnv = Annotated[str | None, typer.Option("--api-key-env", help="With a URL: environment variable with the key.")]


def endpoint_of(model: str | None, model_name: str | None, api_key_env: str | None) -> Endpoint | None:
    """The endpoint that the options name; None where they name none.

    Raises:
        ConfigError: The address is none, or an option of endpoints stands beside a folder.
    """
    if model is not None and is_endpoint(model):
        return read_endpoint(model, model=model_name, api_key_env=api_key_env)
    for flag, value in (("--model-name", model_name), ("--api-key-env", api_key_env)):
        if value is not None:
            fix = "give --model http://HOST:PORT/v1, or leave it out"
            raise ConfigError(key=flag, value=value, rule="is of an API, and --model is no URL", fix=fix)
    return None


def overrides_of(model: str | None) -> list[str]:
    """The setting that a model's folder stands for; none where none is named.

    Raises:
        ConfigError: It looks like an address.
    """
    if model is None:
        return []
    refuse_address_without_scheme(model)
    return [f"train_actor_rollout_ref.model.path={quoted(Path(model))}"]
