"""Published rows in real containers: images pinned by the digest that the Engine knows, and gold told from nothing by swebench's parser."""

import io
import json
import secrets
import tarfile

import pytest
from recipes.swe_published_rows import EVAL_SCRIPT, bench_row_5, gym_row, smith_row
from sandbox.row_image import engine_client
from sandbox.small_registry import SmallImage, small_registry

from psrl.config.sandbox import SandboxConfig
from psrl.recipes.swe.images import ImagePins
from psrl.recipes.swe.prepare import prepare
from psrl.sandbox.local_image import local_image
from psrl.sandbox.packages import PACKAGES_FOLDER, PROGRAMS_FOLDER
from psrl.types import SweProblem

MENDED = "def area(width, height):\n    return width * height\n"
BROKEN = MENDED.replace("*", "+")
TESTS = "from pkg.area import area\n\n\ndef test_other():\n    assert area(2, 2) == 4\n"
ADDED = "\n\ndef test_area():\n    assert area(2, 5) == 10\n"
TEST_PATCH = """diff --git a/tests/test_area.py b/tests/test_area.py
--- a/tests/test_area.py
+++ b/tests/test_area.py
@@ -3,3 +3,7 @@
 
 def test_other():
     assert area(2, 2) == 4
+
+
+def test_area():
+    assert area(2, 5) == 10
"""
ACTIVATE = f"""conda() {{ test "$*" = "activate testbed" && export PATH={PROGRAMS_FOLDER}:$PATH PYTHONPATH={PACKAGES_FOLDER}; }}
"""
"""Stands for the images' conda: pytest is found only after it, as there."""


@pytest.fixture(scope="module")
def image_of(docker_engine):
    """Images as those of the data sets: a project at /testbed and an environment that must be entered; removed at the end."""
    made = []

    def make(source, tests):
        files = {
            "opt/miniconda3/bin/activate": ACTIVATE,
            "opt/miniconda3/bin/python": f'#!/bin/sh\nexec {PROGRAMS_FOLDER}/python3 "$@"\n',
            "testbed/pkg/__init__.py": "",
            "testbed/pkg/area.py": source,
            "testbed/tests/test_area.py": tests,
            "testbed/conftest.py": "",
        }
        with engine_client(docker_engine) as client:
            container = client.create_container(local_image(client, ("pytest",), tell=print), command=["true"])["Id"]
            client.put_archive(container, "/", archive_of(files))
            made.append(f"psrl-test:{secrets.token_hex(6)}")
            repository, tag = made[-1].split(":")
            client.commit(container, repository=repository, tag=tag, changes=["ENV PATH=/usr/bin:/bin"])
            client.remove_container(container)
        return made[-1]

    yield make
    with engine_client(docker_engine) as client:
        for name in made:
            client.remove_image(name, force=True)


def archive_of(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, text in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(text.encode()), 0o755
            archive.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


@pytest.mark.slow
def test_rows_of_all_three_formats_are_validated_in_their_images_by_the_package_s_own_parsers(tmp_path, image_of, capsys):
    with_bug, clean = image_of(BROKEN, TESTS), image_of(MENDED, TESTS + ADDED)
    script = EVAL_SCRIPT.replace("python -m pip install -e .\n", "")
    names = {"FAIL_TO_PASS": ["tests/test_area.py::test_area"], "PASS_TO_PASS": ["tests/test_area.py::test_other"]}
    rows = [
        bench_row_5(image=with_bug, test_patch=TEST_PATCH, eval_script=script, **names),
        gym_row(image_name=with_bug, test_patch=TEST_PATCH, **names),
        smith_row(image_name=clean, **names),
        smith_row(image_name=clean, instance_id="no-bug-at-all", **{**names, "FAIL_TO_PASS": names["PASS_TO_PASS"], "PASS_TO_PASS": []}),
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = prepare(
        tmp_path / "rows.jsonl", tmp_path / "out", with_model=False, allow_tags=True, validate=True, k=1, concurrency=2, test_share=0
    )
    left_out = {json.loads(line)["source"]: json.loads(line) for line in (output / "left_out.jsonl").read_text().splitlines()}
    assert {name: entry["reason"] for name, entry in left_out.items()} == {"no-bug-at-all": "null_resolved"}
    kept = [json.loads(line)["data_source"] for line in (output / "train.jsonl").read_text().splitlines()]
    assert kept == ["swe_bench", "swe_gym", "swe_smith"]
    assert "validated 4/4" in capsys.readouterr().out


def test_an_image_that_was_pulled_is_pinned_by_the_digest_of_its_registry(docker_engine, tmp_path):
    small = SmallImage(secrets.token_bytes(16))
    with small_registry(small) as (registry, _), engine_client(docker_engine) as client:
        name = f"{registry}/project:v1"
        assert ImagePins().pinned(name) is None
        client.pull(f"{registry}/project", tag="v1")
        try:
            assert ImagePins().pinned(name) == f"{registry}/project@{small.digest}"
            (tmp_path / "rows.jsonl").write_text(json.dumps(smith_row(image_name=name)) + "\n")
            output = prepare(tmp_path / "rows.jsonl", tmp_path / "out", with_model=False, test_share=0)
        finally:
            client.remove_image(name, force=True)
    row = json.loads((output / "train.jsonl").read_text())
    assert SweProblem.of_row(row["extra_info"]["swe"], source="s", uid="u").image == f"{registry}/project@{small.digest}"


def test_an_image_that_was_only_built_here_has_no_digest_to_pin(image_of):
    assert ImagePins().pinned(image_of(MENDED, TESTS)) is None


def test_without_an_engine_nothing_is_pinned_and_the_reason_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    pins = ImagePins(SandboxConfig())
    assert pins.pinned("some/image:1") is None
    assert "no Docker Engine answers" in pins.why_not
    assert pins.pinned("some/image@sha256:" + "0" * 64) == "some/image@sha256:" + "0" * 64
