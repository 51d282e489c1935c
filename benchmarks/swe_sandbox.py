"""What a sandbox costs an agent that works in a project: start, one command after the other, and many sandboxes at once.

    python benchmarks/swe_sandbox.py [--commands 100] [--starts 5] [--at-once 8]

psrl's `docker` and `bubblewrap` beside mini-SWE-agent's own DockerEnvironment (a `docker exec` per command), all in this process, on the
same image and with the same command line (`bash -c COMMAND`). The ratio is what to look at. Needs a Docker Engine and the `docker` command.
"""

import argparse
import asyncio
import logging
import os
import statistics
import time
from collections.abc import Awaitable, Callable

import docker

from psrl.config.sandbox import SandboxConfig, engine_url_of
from psrl.sandbox import BackendSandboxes
from psrl.sandbox.local_image import local_image
from psrl.types import SandboxLimits, SandboxSpec

COMMAND = "echo hello"
LIMITS = SandboxLimits(wall_s=30.0, cpu_s=30.0)

Run = Callable[[], Awaitable[None]]


class Psrl:
    """One of psrl's backends."""

    def __init__(self, backend: str, image: str | None) -> None:
        self.name = f"psrl {backend}"
        self._sandboxes = BackendSandboxes(SandboxConfig(backend=backend, max_starts=64), run="benchmark")
        self._spec = SandboxSpec(image=image, workdir="/testbed", limits=LIMITS)

    async def start(self) -> tuple[Run, Run]:
        """A place: what runs one command in it, and what removes it."""
        sandbox = self._sandboxes.make(self._spec)
        await sandbox.start()

        async def run() -> None:
            result = await sandbox.run(["bash", "-c", COMMAND])
            assert result.stdout == b"hello\n", result

        return run, sandbox.stop


class MiniSweAgent:
    """mini-SWE-agent's environment, which blocks: each call in a thread, as psrl's loop would run it."""

    name = "mini-SWE-agent docker"

    def __init__(self, image: str) -> None:
        os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
        from minisweagent.environments.docker import DockerEnvironment

        self._make = lambda: DockerEnvironment(
            image=image,
            cwd="/tmp",
            interpreter=["bash", "-c"],
            run_args=["--rm", "--network", "none", "--init"],
            logger=logging.getLogger("mini"),
        )

    async def start(self) -> tuple[Run, Run]:
        """A place: what runs one command in it, and what removes it."""
        environment = await asyncio.to_thread(self._make)

        async def run() -> None:
            result = await asyncio.to_thread(environment.execute, {"command": COMMAND})
            assert result["output"] == "hello\n", result

        async def stop() -> None:
            # `cleanup` only begins to stop it, in the background, with ten seconds of grace: the container is removed here.
            await asyncio.to_thread(lambda: docker.from_env().api.remove_container(environment.container_id, force=True))
            environment.container_id = None

        return run, stop


async def timed(run: Run) -> float:
    began = time.perf_counter()
    await run()
    return time.perf_counter() - began


async def measure(place: Psrl | MiniSweAgent, options: argparse.Namespace) -> dict[str, float]:
    starts, stops, first_run = [], [], None
    for _ in range(options.starts):
        began = time.perf_counter()
        run, stop = await place.start()
        await run()
        starts.append(time.perf_counter() - began)
        if first_run is None:
            first_run = sorted([await timed(run) for _ in range(options.commands)])
        stops.append(await timed(stop))
    assert first_run is not None, "at least one start"
    began = time.perf_counter()
    places = await asyncio.gather(*(place.start() for _ in range(options.at_once)))
    many_start = time.perf_counter() - began

    async def commands(run: Run) -> list[float]:
        return [await timed(run) for _ in range(options.commands // 4)]

    began = time.perf_counter()
    spans = [span for spans in await asyncio.gather(*(commands(run) for run, _ in places)) for span in spans]
    rate = len(spans) / (time.perf_counter() - began)
    await asyncio.gather(*(stop() for _, stop in places))
    return {
        "start and first command, s": statistics.median(starts),
        "stop, s": statistics.median(stops),
        "command p50, ms": 1000 * statistics.median(first_run),
        "command p99, ms": 1000 * first_run[int(0.99 * (len(first_run) - 1))],
        f"{options.at_once} at once: start of all, s": many_start,
        f"{options.at_once} at once: command p50, ms": 1000 * statistics.median(spans),
        f"{options.at_once} at once: commands/s": rate,
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", type=int, default=100)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=8)
    options = parser.parse_args()
    client = docker.APIClient(base_url=engine_url_of(SandboxConfig()), timeout=60)
    image = local_image(client, (), tell=print)
    client.close()
    places = (MiniSweAgent(image), Psrl("docker", image), Psrl("bubblewrap", None))
    measured = {place.name: await measure(place, options) for place in places}
    base = measured[places[0].name]
    for name in base:
        cells = [f"{place.name} {measured[place.name][name]:8.2f}" for place in places]
        # Above 1: psrl is faster.
        ratios = [(base[name] / measured[place.name][name]) ** (-1 if name.endswith("/s") else 1) for place in places[1:]]
        print(f"{name:34s} {'  '.join(cells)}  times as fast: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")


if __name__ == "__main__":
    asyncio.run(main())
