"""A tool that never returns, now and then. Copied beside a recipe's YAML, where agent workers find it."""

import asyncio
import random
import time
from pathlib import Path

from psrl.tools.code_interpreter import CodeInterpreter


class HangingInterpreter(CodeInterpreter):
    """The recipe's interpreter, but a share of its calls never end: those that `wait` leave the event loop alone, those that `block` do
    not. Each of them leaves a line in `log`."""

    def __init__(self, program_runner, *, share: float, how: str, log: str) -> None:
        super().__init__(program_runner)
        self._share, self._how, self._log = share, how, Path(log)

    async def call(self, arguments):
        """Run the program, or never return."""
        if random.random() < self._share:
            with self._log.open("a") as log:
                log.write(f"{time.time()}\n")
            if self._how == "block":
                time.sleep(86400)  # noqa: ASYNC251 - the fault
            await asyncio.sleep(86400)
        return await super().call(arguments)
