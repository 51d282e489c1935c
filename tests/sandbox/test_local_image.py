"""What can go wrong while the image of this machine's files is made."""

import asyncio
import fcntl
import os
import stat
import time

import pytest

from psrl.config.sandbox import SandboxConfig
from psrl.errors import SandboxUnavailableError
from psrl.sandbox import build_sandbox, local_image
from psrl.sandbox.local_image import ImageContent, add_libraries, lock_path, made_by_one_at_a_time


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Where the lock is, away from other runs of this machine."""
    monkeypatch.setattr(local_image, "lock_path", lambda: tmp_path / "image.lock")
    return tmp_path / "image.lock"


def test_a_lock_that_somebody_holds_is_an_error_with_a_fix_after_its_time(path):
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()
        with pytest.raises(SandboxUnavailableError, match=rf"held {path} for 0\.3 s.*Fix: end it"), made_by_one_at_a_time(0.3):
            pass
        assert 0.3 <= time.monotonic() - began < 3
    with made_by_one_at_a_time(0.3), pytest.raises(SandboxUnavailableError), made_by_one_at_a_time(0.0):
        pass
    with made_by_one_at_a_time(0.0):  # it was given back
        pass


def test_a_start_that_is_given_up_while_the_lock_is_held_ends_at_once(docker_engine, path):
    async def use():
        sandbox = build_sandbox(SandboxConfig(backend="docker"), run="locked")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sandbox.start(), 1.0)
        await sandbox.stop()

    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()
        asyncio.run(use())
        assert time.monotonic() - began < 10


def test_the_lock_is_this_users_alone_and_follows_no_link(path, tmp_path):
    target = tmp_path / "precious"
    target.write_text("kept")
    path.symlink_to(target)
    with pytest.raises(SandboxUnavailableError, match=rf"Fix: remove {path}"), made_by_one_at_a_time():
        pass
    assert target.read_text() == "kept"
    path.unlink()
    with made_by_one_at_a_time():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_lock_lies_where_its_user_can_write():
    assert os.access(lock_path().parent, os.W_OK)


@pytest.mark.parametrize(("script", "words"), [("exec sleep 60", "gave no answer within 0.2 s"), (None, "cannot be run")])
def test_an_ldd_that_hangs_or_is_missing_is_named(tmp_path, monkeypatch, script, words):
    if script is not None:
        (tmp_path / "ldd").write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
        (tmp_path / "ldd").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(local_image, "LDD_WITHIN_S", 0.2)
    with pytest.raises(SandboxUnavailableError, match=rf"needs `ldd`, which {words}"):
        add_libraries(ImageContent())
