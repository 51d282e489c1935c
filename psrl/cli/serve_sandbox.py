"""`psrl serve sandbox`: code execution behind SandboxFusion's API."""

from __future__ import annotations

import asyncio
import ipaddress
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from psrl.cli.until_stopped import serve_until_stopped
from psrl.config.sandbox import SandboxConfig
from psrl.errors import ConfigError

if TYPE_CHECKING:
    from psrl.runtime.serve_sandbox import SandboxService

MAX_PORT = 65535


def serve_sandbox(
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=MAX_PORT, help="Of the first server, the others follow; 0 takes free ones.")] = 8080,
    num_servers: Annotated[int, typer.Option(min=1, help="Server processes, each with its own port and workers.")] = 1,
    num_workers: Annotated[int, typer.Option(min=0, help="Programs that one server runs at once; 0: two for each of its cores.")] = 0,
    max_queue: Annotated[int, typer.Option(min=0, help="Requests that wait in one server; further ones are answered 429.")] = 256,
    max_queue_s: Annotated[float, typer.Option(min=0.1, help="Longest wait for a place.")] = 60.0,
    wall_s: Annotated[float, typer.Option(help="Most seconds of a program; a request can ask for less.")] = 30.0,
    cpu_s: Annotated[float, typer.Option(help="Most CPU seconds of a program.")] = 30.0,
    memory_mb: Annotated[int, typer.Option(help="Most memory of a program; a request can ask for less.")] = 512,
    num_processes: Annotated[int, typer.Option(help="Most processes of a program.")] = 64,
    output_kb: Annotated[int, typer.Option(help="Head and tail of what a program prints are kept, up to so much.")] = 64,
    disk_mb: Annotated[int, typer.Option(help="Most that a program's files take.")] = 64,
    packages: Annotated[str, typer.Option(help="Installed distributions that programs can import, with commas between.")] = "",
    backend: Annotated[str, typer.Option(help="bubblewrap, docker or process (no isolation).")] = "bubblewrap",
    api_key_file: Annotated[Path | None, typer.Option(help="Holds the key that requests must bring; none: no key.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Log files; default runs/serve/<time>.")] = None,
) -> None:
    """Run programs for whoever posts them to /run_code (SandboxFusion's API). Ctrl-C and SIGTERM end everything."""
    from psrl.config.ranges import check_values
    from psrl.config.sandbox_checks import check_sandbox
    from psrl.config.tree import Config
    from psrl.runtime.serve_sandbox import SandboxService, SandboxServiceSettings

    if backend == "sandbox_fusion":
        raise ConfigError(key="--backend", value=backend, rule="is what asks this service", fix="set --backend bubblewrap")
    sandbox = SandboxConfig(
        backend=backend,
        num_workers=num_workers or max(2, 2 * (os.cpu_count() or 1) // num_servers),
        wall_s=wall_s,
        cpu_s=cpu_s,
        memory_mb=memory_mb,
        num_processes=num_processes,
        output_kb=output_kb,
        disk_mb=disk_mb,
        packages=[name.strip() for name in packages.split(",") if name.strip()],
    )
    config = Config(sandbox=sandbox)
    check_values(config)
    check_sandbox(config)
    _check_key(host, backend, api_key_file)
    if port and port + num_servers - 1 > MAX_PORT:
        rule = f"is the first of {num_servers} ports, and the last of them would be beyond {MAX_PORT}"
        raise ConfigError(key="--port", value=port, rule=rule, fix=f"set --port {MAX_PORT - num_servers + 1} or less, or --port 0")
    settings = SandboxServiceSettings(
        sandbox=sandbox,
        log_folder=log_dir or Path("runs") / "serve" / datetime.now().strftime("%Y%m%d-%H%M%S"),
        num_servers=num_servers,
        max_queue=max_queue,
        max_queue_s=max_queue_s,
        host=host,
        port=port,
        api_key_file=None if api_key_file is None else api_key_file.absolute(),
    )
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"logs: {settings.log_folder}")
    service = SandboxService(settings, report=console.print)
    asyncio.run(serve_until_stopped(_start_and_watch(service, console), service.stop, console))


def _check_key(host: str, backend: str, api_key_file: Path | None) -> None:
    """Whoever can reach the port can run programs here: this machine's users and its browsers' pages by default, who stay in the
    sandbox; with a key where it is everybody, or where there is no isolation.

    Raises:
        ConfigError: The file holds no key, or there is none and one is needed.
    """
    key = "--api-key-file"
    if api_key_file is not None:
        if not api_key_file.is_file() or not api_key_file.read_text().strip():
            raise ConfigError(key=key, value=str(api_key_file), rule="holds no key", fix=f"openssl rand -hex 32 > {api_key_file}")
        return
    if backend == "process":
        rule = "with --backend process whoever reaches the port, any web page in a browser here included, would be you"
        raise ConfigError(key=key, value=None, rule=rule, fix="openssl rand -hex 32 > sandbox.key, and give --api-key-file sandbox.key")
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        rule = f"with --host {host} whoever reaches the port would run programs here without a key"
        raise ConfigError(key=key, value=None, rule=rule, fix="openssl rand -hex 32 > sandbox.key, and give --api-key-file sandbox.key")


async def _start_and_watch(service: SandboxService, console: Console) -> None:
    await service.start()
    for url in service.urls:
        console.print(f"POST {url}/run_code")
    console.print("in a run:")
    console.print(f"sandbox.backend=sandbox_fusion 'sandbox.urls=[{','.join(service.urls)}]'")
    await service.watch()
