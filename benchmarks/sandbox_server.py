"""2,000 snippets at concurrency 32 through `psrl serve sandbox`: throughput, p99, none lost, none left over.

    python benchmarks/sandbox_server.py [--snippets 2000] [--concurrency 32] [--workers 2] [--servers 1] [--rounds 4]

The same snippets run through the in-process pool of interpreters (`sandbox.backend=bubblewrap`) with as many sandboxes, and through psrl's
client of such services (`sandbox.backend=sandbox_fusion`), in turns, so that a machine whose load changes is the same for all three; the
ratios are what to look at. Most snippets are what a policy writes to calculate; a tenth raises, exits or prints much, one in a hundred
leaves a process that sleeps for five minutes, one in five hundred never ends and is ended after a second.
"""

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import orjson

from psrl.config.sandbox import SandboxConfig
from psrl.protocols import ProgramRunner
from psrl.runtime.serve_sandbox import SandboxService, SandboxServiceSettings
from psrl.sandbox import build_interpreter
from psrl.sandbox.reaper import labelled_processes

WALL_S = 1.0
RUNS = ("benchmark_pool", "sandbox")
"""What sandboxes are labelled with: the pool's, and the server's."""


@dataclass(frozen=True, kw_only=True)
class Snippet:
    """A program, and the last line that it must print; None: it is ended."""

    code: str
    last_line: str | None


@dataclass(kw_only=True)
class Measured:
    """One way to run snippets."""

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    num_wrong: int = 0

    def report(self) -> dict[str, float]:
        """Of all rounds."""
        ordered = sorted(self.latencies_s)
        at = {f"p{share}_ms": 1000 * ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 99)}
        return {"snippets": len(ordered), "per_s": len(ordered) / self.seconds, **at, "wrong_or_lost": self.num_wrong}


def snippet(number: int, rng: random.Random) -> Snippet:
    """The same for the same number and seed; each prints something of its own, so that no answer can be another's."""
    a, b = rng.randint(10, 999), rng.randint(10, 999)
    if number % 500 == 7:
        return Snippet(code=f"print({number})\nwhile True: pass", last_line=None)
    if number % 100 == 3:
        code = f"import subprocess\nsubprocess.Popen(['sleep', '300'], start_new_session=True)\nprint({number})"
        return Snippet(code=code, last_line=str(number))
    if number % 30 == 1:
        return Snippet(code=f"print({number})\n[][{a}]", last_line=str(number))
    if number % 30 == 11:
        return Snippet(code=f"import sys\nprint({number})\nsys.exit({a % 7})", last_line=str(number))
    if number % 30 == 21:
        return Snippet(code=f"for i in range(200): print('line', i, {a})\nprint({number})", last_line=str(number))
    kind = number % 3
    if kind == 0:
        return Snippet(code=f"print({a} * {b} + {number})", last_line=str(a * b + number))
    if kind == 1:
        code = f"from fractions import Fraction\nx = sum(Fraction(1, n) for n in range(1, {a % 40 + 2}))\nprint(x)\nprint({number})"
        return Snippet(code=code, last_line=str(number))
    code = f"import math\nn = {a * b}\nprint([p for p in range(2, 200) if n % p == 0])\nprint(math.gcd({a}, {b}) + {number})"
    return Snippet(code=code, last_line=str(math.gcd(a, b) + number))


def is_right(given: Snippet, stdout: str, killed_by: str | None) -> bool:
    """Whether this is the answer of this very snippet."""
    if given.last_line is None:
        return killed_by == "wall_time"
    return killed_by is None and stdout.splitlines()[-1:] == [given.last_line]


async def through_runner(runner: ProgramRunner, snippets: list[Snippet], concurrency: int, measured: Measured) -> None:
    """By psrl's own callers."""

    async def one(given: Snippet) -> bool:
        result = await runner.run_program(given.code)
        return is_right(given, result.stdout.decode(), result.killed_by)

    await _timed(one, snippets, concurrency, measured)


async def through_http(url: str, snippets: list[Snippet], concurrency: int, measured: Measured) -> None:
    """By anybody's: one POST a snippet."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:

        async def one(given: Snippet) -> bool:
            body = orjson.dumps({"code": given.code, "language": "python", "run_timeout": WALL_S})
            async with http.post(f"{url}/run_code", data=body, headers={"content-type": "application/json"}) as answer:
                ran = orjson.loads(await answer.read())["run_result"]
            return is_right(given, ran["stdout"], "wall_time" if ran["status"] == "TimeLimitExceeded" else None)

        await _timed(one, snippets, concurrency, measured)


async def _timed(one: Callable[[Snippet], Awaitable[bool]], snippets: list[Snippet], concurrency: int, measured: Measured) -> None:
    places = asyncio.Semaphore(concurrency)

    async def timed(given: Snippet) -> None:
        async with places:
            began = time.perf_counter()
            measured.num_wrong += not await one(given)
            measured.latencies_s.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*map(timed, snippets))
    measured.seconds += time.perf_counter() - began


def num_left() -> int:
    """Processes of these sandboxes, and what snippets left, that are there after everything has been stopped."""
    labels = [label for label in labelled_processes().values() if label.startswith(RUNS)]
    return len(labels)


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """See the module."""
    rng = random.Random(1)
    snippets = [snippet(number, rng) for number in range(options.snippets)]
    settings = SandboxConfig(num_workers=options.workers * options.servers, wall_s=WALL_S)
    ways = {name: Measured() for name in ("pool", "server", "client")}
    with TemporaryDirectory(prefix="psrl-benchmark-") as folder:
        served = SandboxServiceSettings(
            sandbox=SandboxConfig(num_workers=options.workers, wall_s=WALL_S),
            log_folder=Path(folder),
            num_servers=options.servers,
            port=0,
        )
        service = SandboxService(served, report=print)
        pool = build_interpreter(settings, run=RUNS[0])
        await asyncio.gather(service.start(), pool.preflight())
        remote = SandboxConfig(backend="sandbox_fusion", urls=list(service.urls), num_workers=options.concurrency, wall_s=WALL_S)
        client = build_interpreter(remote)
        await client.preflight()
        try:
            for number in range(options.rounds):
                part = snippets[number :: options.rounds]
                await through_runner(pool, part, options.concurrency, ways["pool"])
                halves = [part[index :: options.servers] for index in range(options.servers)]
                share = max(1, options.concurrency // options.servers)
                each = [Measured() for _ in halves]
                began = time.perf_counter()
                await asyncio.gather(
                    *(through_http(url, half, share, into) for url, half, into in zip(service.urls, halves, each, strict=True))
                )
                ways["server"].seconds += time.perf_counter() - began
                for into in each:
                    ways["server"].latencies_s += into.latencies_s
                    ways["server"].num_wrong += into.num_wrong
                await through_runner(client, part, options.concurrency, ways["client"])
        finally:
            await client.stop()
            await pool.stop()
            await service.stop()
    reports = {name: {key: round(value, 1) for key, value in way.report().items()} for name, way in ways.items()}
    rates = {name: way.report()["per_s"] for name, way in ways.items()}
    return {
        **reports,
        "server_over_pool": round(rates["server"] / rates["pool"], 2),
        "client_over_pool": round(rates["client"] / rates["pool"], 2),
        "left_over": num_left(),
    }


def main() -> None:
    """Print one JSON line a way, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snippets", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2, help="sandboxes of a server")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    for name, value in asyncio.run(measure(parser.parse_args())).items():
        print(json.dumps({name: value}))


if __name__ == "__main__":
    main()
