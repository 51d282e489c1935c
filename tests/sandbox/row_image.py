"""Images that stand for those of rows: made of psrl's local image, without a registry, and removed again."""

import io
import secrets
import tarfile
from contextlib import contextmanager

import docker

from psrl.sandbox.local_image import local_image


@contextmanager
def engine_client(url):
    """The SDK's client."""
    client = docker.APIClient(base_url=url, timeout=60)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def row_image(url, files=(), *, changes=()):
    """The local image with `files` (path, content) added; its name."""
    with engine_client(url) as client:
        base = local_image(client, (), tell=print)
        container = client.create_container(base, command=["true"])["Id"]
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for path, content in files:
                member = tarfile.TarInfo(path.lstrip("/"))
                member.size, member.mode = len(content), 0o644
                tar.addfile(member, io.BytesIO(content))
        client.put_archive(container, "/", archive.getvalue())
        tag = secrets.token_hex(6)
        client.commit(container, repository="psrl-test", tag=tag, changes=list(changes))
        client.remove_container(container)
        try:
            yield f"psrl-test:{tag}"
        finally:
            client.remove_image(f"psrl-test:{tag}", force=True)


@contextmanager
def empty_image(url, files=()):
    """An image of nothing but `files`; its name."""
    tag = secrets.token_hex(6)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, content in files:
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), 0o755
            tar.addfile(member, io.BytesIO(content))
    with engine_client(url) as client:
        client.import_image_from_data(archive.getvalue(), repository="psrl-test", tag=tag)
        try:
            yield f"psrl-test:{tag}"
        finally:
            client.remove_image(f"psrl-test:{tag}", force=True)
