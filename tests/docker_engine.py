"""A Docker Engine for tests: the one that runs on this machine, else one of their own, ended with them."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from psrl.config.sandbox import SandboxConfig, engine_url_of
from psrl.sandbox.leftover_containers import engine_answers

START_WITHIN_S = 30.0
STORAGE_DRIVERS = ("overlay2", "vfs")
"""The second one where the data folder lies in an overlay itself."""


class OwnEngine:
    """A dockerd with folders and a socket of its own, which disturbs no other one. Needs root."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="psrl-dockerd-"))
        self.url = f"unix://{self.folder}/docker.sock"
        self._process = None

    def start(self):
        """Start it, or start it again with the same data; returns when it answers."""
        failures = [self._try(driver) for driver in STORAGE_DRIVERS if not engine_answers(self.url)]
        assert engine_answers(self.url), f"dockerd does not start: {failures}"
        return self

    def _try(self, driver):
        folder = self.folder
        argv = ["dockerd", "--storage-driver", driver, "--data-root", folder / "data", "--exec-root", folder / "exec"]
        argv += ["--pidfile", folder / "dockerd.pid", "--host", self.url, "--bridge", "none", "--iptables=false", "--ip-forward=false"]
        with (folder / "dockerd.log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + START_WITHIN_S
        while not engine_answers(self.url) and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if engine_answers(self.url):
            return None
        self.stop()
        return (folder / "dockerd.log").read_text()[-2000:]

    def signal(self, number):
        """To dockerd alone; its containerd and the containers go on."""
        self._process.send_signal(number)

    def stop(self):
        """End it, with its containers."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            self._process.wait(30)

    def remove(self):
        """End it and all that it left."""
        self.stop()
        containerd = self.folder / "exec" / "containerd" / "containerd.pid"
        if containerd.exists():
            pid = int(containerd.read_text())
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + 10
            while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        for mount in reversed([line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if str(self.folder) in line]):
            subprocess.run(["umount", "-l", mount], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def docker_engine():
    """The address of an Engine that runs, as `sandbox.engine_url` takes it (None: it is at the usual socket)."""
    url = engine_url_of(SandboxConfig())
    if engine_answers(url):
        yield url
        return
    engine = OwnEngine().start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", engine.url)
        yield engine.url
    engine.remove()


@pytest.fixture
def own_engine():
    """An Engine that the test may stop."""
    engine = OwnEngine()
    try:
        yield engine.start()
    finally:
        engine.remove()
