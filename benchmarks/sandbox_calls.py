"""Calls per second of `print(2+3)` by the `code_interpreter` tool, beside a cold `bwrap python` per call; and the CPU of a warm call.

    python benchmarks/sandbox_calls.py [--calls 1000] [--cold-calls 40] [--workers 2]

Both run at the same concurrency in the same process; the ratio is what to look at, since both depend on the machine.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path

from psrl.config.sandbox import SandboxConfig
from psrl.sandbox import build_interpreter
from psrl.sandbox.bubblewrap import find_python
from psrl.sandbox.reaper import labelled_processes, worker_label
from psrl.tools import CodeInterpreter

RUN = "benchmark"
COLD_ARGV = (
    "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--ro-bind", "/usr", "/usr", "--symlink",
    "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev",
    "--tmpfs", "/tmp",
)  # fmt: skip


async def warm_calls_per_s(num_calls: int, num_workers: int) -> dict[str, float]:
    """Through the public tool, all callers at once."""
    started = time.perf_counter()
    interpreter = build_interpreter(SandboxConfig(num_workers=num_workers), run=RUN)
    tool = CodeInterpreter(interpreter)
    await interpreter.preflight()
    start_s = time.perf_counter() - started
    sandboxes_cpu_s, own_cpu_s, started = cpu_of_sandboxes_s(), time.process_time(), time.perf_counter()
    results = await asyncio.gather(*(tool.call({"code": "print(2+3)"}) for _ in range(num_calls)))
    elapsed_s = time.perf_counter() - started
    sandboxes_cpu_s, own_cpu_s = cpu_of_sandboxes_s() - sandboxes_cpu_s, time.process_time() - own_cpu_s
    await interpreter.stop()
    assert {result.text for result in results} == {"5"}, "a call went wrong"
    return {
        "start_s": start_s,
        "calls_per_s": num_calls / elapsed_s,
        "run_ms_median": 1000 * statistics.median(result.run_s for result in results),
        "cpu_ms_inside": 1000 * sandboxes_cpu_s / num_calls,
        "cpu_ms_outside": 1000 * own_cpu_s / num_calls,
    }


def cpu_of_sandboxes_s() -> float:
    """CPU time of this process's sandboxes, ended programs included."""
    ticks = 0
    for pid, label in labelled_processes().items():
        if label == worker_label(RUN):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


async def cold_calls_per_s(num_calls: int, num_workers: int) -> float:
    """A new namespace and a new Python for every call."""
    python, prefix = find_python(is_root=True)
    mounts = () if prefix is None or prefix.startswith("/usr") else ("--ro-bind", prefix, prefix)
    places = asyncio.Semaphore(num_workers)

    async def call() -> None:
        async with places:
            process = await asyncio.create_subprocess_exec(
                *COLD_ARGV, *mounts, python, "-c", "print(2+3)", stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
            )
            stdout, _ = await asyncio.wait_for(process.communicate(), 60)
            assert stdout == b"5\n", f"the cold call printed {stdout!r}"

    started = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(num_calls)))
    return num_calls / (time.perf_counter() - started)


async def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--cold-calls", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    cold = await cold_calls_per_s(options.cold_calls, options.workers)
    warm = await warm_calls_per_s(options.calls, options.workers)
    report = {"workers": options.workers, "cold_calls_per_s": cold, **warm, "warm_over_cold": warm["calls_per_s"] / cold}
    print(json.dumps({name: round(value, 2) for name, value in report.items()}))


if __name__ == "__main__":
    asyncio.run(main())
