"""A registry that serves one image over HTTP on loopback, as the Engine's pull asks for it (Docker Registry API v2)."""

import gzip
import hashlib
import io
import json
import tarfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
LAYER_TYPE = "application/vnd.docker.image.rootfs.diff.tar.gzip"


def digest_of(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class SmallImage:
    """One layer with one file."""

    def __init__(self, text):
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            member = tarfile.TarInfo("hello.txt")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
        packed = gzip.compress(layer.getvalue(), mtime=0)
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [digest_of(layer.getvalue())]},
        }
        config_bytes = json.dumps(config).encode()
        self.blobs = {digest_of(part): part for part in (packed, config_bytes)}
        self.layer = digest_of(packed)
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": {"mediaType": CONFIG_TYPE, "size": len(config_bytes), "digest": digest_of(config_bytes)},
            "layers": [{"mediaType": LAYER_TYPE, "size": len(packed), "digest": self.layer}],
        }
        self.manifest = json.dumps(manifest).encode()
        self.digest = digest_of(self.manifest)


@contextmanager
def small_registry(image, *, hold=None):
    """`127.0.0.1:PORT`, and the list of layers that were asked for. The layer is sent once `hold` (an Event) is set."""
    asked = []

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(with_body=False)

        def do_GET(self):
            self.answer(with_body=True)

        def answer(self, *, with_body):
            kind, name = self.path.rstrip("/").split("/")[-2:]
            status, content, media = 404, b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}', "application/json"
            if self.path == "/v2/":
                status, content = 200, b"{}"
            elif kind == "manifests" and name in ("v1", image.digest):
                status, content, media = 200, image.manifest, MANIFEST_TYPE
            elif kind == "blobs" and name in image.blobs:
                status, content, media = 200, image.blobs[name], "application/octet-stream"
                if with_body and name == image.layer:
                    asked.append(name)
                    if hold is not None:
                        hold.wait(60)
            self.send_response(status)
            self.send_header("Content-Type", media)
            self.send_header("Content-Length", str(len(content)))
            if media == MANIFEST_TYPE:
                self.send_header("Docker-Content-Digest", image.digest)
            self.end_headers()
            if with_body:
                self.wfile.write(content)

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", asked
    finally:
        if hold is not None:
            hold.set()
        server.shutdown()
        thread.join()
        server.server_close()
