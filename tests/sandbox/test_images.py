"""Images: pulled when missing, once, with words for what fails. The registry is a small one on loopback, the Engine is real."""

import asyncio
import logging
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import docker.errors
import pytest
from sandbox.row_image import engine_client
from sandbox.small_registry import SmallImage, small_registry

from psrl.errors import SandboxError, SandboxUnavailableError
from psrl.sandbox.docker_engine import NUM_THREADS, DockerEngine
from psrl.sandbox.docker_guest import removed
from psrl.sandbox.images import Images, pull_error

ROOT = Path(__file__).parents[2]


def images_of(url, *, pull_timeout_s=30.0):
    return Images(DockerEngine(url), pull_timeout_s=pull_timeout_s, packages=())


@pytest.fixture
def small():
    """An image that no Engine has."""
    return SmallImage(secrets.token_bytes(16))


def forgotten(url, *references):
    with engine_client(url) as client:
        for reference in references:
            try:
                client.remove_image(reference, force=True)
            except docker.errors.ImageNotFound:
                continue


def test_an_image_is_pulled_once_by_callers_at_the_same_time_and_its_digest_is_said(docker_engine, small, caplog):
    caplog.set_level(logging.WARNING)
    with small_registry(small) as (registry, asked):
        reference = f"{registry}/project:v1"
        images = images_of(docker_engine)

        async def use():
            first = await asyncio.gather(*(images.ensure(reference) for _ in range(8)))
            return {*first, await images_of(docker_engine).ensure(reference)}

        try:
            ids = asyncio.run(use())
        finally:
            forgotten(docker_engine, reference)
    assert len(ids) == 1
    assert asked == [small.layer]
    assert f"pin it in rows as {registry}/project@{small.digest}" in caplog.text


def test_a_pull_goes_on_when_those_who_wait_are_cancelled_and_the_next_one_finds_it(docker_engine, small):
    hold = threading.Event()
    with small_registry(small, hold=hold) as (registry, asked):
        reference = f"{registry}/project:v1"
        images = images_of(docker_engine)

        async def use():
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(images.ensure(reference), 0.3)
            hold.set()
            return await images.ensure(reference)

        try:
            assert asyncio.run(use()).startswith("sha256:")
        finally:
            forgotten(docker_engine, reference)
    assert asked == [small.layer]


def test_pulls_that_hang_keep_no_other_call_to_the_engine_waiting(docker_engine, small):
    hold = threading.Event()
    with small_registry(small, hold=hold) as (registry, _asked):
        references = [f"{registry}/project{number}:v1" for number in range(2 * NUM_THREADS)]
        engine = DockerEngine(docker_engine)
        images = Images(engine, pull_timeout_s=60.0, packages=())

        async def use():
            waiting = [asyncio.create_task(images.ensure(reference)) for reference in references]
            await asyncio.wait(waiting, timeout=1.0)
            assert not any(task.done() for task in waiting)
            for task in waiting:
                task.cancel()
            began = time.monotonic()
            await removed(engine, "no-such-container")
            seconds = time.monotonic() - began
            hold.set()
            return seconds, await asyncio.gather(*map(images.ensure, references))

        try:
            seconds, ids = asyncio.run(use())
        finally:
            forgotten(docker_engine, *references)
    assert seconds < 5
    assert len(set(ids)) == 1


GIVES_UP = """
import asyncio, sys
from psrl.sandbox.docker_engine import DockerEngine
from psrl.sandbox.images import Images

async def play():
    try:
        await asyncio.wait_for(Images(DockerEngine(sys.argv[1] or None), pull_timeout_s=600, packages=()).ensure(sys.argv[2]), 1)
    except TimeoutError:
        print("given up", flush=True)

asyncio.run(play())
"""


def test_a_process_that_is_over_does_not_wait_for_its_pull(docker_engine, small):
    with small_registry(small, hold=threading.Event()) as (registry, _asked):
        reference = f"{registry}/project:v1"
        try:
            argv = [sys.executable, "-c", GIVES_UP, docker_engine or "", reference]
            done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
        finally:
            forgotten(docker_engine, reference)
    assert (done.stdout, done.stderr, done.returncode) == ("given up\n", "", 0)


def test_an_image_that_is_named_by_its_digest_is_pulled_and_nothing_is_said_of_pinning(docker_engine, small, caplog):
    caplog.set_level(logging.WARNING)
    with small_registry(small) as (registry, _asked):
        reference = f"{registry}/project@{small.digest}"
        try:
            asyncio.run(images_of(docker_engine).ensure(reference))
        finally:
            forgotten(docker_engine, reference)
    assert "pulled" in caplog.text
    assert "pin" not in caplog.text


@pytest.mark.parametrize("name", ["project:v2", "project"])
def test_a_tag_that_the_registry_does_not_have_is_refused_in_words(docker_engine, small, name):
    with small_registry(small) as (registry, _asked):
        words = rf"no image {registry}/{name}.*Fix: check its name"
        with pytest.raises(SandboxUnavailableError, match=words):
            asyncio.run(images_of(docker_engine).ensure(f"{registry}/{name}"))


def test_a_registry_that_does_not_answer_is_an_error_that_may_pass(docker_engine):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        reference = f"127.0.0.1:{listener.getsockname()[1]}/project:v1"
        with pytest.raises(SandboxError, match=r"could not be pulled.*refused.*Fix: check the network") as caught:
            asyncio.run(images_of(docker_engine).ensure(reference))
    assert caught.value.is_retryable


def test_a_pull_that_takes_too_long_ends_with_the_setting_that_says_how_long(docker_engine, small):
    hold = threading.Event()
    with small_registry(small, hold=hold) as (registry, _asked):
        reference = f"{registry}/project:v1"
        try:
            with pytest.raises(SandboxError, match=r"not done within sandbox\.pull_timeout_s=1"):
                asyncio.run(images_of(docker_engine, pull_timeout_s=1.0).ensure(reference))
        finally:
            hold.set()
            forgotten(docker_engine, reference)


@pytest.mark.parametrize(
    ("words", "kind", "fix"),
    [  # As Engines say them.
        ("write /var/lib/docker/tmp/GetImageBlob1: no space left on device", SandboxUnavailableError, "docker system prune"),
        ("pull access denied for a/b, repository does not exist or may require 'docker login'", SandboxUnavailableError, "docker login"),
        ("manifest for a/b:c not found: manifest unknown: manifest unknown", SandboxUnavailableError, "check its name"),
        ("Get https://registry-1.docker.io/v2/: dial tcp: lookup registry-1.docker.io: no such host", SandboxError, "docker save"),
        ("toomanyrequests: You have reached your pull rate limit", SandboxError, "check the network and the registry"),
    ],
)
def test_what_an_engine_says_of_a_failed_pull_has_a_kind_and_a_fix(words, kind, fix):
    error = pull_error("a/b:c", words)
    assert type(error) is kind
    assert "a/b:c" in str(error)
    assert fix in str(error)
