"""What a run asks of its backend as a whole: how many start at once, a preflight, images where there are none."""

import asyncio
import secrets
import time

import pytest
from sandbox.row_image import empty_image

from psrl.config.sandbox import SandboxConfig
from psrl.errors import ConfigError, SandboxUnavailableError
from psrl.sandbox import BackendSandboxes, find_leftovers, reap
from psrl.sandbox.process import ProcessBackend, ProcessSandbox
from psrl.types import SandboxLimits, SandboxSpec

RUN = f"backend_{secrets.token_hex(8)}"


@pytest.fixture(params=["bubblewrap", "docker", "process"])
def backend(request):
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    return request.param


def test_a_preflight_says_nothing_where_all_is_well_and_leaves_nothing(backend):
    asyncio.run(BackendSandboxes(SandboxConfig(backend=backend), run=RUN).preflight())
    assert find_leftovers(RUN).count == 0


def test_a_preflight_says_what_came_instead_of_5(backend):
    spec = SandboxSpec(limits=SandboxLimits(output_bytes=0))
    with pytest.raises(SandboxUnavailableError, match=r"must print 5, but .*2 bytes dropped.*Fix: raise sandbox\.wall_s"):
        asyncio.run(BackendSandboxes(SandboxConfig(backend=backend), run=RUN).preflight(spec))
    assert find_leftovers(RUN).count == 0


def test_where_tasks_may_name_their_images_a_preflight_asks_the_engine_and_makes_none(docker_engine, tmp_path):
    sandboxes = BackendSandboxes(SandboxConfig(backend="docker", packages=["pytest"]), run=RUN)
    asyncio.run(sandboxes.preflight())
    assert sandboxes._backend.images._found == {}
    nowhere = SandboxConfig(backend="docker", engine_url=f"unix://{tmp_path}/docker.sock")
    with pytest.raises(SandboxUnavailableError, match="no Docker Engine answers"):
        asyncio.run(BackendSandboxes(nowhere, run=RUN).preflight())


def test_where_the_settings_name_an_image_a_preflight_makes_a_place_of_it(docker_engine):
    with empty_image(docker_engine, [("a", b"")]) as image, pytest.raises(SandboxUnavailableError, match="use an image with /bin/sh"):
        asyncio.run(BackendSandboxes(SandboxConfig(backend="docker", image=image), run=RUN).preflight())
    assert find_leftovers(RUN).count == 0


class Counted(ProcessSandbox):
    """Counts how many of them start at the same time."""

    num_now = num_most = 0

    async def _start(self):
        Counted.num_now += 1
        Counted.num_most = max(Counted.num_most, Counted.num_now)
        try:
            await super()._start()
        finally:
            Counted.num_now -= 1


class CountedBackend(ProcessBackend):
    def make(self, *, label, spec, start_slots):
        return Counted(label=label, spec=spec, start_slots=start_slots)


@pytest.mark.parametrize("max_starts", [1, 3])
def test_no_more_start_at_once_than_the_setting_says_and_all_do(monkeypatch, max_starts):
    monkeypatch.setattr(Counted, "num_most", 0)

    async def use():
        settings = SandboxConfig(backend=f"{__name__}.CountedBackend", max_starts=max_starts)
        sandboxes = BackendSandboxes(settings, run=RUN)
        started = [sandboxes.make(SandboxSpec(limits=SandboxLimits())) for _ in range(6)]
        await asyncio.gather(*(sandbox.start() for sandbox in started))
        outputs = [(await sandbox.run(["echo", "on"])).stdout for sandbox in started]
        await asyncio.gather(*(sandbox.stop() for sandbox in started))
        return outputs

    assert asyncio.run(use()) == [b"on\n"] * 6
    assert Counted.num_most == max_starts


@pytest.mark.parametrize("backend", ["bubblewrap", "process"])
def test_a_task_with_an_image_is_refused_where_there_are_no_containers(backend):
    with pytest.raises(ConfigError, match=r"has no images, and the task needs a/b@sha256:0") as caught:
        BackendSandboxes(SandboxConfig(backend=backend)).make(SandboxSpec(image="a/b@sha256:0"))
    assert caught.value.fix == "set sandbox.backend=docker"


def test_looking_for_containers_adds_little_to_a_start(docker_engine):
    def seconds(url):
        spans = []
        for _ in range(5):
            began = time.perf_counter()
            reap(RUN, engine_url=url)
            spans.append(time.perf_counter() - began)
        return min(spans)

    # The best of five each: the difference is the Engine's answer alone.
    assert seconds(docker_engine) - seconds("unix:///nowhere/docker.sock") < 0.05
