"""Starts each part of a run for a moment and says what works: one line a part, with the fix where it does not.

A check ends in a CheckResult whatever its part does; every wait has an end. Nothing of it is left when `run_checks` returns.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from psrl.chat.probe import probe
from psrl.config.gateway_checks import starts_gateway
from psrl.config.machine import read_machine
from psrl.config.plan import make_plan
from psrl.config.sandbox import engine_url_of
from psrl.config.tree import Config
from psrl.data_plane.columns import COLUMNS, TrajectoryTags
from psrl.data_plane.contract import DTYPES, TrajectoryRow
from psrl.data_plane.transfer_queue import TransferQueueDataPlane
from psrl.engine_client.client import HttpReplica
from psrl.errors import ConfigError, DataPlaneError, EngineError, PsrlError, SandboxUnavailableError
from psrl.gateway.smg import Smg
from psrl.processes.child import ChildProcess
from psrl.processes.kept import RestartLimit
from psrl.runtime.build import run_renderer
from psrl.runtime.cluster import ray_of
from psrl.runtime.engines import engine_command
from psrl.sandbox.build import build_interpreter
from psrl.sandbox.docker_engine import DockerEngine
from psrl.sandbox.leftover_containers import engine_answers
from psrl.types import GenerateRequest, Message, Role, SamplingParams

MIN_FREE_DISK_BYTES = 2 * 2**30
"""Ray's session folder, checkpoints and the run folder."""
SANDBOX_DEADLINE_S = 60.0
NUM_TOKENS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """What one check found."""

    name: str
    is_ok: bool
    detail: str
    fix: str = ""
    """What to do; only where it is not ok."""


class CheckFailed(PsrlError):
    """A part answered, but not as it must. Carries the fix."""

    def __init__(self, message: str, *, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


def run_checks(config: Config) -> Iterator[CheckResult]:
    """All checks in order, the cheap ones first, each result as it comes; a failed one does not stop the others."""
    checks: tuple[tuple[str, Callable[[Config], str], str], ...] = (
        ("cores and memory", check_machine, "use a larger machine, or lower the settings that the message names"),
        ("disk", check_disk, "free space, or set trainer.default_local_dir to another disk"),
        ("tokenizer contract", check_tokenizer, "use a model folder with tokenizer.json and a chat template"),
        ("sandbox", check_sandbox, "install bubblewrap (apt-get install bubblewrap); for trusted code only: sandbox.backend=process"),
        ("Docker Engine", check_docker, "apt-get install docker.io, then as root systemctl start docker, or dockerd"),
        ("engine", check_engine, "read the engine's last words above; check model.path and memory"),
        ("SMG", check_smg, "check that pip shows smg, and that no firewall closes loopback"),
        ("TransferQueue", check_transfer_queue, "check that pip shows TransferQueue and ray, and that no firewall closes loopback"),
    )
    for name, check, fix in checks:
        yield _run(name, check, config, fix)


def _run(name: str, check: Callable[[Config], str], config: Config, fix: str) -> CheckResult:
    began = time.perf_counter()
    try:
        detail = check(config)
    except (ConfigError, CheckFailed) as error:
        return CheckResult(name=name, is_ok=False, detail=str(error), fix=error.fix)
    except Exception as error:  # noqa: BLE001 - the boundary is named in tests/test_limits.py
        return CheckResult(name=name, is_ok=False, detail=f"{type(error).__name__}: {error}", fix=fix)
    return CheckResult(name=name, is_ok=True, detail=f"{detail} ({time.perf_counter() - began:.1f} s)")


def check_machine(config: Config) -> str:
    """The plan of processes fits into cores and memory, also into what is free now."""
    machine = read_machine()
    plan = make_plan(config, machine)
    free = min(psutil.virtual_memory().available, machine.memory_bytes)
    needed = f"the run needs about {plan.memory_bytes / 2**30:.1f} GiB"
    if plan.memory_bytes > free:
        raise CheckFailed(f"{needed}, {free / 2**30:.1f} GiB are free", fix="end other programs")
    return f"{needed}, {free / 2**30:.1f} GiB are free; {machine.num_cores} cores, {machine.num_gpus} GPUs"


def check_disk(config: Config) -> str:
    """Room where runs are written and in the folder for temporary files."""
    lines = []
    for path in (Path(config.trainer.default_local_dir), Path(tempfile.gettempdir())):
        existing = next(folder for folder in (path, *path.parents) if folder.is_dir())
        free = shutil.disk_usage(existing).free
        if free < MIN_FREE_DISK_BYTES:
            raise CheckFailed(f"{existing} has {free / 2**30:.1f} GiB left", fix=f"leave at least {MIN_FREE_DISK_BYTES / 2**30:.0f} GiB")
        lines.append(f"{existing} {free / 2**30:.0f} GiB free")
    return ", ".join(lines)


def check_tokenizer(config: Config) -> str:
    """The renderer's ids are the template's own at every boundary that the template allows."""
    report = probe(run_renderer(config))
    if report.faults:
        faults = "; ".join(f"{case.boundary}: {case.detail}" for case in report.faults)
        raise CheckFailed(f"rendered ids differ from the chat template's: {faults}", fix="use a model whose chat template is append-only")
    return "; ".join(line.strip() for line in report.lines())


def check_sandbox(config: Config) -> str:
    """`print(2+3)` prints 5."""

    async def preflight() -> float:
        interpreter = build_interpreter(config.sandbox, run="doctor")
        try:
            async with asyncio.timeout(SANDBOX_DEADLINE_S):
                await interpreter.preflight()
                began = time.perf_counter()
                result = await interpreter.run_program("print(2+3)")
        finally:
            await interpreter.stop()
        if result.stdout != b"5\n":
            raise SandboxUnavailableError(f"a second print(2+3) gave {result.stdout!r}, {result.stderr!r}")
        return time.perf_counter() - began

    seconds = asyncio.run(preflight())
    return f"{config.sandbox.backend}: print(2+3) printed 5 in {1000 * seconds:.0f} ms"


def check_docker(config: Config) -> str:
    """The Engine answers, where the recipe uses one, and says what it is."""
    url = engine_url_of(config.sandbox)
    if config.sandbox.backend != "docker":
        return f"{'one answers' if engine_answers(url) else 'none answers'}; this recipe does without"
    info = asyncio.run(asyncio.wait_for(DockerEngine(url).ask("say what it is", lambda client: client.info()), SANDBOX_DEADLINE_S))
    missing = [name for name in ("MemoryLimit", "PidsLimit", "CpuCfsQuota") if not info[name]]
    if missing:
        raise CheckFailed(
            f"the Engine cannot bound {', '.join(missing)}", fix="let it manage cgroups: run dockerd as root, or rootless with cgroup v2"
        )
    return f"version {info['ServerVersion']}, {info['Driver']}, cgroup v{info['CgroupVersion']}, {info['ContainersRunning']} containers run"


def check_engine(config: Config) -> str:
    """The engine starts, answers and samples a few tokens with finite logprobs."""
    rollout = config.gen_actor_rollout_ref.rollout
    prompt = run_renderer(config).open([Message(role=Role.USER, content="2+3?")], [])

    async def ask(folder: Path) -> str:
        argv = engine_command(config.train_actor_rollout_ref.model, rollout)
        process = ChildProcess("engine", argv, log_path=folder / "engine.log")
        try:
            await process.start(rollout.startup_timeout_s)
            replica = HttpReplica(process.url, request_timeout_s=rollout.request_timeout_s)
            try:
                sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=1)
                request = GenerateRequest(request_id="doctor", token_ids=prompt, sampling=sampling, session="doctor")
                generation = await replica.generate(request)
            finally:
                await replica.close()
        finally:
            await asyncio.to_thread(process.stop)
        if not generation.token_ids or not all(math.isfinite(logprob) for logprob in generation.logprobs):
            raise EngineError(f"answered with {len(generation.token_ids)} tokens and logprobs {generation.logprobs}")
        return f"{rollout.name}: {len(generation.token_ids)} tokens after a prompt of {len(prompt)} in {generation.latency_s:.2f} s"

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(ask(Path(folder)))


def check_smg(config: Config) -> str:
    """The gateway's SMG starts and answers its control routes."""

    async def start(folder: Path) -> float:
        smg = Smg(folder / "smg.log", limit=RestartLimit())
        began = time.perf_counter()
        try:
            await smg.start([])
            await smg.workers()
            return time.perf_counter() - began
        finally:
            await smg.stop()

    with tempfile.TemporaryDirectory() as folder:
        seconds = asyncio.run(start(Path(folder)))
    return f"ready in {seconds:.1f} s; {'this recipe uses it' if starts_gateway(config) else 'this recipe does without'}"


def check_transfer_queue(config: Config) -> str:
    """A row put in comes out the same, then is gone."""
    with ray_of(config):
        plane = TransferQueueDataPlane(deadline_s=config.psrl.deadlines.data_plane_s, startup_deadline_s=config.psrl.deadlines.startup_s)
        try:
            plane.start(config.transfer_queue)
            row = TrajectoryRow(
                key="doctor", tags=_tags(), columns={column.name: torch.arange(3, dtype=DTYPES[column.dtype]) for column in COLUMNS}
            )
            began = time.perf_counter()
            plane.put([row])
            (fetched,) = plane.fetch([row.key], list(row.columns))
            plane.clear([row.key])
            seconds = time.perf_counter() - began
            different = [name for name, tensor in row.columns.items() if not torch.equal(fetched[name], tensor)]
            if different:
                raise DataPlaneError(f"columns came back changed: {different}")
            if plane.keys():
                raise DataPlaneError("a cleared row is still listed")
            return f"a row went in and out in {1000 * seconds:.0f} ms"
        finally:
            plane.close()


def _tags() -> TrajectoryTags:
    return TrajectoryTags(
        group="doctor",
        episode="doctor",
        reward=0.0,
        outcome="finished",
        admitted_version=0,
        num_tokens=3,
        num_sampled=1,
        num_turns=1,
        temperature=1.0,
    )
