"""What `psrl serve` does in both its forms: work until somebody says stop, and then end everything."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rich.console import Console


async def serve_until_stopped(working: Coroutine[Any, Any, None], stop: Callable[[], Awaitable[None]], console: Console) -> None:
    """Until SIGINT, SIGTERM or the end of something that cannot be mended, which is raised; `stop` ends what serves."""
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    serving = asyncio.create_task(working, name="serving")
    stopping = asyncio.create_task(told.wait(), name="stop")
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
    finally:
        for task in (serving, stopping):
            task.cancel()
        await asyncio.gather(serving, stopping, return_exceptions=True)
        await stop()
        console.print("stopped")
