"""`psrl serve`: a model behind an OpenAI API whose every token is captured."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.status import Status

from psrl.cli.until_stopped import serve_until_stopped
from psrl.config.model import ModelConfig
from psrl.config.rollout import MultiTurnConfig, RolloutConfig
from psrl.config.rollout_gateway import RolloutGatewayConfig
from psrl.errors import ConfigError, GatewayError

if TYPE_CHECKING:
    from psrl.runtime.serve import Figures, Server, ServeSettings

LINE_INTERVAL_S = 2.0
MAX_MODEL_LEN = 2048
"""Unless --max-model-len says otherwise."""
SESSION_IDLE_TIMEOUT_S = 7 * 86400.0


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL_PATH_OR_RECIPE", help="A Hugging Face folder, or a recipe's name or file.")],
    host: Annotated[str, typer.Option(help="Of the session router; engines and SMG stay on loopback.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Of the session router; 0 takes a free one.")] = 8000,
    engine: Annotated[str, typer.Option(help="torch, vllm or scripted.")] = "torch",
    script: Annotated[Path | None, typer.Option(help="What the scripted engine answers.")] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Engine processes.")] = 1,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that an engine decodes at once.")] = 16,
    max_model_len: Annotated[int, typer.Option(min=0, help="Tokens of a conversation; 0: the model's own, at most 2048.")] = 0,
    temperature: Annotated[float, typer.Option(min=0, help="Of the session that is opened for you.")] = 1.0,
    tool_format: Annotated[str | None, typer.Option(help="How the model writes tool calls; default: the recipe's, or hermes.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Log files and the admin key; default runs/serve/<time>.")] = None,
) -> None:
    """Serve a model as an OpenAI API in sessions. Ctrl-C ends everything."""
    if engine not in ("torch", "vllm", "scripted"):
        raise ConfigError(key="--engine", value=engine, rule="is no choice", fix="set --engine torch, vllm or scripted")
    if (engine == "scripted") == (script is None):
        rule = "is what the scripted engine answers, and only it"
        raise ConfigError(key="--script", value=str(script), rule=rule, fix="give --engine scripted and --script FILE together, or neither")
    model_settings, own_format = _model_of(model)
    from psrl.runtime.serve import Server, ServeSettings

    length = max_model_len or _longest(model_settings.path)
    rollout = RolloutConfig(
        name=engine,
        script_path=None if script is None else str(script.absolute()),
        num_replicas=replicas,
        max_num_seqs=max_num_seqs,
        temperature=temperature,
        prompt_length=length // 2,
        response_length=length - length // 2,
    )
    rollout.multi_turn.format = tool_format or own_format
    settings = ServeSettings(
        model=model_settings,
        rollout=rollout,
        limits=RolloutGatewayConfig(session_idle_timeout_s=SESSION_IDLE_TIMEOUT_S),
        log_folder=log_dir or Path("runs") / "serve" / datetime.now().strftime("%Y%m%d-%H%M%S"),
        host=host,
        port=port,
    )
    console = Console(soft_wrap=True, highlight=False)
    server = Server(settings, report=console.print)
    asyncio.run(serve_until_stopped(_start_and_show(server, settings, console, secrets.randbelow(2**31)), server.stop, console))


async def _start_and_show(server: Server, settings: ServeSettings, console: Console, seed: int) -> None:
    console.print(f"logs: {settings.log_folder}")
    with Status("starting", console=console) as status:
        await server.start(lambda what: console.print(f"up: {what}"))
        address = await server.open_session("served", seed=seed)
        console.print(f"session router: {server.url} (POST /sessions with the key in {server.admin_key_file} opens more)")
        console.print("a session, ready for any OpenAI client:")
        console.print(f"export OPENAI_BASE_URL={address.base_url}")
        console.print(f"export OPENAI_API_KEY={address.api_key}")
        watching = asyncio.create_task(server.watch(), name="watch")
        showing = asyncio.create_task(_show(server, status), name="live line")
        try:
            await asyncio.wait({watching, showing}, return_when=asyncio.FIRST_COMPLETED)
            for task in (watching, showing):
                if task.done():
                    task.result()
        finally:
            watching.cancel()
            showing.cancel()
            await asyncio.gather(watching, showing, return_exceptions=True)


async def _show(server: Server, status: Status) -> None:
    """Keep the live line; a router that does not answer is the watch's business."""
    before = None
    while True:
        with contextlib.suppress(GatewayError):
            now = await server.figures()
            status.update(_line(now, before))
            before = now
        await asyncio.sleep(LINE_INTERVAL_S)


def _line(now: Figures, before: Figures | None) -> str:
    rate = 0.0 if before is None else (now.num_tokens - before.num_tokens) / (now.at_s - before.at_s)
    return f"{now.num_sessions} sessions, {now.num_turns} turns, {now.num_tokens} tokens, {rate:.0f} tokens/s"


def _model_of(given: str) -> tuple[ModelConfig, str]:
    """(model, tool-call format): of the folder itself, or of a recipe.

    Raises:
        ConfigError: It is neither.
    """
    if (Path(given) / "config.json").is_file():
        return ModelConfig(path=str(Path(given).absolute())), MultiTurnConfig().format
    from psrl.config.load import load_config

    config = load_config(given, [])
    return config.train_actor_rollout_ref.model, config.gen_actor_rollout_ref.rollout.multi_turn.format


def _longest(model_path: str) -> int:
    from psrl.engines.torch.architecture import read_architecture

    return min(MAX_MODEL_LEN, read_architecture(Path(model_path)).max_position_embeddings)
