"""What containers hold, and what becomes of a sandbox whose container or Engine fails: on a real Docker Engine."""

import asyncio
import dataclasses
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
from sandbox.row_image import empty_image, engine_client, row_image

from psrl.config.sandbox import SandboxConfig, engine_url_of
from psrl.errors import SandboxError, SandboxUnavailableError
from psrl.sandbox import BackendSandboxes, build_interpreter, find_leftovers, leftover_containers, reap, worker_label
from psrl.sandbox.docker_sandbox import container_options
from psrl.sandbox.leftover_containers import engine_answers, labelled_containers, labels_of, remove_containers
from psrl.types import SandboxLimits, SandboxSpec

ROOT = Path(__file__).parents[2]
LIMITS = SandboxLimits(wall_s=5.0, output_bytes=4096, memory_bytes=128 * 2**20, num_processes=16, disk_bytes=8 * 2**20)
RUN = f"docker_{secrets.token_hex(8)}"

pytestmark = pytest.mark.usefixtures("docker_engine")


def settings_of(**settings):
    return SandboxConfig(**{"backend": "docker", **settings})


@asynccontextmanager
async def sandbox_of(*, image=None, workdir="/tmp", limits=LIMITS, **settings):
    """A started sandbox; no container of it may be left afterwards."""
    run = f"{RUN}_{secrets.token_hex(4)}"
    sandbox = BackendSandboxes(settings_of(**settings), run=run).make(SandboxSpec(image=image, workdir=workdir, limits=limits))
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.stop()
    assert containers_of(run, settings_of(**settings)) == []


def containers_of(run, settings=None):
    labels = labelled_containers(engine_url_of(settings or settings_of()))
    return [found for found, label in labels.items() if label.startswith(f"{run}.")]


def play(use, **options):
    async def started():
        async with sandbox_of(**options) as sandbox:
            return await use(sandbox)

    return asyncio.run(started())


def shell(text, **options):
    return play(lambda sandbox: sandbox.run(["bash", "-c", text]), **options)


@pytest.fixture(scope="module")
def image(docker_engine):
    """An image as a row names it."""
    # Modules of the project that have names of the standard library's must not reach the guest.
    modules = [(f"/testbed/{name}.py", b"raise SystemExit(3)\n") for name in ("selectors", "types")]
    with row_image(docker_engine, [("/testbed/a.txt", b"kept\n"), *modules], changes=["ENV COLOR=green"]) as name:
        yield name


# ---------------------------------------------------------------- what the container holds


def test_programs_have_no_capability_no_network_and_a_system_that_they_cannot_change():
    show = "grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status; ls /proc/sys/net/ipv4/conf"
    result = shell(f"{show}; touch /usr/x; touch /tmp/x && echo made; ps -e | wc -l")
    words = result.stdout.decode().split()
    assert words[: words.index("made")] == ["CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1", "all", "default", "lo"]
    assert b"Read-only file system" in result.stderr
    # The guest, bash, ps, wc, and the line of titles: no process of this machine.
    assert int(words[-1]) == 5


@pytest.mark.parametrize(("row", "run", "is_open"), [(True, True, True), (True, False, False), (False, True, False)])
def test_the_network_needs_both_the_row_and_the_run(row, run, is_open):
    settings = settings_of(allow_network=run)
    spec = BackendSandboxes(settings).make(SandboxSpec(limits=dataclasses.replace(LIMITS, allow_network=row))).spec
    # Not the machine's own network, which is `host`. An Engine need not have a bridge, so none is started.
    assert container_options(settings, spec, "an/image")["host_config"]["NetworkMode"] == ("bridge" if is_open else "none")


def test_the_guest_can_neither_be_killed_nor_read_nor_spoken_for():
    script = "kill -9 1; kill -STOP 1; kill -INT 1; kill -TERM 1; cat /proc/1/environ; head -c 1 /proc/1/mem"
    # 100 is where its requests come in, 101 where its answers go out.
    forge = "for fd in 0 1 2 100 101; do echo forged > /proc/1/fd/$fd; done; cat /proc/1/fd/100"

    async def use(sandbox):
        first = await sandbox.run(["bash", "-c", f"{script}; {forge}"])
        return first, await sandbox.run(["echo", "on"])

    first, second = play(use)
    assert first.stderr.count(b"Permission denied") == 8
    assert second.stdout == b"on\n"


def test_a_fork_bomb_stays_within_its_count_and_the_sandbox_goes_on():
    code = "import os\nn = 0\ntry:\n    while os.fork(): n += 1\n    os.read(os.pipe()[0], 1)\nexcept OSError: print(n)"

    async def use(sandbox):
        return await sandbox.run(["python3", "-c", code]), await sandbox.run(["sh", "-c", "ps -e | wc -l"])

    bomb, after = play(use)
    assert 1 <= int(bomb.stdout) <= 16
    assert int(after.stdout) == 5  # the guest, sh, ps, wc and the titles


def test_a_program_that_takes_all_memory_at_once_is_named_and_the_sandbox_goes_on():
    async def use(sandbox):
        hog = await sandbox.run(["sh", "-c", "python3 -c \"x = b'x' * (1 << 30)\"; sleep 0.2"])
        return hog, await sandbox.run(["echo", "on"])

    hog, after = play(use)
    assert hog.killed_by == "memory"
    assert after.stdout == b"on\n"


def test_folders_in_memory_are_as_large_as_the_disk_limit():
    fill = "head -c 5000000 /dev/zero > {0}a; head -c 5000000 /dev/zero > {0}b; cat {0}a {0}b | wc -c; "
    result = shell(fill.format("") + fill.format("/tmp/"), workdir="/work")
    # 8 MiB, but for the last write of `head` that no longer fits.
    assert all(2**23 - 8192 < int(size) <= 2**23 for size in result.stdout.split())
    assert result.stderr.count(b"No space left on device") == 2


def test_what_is_written_into_an_image_is_measured_and_the_program_ended(image):
    fill = "i=0; while :; do head -c 1000000 /dev/zero > file$i; i=$((i+1)); sleep 0.05; done"

    async def use(sandbox):
        return await sandbox.run(["bash", "-c", fill]), await sandbox.run(["bash", "-c", "rm -f file*; echo on"])

    full, after = play(use, image=image, workdir="/var/tmp")
    assert (full.killed_by, full.exit_code) == ("disk", None)
    assert after.stdout == b"on\n"


def test_nothing_can_be_written_where_the_engine_does_not_measure(image):
    files = ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf"]
    result = shell(f"for file in {' '.join(files)}; do echo x >> $file; done; cat /etc/hosts; echo x > /etc/other", image=image)
    assert result.stderr.count(b"Read-only file system") == 3
    assert (b"localhost" in result.stdout, result.exit_code) == (True, 0)


def test_a_user_and_a_number_of_cores_can_be_set():
    async def use(sandbox):
        ended = await sandbox.run(
            ["sh", "-c", "id -u; echo 1 > file; cat file; cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/cpu/cpu.cfs_quota_us"]
        )
        program = [await sandbox.run_program("open('left', 'w').close()\nimport os\nsorted(os.listdir('.'))") for _ in range(2)]
        return ended, program

    ended, programs = play(use, user="1234", cpus=0.5, workdir="/work")
    assert ended.stdout.split()[:3] == [b"1234", b"1", b"50000"]
    # What a command left is there until a program has ended.
    assert [program.stdout for program in programs] == [b"['file', 'left']\n", b"['left']\n"]


# ---------------------------------------------------------------- images


def test_an_image_of_a_row_keeps_its_files_its_environment_and_its_workdir(image):
    async def use(sandbox):
        return await sandbox.run(["bash", "-c", "pwd; cat a.txt; echo more >> a.txt; echo $COLOR; cat a.txt | wc -l"])

    results = [play(use, image=image, workdir="/testbed").stdout.split() for _ in range(2)]
    made = shell("pwd; echo 1 > x; cat x", image=image, workdir="/not/there")
    assert results == [[b"/testbed", b"kept", b"green", b"2"]] * 2  # each sandbox has the image's own files
    assert made.stdout.split() == [b"/not/there", b"1"]


def test_an_image_that_was_saved_and_loaded_again_is_used_without_a_registry(docker_engine):
    with row_image(docker_engine, [("/testbed/a.txt", b"kept\n")]) as loaded, engine_client(docker_engine) as client:
        saved = b"".join(client.get_image(loaded))
        client.remove_image(loaded, force=True)
        client.load_image(saved)
        assert shell("cat a.txt", image=loaded, workdir="/testbed").stdout == b"kept\n"


def test_an_image_that_goes_away_between_two_starts_is_missed_in_words(docker_engine):
    async def use():
        sandboxes = BackendSandboxes(settings_of(pull_timeout_s=20), run=RUN)
        with row_image(docker_engine) as removed:
            await sandboxes.preflight(SandboxSpec(image=removed, limits=LIMITS))
        with pytest.raises(SandboxError, match=rf"{removed}.*Fix"):
            await sandboxes.preflight(SandboxSpec(image=removed, limits=LIMITS))

    asyncio.run(use())
    assert containers_of(RUN) == []


def test_an_image_without_a_shell_is_refused_in_words_and_nothing_is_left(docker_engine):
    words = r"psrl-test:\w+: .*no such file or directory.*Fix: use an image with /bin/sh"
    with empty_image(docker_engine, [("a", b"")]) as empty, pytest.raises(SandboxUnavailableError, match=words):
        shell("true", image=empty)


def test_an_image_without_python_is_refused_in_words_and_nothing_is_left(docker_engine):
    files = [(f"/opt/psrl/bin/{name}", b"") for name in ("python", "python3")]
    with row_image(docker_engine, files) as broken, pytest.raises(SandboxUnavailableError, match=r"no Python 3\.9 or newer found"):
        shell("true", image=broken)


def test_a_workdir_that_the_user_may_not_write_is_refused_in_words(image):
    with pytest.raises(SandboxUnavailableError, match=r"/testbed cannot be written by uid 1234"):
        shell("true", image=image, workdir="/testbed", user="1234")


# ---------------------------------------------------------------- what fails


def test_without_an_engine_the_error_names_the_fix(tmp_path):
    for url in (f"unix://{tmp_path}/docker.sock", "tcp://127.0.0.1:9"):
        with pytest.raises(SandboxUnavailableError, match=r"no Docker Engine answers.*Fix: start it"):
            shell("true", engine_url=url)


def test_an_engine_behind_tls_or_ssh_is_refused_in_words():
    with pytest.raises(SandboxUnavailableError, match=r"Fix: "):
        shell("true", engine_url="ssh://nobody@localhost")


def test_a_container_that_is_removed_under_a_command_is_an_error_and_no_output(docker_engine):
    async def use(sandbox):
        call = asyncio.create_task(sandbox.run(["sleep", "4"]))
        await asyncio.sleep(0.1)
        with engine_client(docker_engine) as client:
            await asyncio.to_thread(client.remove_container, sandbox._name, force=True)
        with pytest.raises(SandboxError, match="gone"):
            await call
        assert not sandbox.is_alive
        with pytest.raises(SandboxError, match="not running"):
            await sandbox.run(["true"])

    play(use)


def test_the_interpreter_replaces_a_container_that_was_removed(docker_engine):
    run = f"{RUN}_interpreter"

    async def use():
        interpreter = build_interpreter(settings_of(num_workers=1), run=run)
        try:
            first = await interpreter.run_program("print(2+3)")
            with engine_client(docker_engine) as client:
                for container in containers_of(run):
                    client.remove_container(container, force=True)
            return first, await interpreter.run_program("print(2+3)")
        finally:
            await interpreter.stop()

    first, second = asyncio.run(use())
    assert (first.stdout, second.stdout) == (b"5\n", b"5\n")
    assert containers_of(run) == []


def test_a_start_that_is_cancelled_leaves_no_container():
    run = f"{RUN}_cancelled"

    async def use():
        sandboxes = BackendSandboxes(settings_of(), run=run)
        await sandboxes.preflight()
        for after_s in (0.0, 0.02, 0.1, 0.2):
            sandbox = sandboxes.make(SandboxSpec(limits=LIMITS))
            start = asyncio.create_task(sandbox.start())
            await asyncio.sleep(after_s)
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
            await sandbox.stop()

    asyncio.run(use())
    assert containers_of(run) == []


def test_a_stop_that_is_cancelled_removes_the_container_all_the_same():
    run = f"{RUN}_stopped"

    async def use():
        sandbox = BackendSandboxes(settings_of(), run=run).make(SandboxSpec(limits=LIMITS))
        await sandbox.start()
        stop = asyncio.create_task(sandbox.stop())
        await asyncio.sleep(0)
        stop.cancel()
        await asyncio.gather(stop, return_exceptions=True)
        await sandbox.stop()  # waits for the same removal

    asyncio.run(use())
    assert containers_of(run) == []


WORKER = """
import asyncio, sys
from psrl.config.sandbox import SandboxConfig
from psrl.sandbox import BackendSandboxes, build_sandbox

async def play():
    sandbox = build_sandbox(SandboxConfig(backend="docker", wall_s=60), run=sys.argv[1])
    await sandbox.start()
    program = asyncio.create_task(sandbox.run(["sleep", "60"]))
    await asyncio.sleep(0.1)
    print("running", flush=True)
    await program

asyncio.run(play())
"""


def test_a_worker_killed_by_sigkill_leaves_no_container():
    run = f"{RUN}_killed"
    worker = subprocess.Popen([sys.executable, "-c", WORKER, run], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)
    assert worker.stdout.readline() == b"running\n"
    assert len(containers_of(run)) == 1
    worker.send_signal(signal.SIGKILL)
    worker.wait(10)
    worker.stdout.close()
    deadline = time.monotonic() + 10
    while containers_of(run):
        assert time.monotonic() < deadline, "the container outlives its worker"


def test_the_reaper_removes_what_a_dead_worker_had_not_started_yet(docker_engine, image):
    run = f"{RUN}_reaped"
    say_label = "import sys\nfrom psrl.sandbox import worker_label\nprint(worker_label(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", say_label, run], cwd=ROOT, capture_output=True, text=True, check=True)
    with engine_client(docker_engine) as client:
        container = client.create_container(image, command=["true"], labels=labels_of(done.stdout.strip()))["Id"]
        mine = client.create_container(image, command=["true"], labels=labels_of(worker_label(run)))["Id"]
        elsewhere = client.create_container(image, command=["true"], labels={**labels_of(done.stdout.strip()), "psrl.host": "another"})[
            "Id"
        ]
        try:
            assert find_leftovers(run, engine_url=docker_engine).containers == (container,)
            assert reap(run, engine_url=docker_engine).containers == (container,)
            assert find_leftovers(run, engine_url=docker_engine).count == 0
            assert {each["Id"] for each in client.containers(all=True)} >= {mine, elsewhere}
        finally:
            client.remove_container(mine)
            client.remove_container(elsewhere)


def test_looking_for_leftovers_where_no_engine_is_takes_no_time(tmp_path):
    silent = tmp_path / "silent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(silent))
        listener.listen()  # accepts, and never answers
        began = time.monotonic()
        assert labelled_containers(f"unix://{silent}") == {}
        assert time.monotonic() - began < 3
    began = time.monotonic()
    for url in (f"unix://{tmp_path}/missing.sock", f"unix://{tmp_path}", "ssh://host", "tcp://127.0.0.1:9"):
        assert labelled_containers(url) == {}
    assert time.monotonic() - began < 0.5


@contextmanager
def dripping_engine(path):
    """Sends the start of an answer and then a byte now and then: what no real Engine does on demand."""
    is_over = threading.Event()

    def drip(connection):
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not is_over.wait(0.05):
                connection.sendall(b" ")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(0.1)

        def serve():
            while not is_over.is_set():
                with suppress(TimeoutError):
                    threads.append(threading.Thread(target=drip, args=(listener.accept()[0],)))
                    threads[-1].start()

        threads = [threading.Thread(target=serve)]
        threads[0].start()
        try:
            yield f"unix://{path}"
        finally:
            is_over.set()
            for thread in threads:
                thread.join()


def test_an_engine_that_drips_its_answers_holds_no_start_up(tmp_path, monkeypatch):
    monkeypatch.setattr(leftover_containers, "REMOVE_ALL_S", 1.0)
    with dripping_engine(tmp_path / "drip.sock") as url:
        began = time.monotonic()
        assert not engine_answers(url)
        assert labelled_containers(url) == {}
        assert remove_containers(url, [str(number) for number in range(100)]) == ()
        assert time.monotonic() - began < 6  # one second each


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="an Engine of one's own needs root")
def test_an_engine_that_stops_under_a_command_is_an_error_and_after_its_return_sandboxes_are_made_again(own_engine):
    settings = {"engine_url": own_engine.url}

    async def use():
        sandboxes = BackendSandboxes(settings_of(**settings), run=RUN)
        sandbox = sandboxes.make(SandboxSpec(limits=dataclasses.replace(LIMITS, wall_s=60)))
        await sandbox.start()
        call = asyncio.create_task(sandbox.run(["sleep", "60"]))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(own_engine.stop)
        with pytest.raises(SandboxError, match="gone"):
            await call
        with pytest.raises(SandboxError, match="did not remove"):
            await sandbox.stop()
        with pytest.raises(SandboxError, match="did not"):
            await sandboxes.preflight()
        await asyncio.to_thread(own_engine.start)
        await sandboxes.preflight()

    asyncio.run(use())
    assert containers_of(RUN, settings_of(**settings)) == []


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="an Engine of one's own needs root")
def test_an_engine_that_hangs_is_an_error_within_seconds(own_engine):
    async def use():
        sandbox = BackendSandboxes(settings_of(engine_url=own_engine.url), run=RUN).make(SandboxSpec(limits=LIMITS))
        await sandbox.start()
        own_engine.signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(SandboxError, match="the place is gone"):
            await sandbox.run(["true"], limits=SandboxLimits(wall_s=0.5))
        assert time.monotonic() - began < 20
        own_engine.signal(signal.SIGCONT)
        await sandbox.stop()

    asyncio.run(use())
    assert containers_of(RUN, settings_of(engine_url=own_engine.url)) == []
