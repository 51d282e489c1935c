"""What the session router and SMG add to a turn, beside the engine alone; and what a long session's rendering costs.

`python benchmarks/gateway.py [--turns 1000] [--concurrency 1,32,256] [--model FOLDER]` starts the scripted engine (it answers at once),
SMG and the router, each a process of its own, and prints for each concurrency the latency of a turn asked of the engine, of the engine
through SMG, and of the router in front of both; and how many turns the router makes per second of its own CPU time (one core). Then one
session of 128 turns and 69k tokens: seconds of rendering beside the generation time at 20 ms a token, and whether the second half of
its turns costs as much as the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import orjson
import psutil

from psrl.chat import load_renderer
from psrl.gateway.smg import Smg
from psrl.processes.child import ChildProcess
from psrl.processes.kept import RestartLimit
from psrl.session_client.client import SessionClient
from psrl.types import EpisodeUid, GroupUid, PolicyVersion, SamplingContract, SessionAddress, SessionLimits, SessionSpec

DEFAULT_MODEL = Path("psrl/recipes/retool_tiny/model")
ANSWER = "The answer is five, and so is the sum of two and three. "
START_LIMIT_S = 60.0
TOKEN_S = 0.020
LONG_TURNS, LONG_TOKENS = 128, 69_000
LIMITS = SessionLimits(max_turns=10_000_000, prompt_length=100_000, response_length=10_000_000)

Ask = Callable[[int], Awaitable[None]]


def spec(number: int) -> SessionSpec:
    return SessionSpec(
        uid=EpisodeUid(f"bench-{number}-e0"),
        group=GroupUid(f"bench-{number}"),
        admitted_version=PolicyVersion(0),
        is_validation=False,
        contract=SamplingContract(seed=number),
        limits=LIMITS,
    )


async def latencies(ask: Ask, *, concurrency: int, turns: int) -> tuple[list[float], float]:
    """(seconds of each turn, seconds of all) with `concurrency` clients that each ask again when they have their answer."""
    taken: list[float] = []
    left = iter(range(turns))

    async def client(number: int) -> None:
        for _ in left:
            began = time.perf_counter()
            await ask(number)
            taken.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(concurrency)))
    return taken, time.perf_counter() - began


def shown(name: str, taken: list[float], seconds: float, base: float | None) -> str:
    p50, p99 = statistics.median(taken), statistics.quantiles(taken, n=100)[98]
    added = "" if base is None else f"   added p50 {1e3 * (p50 - base):6.2f} ms"
    return f"  {name:22} p50 {1e3 * p50:7.2f} ms  p99 {1e3 * p99:7.2f} ms  {len(taken) / seconds:7.0f} turns/s{added}"


class Bench:
    """The processes, and ways to ask each of them for the same turn."""

    def __init__(self, engine: ChildProcess, smg: Smg, router: ChildProcess, client: SessionClient, http: aiohttp.ClientSession) -> None:
        self.engine, self.smg, self.router, self.client, self.http = engine, smg, router, client, http

    def generate(self, url: str, prompt_ids: list[int]) -> Ask:
        body = orjson.dumps({"token_ids": prompt_ids, "sampling_params": {"max_tokens": 512, "logprobs": 0}, "request_id": "bench"})

        async def ask(number: int) -> None:
            headers = {"content-type": "application/json", "x-smg-routing-key": str(number)}
            async with self.http.post(f"{url}/generate", data=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

        return ask

    def chat(self, addresses: list[SessionAddress], messages: list[dict]) -> Ask:
        body = orjson.dumps({"model": "policy", "messages": messages})

        async def ask(number: int) -> None:
            address = addresses[number]
            headers = {"authorization": f"Bearer {address.api_key}", "content-type": "application/json"}
            async with self.http.post(f"{address.base_url}/chat/completions", data=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

        return ask

    async def fresh(self, count: int) -> list[SessionAddress]:
        return [await self.client.open(spec(number)) for number in range(count)]

    async def compare(self, prompt_ids: list[int], messages: list[dict], *, concurrency: int, turns: int) -> None:
        print(f"concurrency {concurrency}, {turns} turns each way")
        base = None
        for name, ask in (
            ("engine alone", self.generate(self.engine.url, prompt_ids)),
            ("SMG + engine", self.generate(self.smg.url, prompt_ids)),
        ):
            await latencies(ask, concurrency=concurrency, turns=max(concurrency, turns // 10))
            taken, seconds = await latencies(ask, concurrency=concurrency, turns=turns)
            print(shown(name, taken, seconds, base), flush=True)
            base = base or statistics.median(taken)
        addresses = await self.fresh(concurrency)
        ask = self.chat(addresses, messages)
        await latencies(ask, concurrency=concurrency, turns=max(concurrency, turns // 10))
        router = psutil.Process(self.router.pid)
        before = sum(router.cpu_times()[:2])
        taken, seconds = await latencies(ask, concurrency=concurrency, turns=turns)
        cpu_s = sum(router.cpu_times()[:2]) - before
        print(shown("router + SMG + engine", taken, seconds, base))
        print(f"  the router's own CPU: {1e3 * cpu_s / turns:.2f} ms a turn, {turns / cpu_s:.0f} turns per second of one core", flush=True)
        for address in addresses:
            await self.client.close(address, abort=False)

    async def long_session(self, filler: str) -> None:
        (address,) = await self.fresh(1)
        messages: list[dict] = [{"role": "user", "content": "Begin."}]
        seen = [await self.rendering_s()]
        num_sampled = num_tokens = 0
        for _ in range(LONG_TURNS):
            answer = await self.client.chat(address, {"model": "policy", "messages": messages}, timeout_s=60)
            num_sampled += answer["usage"]["completion_tokens"]
            num_tokens = answer["usage"]["total_tokens"]
            messages += [answer["choices"][0]["message"], {"role": "user", "content": filler}]
            seen.append(await self.rendering_s())
        record = await self.client.close(address, abort=False)
        assert len(record.trajectories) == 1, "the session branched"
        rendering_s, generation_s = seen[-1] - seen[0], num_sampled * TOKEN_S
        half = LONG_TURNS // 2
        first, second = seen[half] - seen[0], seen[-1] - seen[half]
        print(f"one session of {LONG_TURNS} turns, {num_tokens} tokens, {num_sampled} of them sampled")
        share = rendering_s / generation_s
        print(f"  rendering {rendering_s:.3f} s beside a generation of {generation_s:.1f} s at 20 ms a token: {share:.3%}")
        print(f"  second half of the turns beside the first: {second:.3f} / {first:.3f} s = {second / first:.2f} (linear 1, quadratic 3)")

    async def rendering_s(self) -> float:
        async with self.http.get(f"{self.router.url}/metrics") as answer:
            lines = (line.rpartition(" ") for line in (await answer.text()).splitlines())
            return next((float(value) for name, _, value in lines if name == "psrl_gateway_rendering_seconds_total"), 0.0)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--concurrency", default="1,32,256")
    options = parser.parse_args()
    renderer = load_renderer(str(options.model), tool_format="hermes")
    answer_ids = [*renderer.template.encode(ANSWER), renderer.stop_token_ids[0]]
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        (folder / "script.json").write_text(json.dumps({"turns": [{"token_ids": answer_ids}], "max_model_len": 200_000}))
        (folder / "key").write_text(secrets.token_urlsafe(16))
        engine = ChildProcess(
            "engine",
            [sys.executable, "-m", "psrl.engines.scripted", "--script", str(folder / "script.json")],
            log_path=folder / "engine.log",
        )
        smg = Smg(folder / "smg.log", limit=RestartLimit())
        router = None
        try:
            await engine.start(START_LIMIT_S)
            await smg.start([engine.url])
            argv = [sys.executable, "-m", "psrl.gateway", "--model-path", str(options.model), "--engine-url", smg.url]
            router = ChildProcess("router", [*argv, "--admin-key-file", str(folder / "key")], log_path=folder / "router.log")
            await router.start(START_LIMIT_S)
            client = SessionClient(router.url, admin_key=(folder / "key").read_text())
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                bench = Bench(engine, smg, router, client, http)
                messages = [{"role": "user", "content": "What is 2 + 3?"}]
                prompt_ids = renderer.template.encode("What is 2 + 3?" * 4)
                for concurrency in map(int, options.concurrency.split(",")):
                    await bench.compare(prompt_ids, messages, concurrency=concurrency, turns=max(options.turns, 4 * concurrency))
                per_turn = LONG_TOKENS // LONG_TURNS - len(answer_ids)
                unit = "5 + 7 = 12. "
                await bench.long_session(unit * (per_turn // len(renderer.template.encode(unit))))
            await client.aclose()
        finally:
            if router is not None:
                router.stop()
            await smg.stop()
            engine.stop()


if __name__ == "__main__":
    asyncio.run(main())
