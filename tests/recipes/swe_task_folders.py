"""Folders of small projects with a bug, as `psrl prepare swe --tasks` reads them."""

import subprocess
import tempfile
from pathlib import Path

TESTS = """from pkg.sums import total


def test_sum():
    assert total(2, 3) == 5


def test_nothing():
    assert total(0, 0) == 0
"""
BROKEN = "return a - b"
MENDED = "return a + b"


def source(line):
    return f"def total(a, b):\n    {line}\n"


def diff_of(before, after, path="pkg/sums.py"):
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b"]
        file = Path(folder) / path
        file.parent.mkdir(parents=True)
        file.write_text(before)
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
            subprocess.run([*git, *words], check=True)
        file.write_text(after)
        return subprocess.run([*git, "diff"], check=True, capture_output=True, text=True).stdout


def write_task(root, name, *, statement="total(2, 3) gives -1, not 5.\n", mended=MENDED, gold_patch=None, tests=TESTS, task_yaml=None):
    folder = root / name
    for path, text in {"pkg/__init__.py": "", "pkg/sums.py": source(BROKEN), "tests/test_sums.py": tests}.items():
        (folder / "project" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "project" / path).write_text(text)
    (folder / "statement.md").write_text(statement)
    (folder / "gold.patch").write_text(diff_of(source(BROKEN), source(mended)) if gold_patch is None else gold_patch)
    if task_yaml is not None:
        (folder / "task.yaml").write_text(task_yaml)
    return folder


def write_tasks(root, *, good):
    for number in range(good):
        write_task(root, f"good_{number}")
    return root
