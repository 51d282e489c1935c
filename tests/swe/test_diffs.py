"""Diffs read and turned round, held against git itself."""

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.swe.diffs import DiffError, parse_diff, reversed_diff, touched_paths

CHANGE = """diff --git a/pkg/area.py b/pkg/area.py
index 1111111..2222222 100644
--- a/pkg/area.py
+++ b/pkg/area.py
@@ -1,3 +1,3 @@ def area():
 first
-second
+SECOND
 third
"""
BACK = """diff --git a/pkg/area.py b/pkg/area.py
index 2222222..1111111 100644
--- a/pkg/area.py
+++ b/pkg/area.py
@@ -1,3 +1,3 @@ def area():
 first
-SECOND
+second
 third
"""


def git(folder, *arguments, stdin=""):
    return subprocess.run(["git", "-C", str(folder), *arguments], input=stdin.encode(), capture_output=True, check=True).stdout.decode()


def text_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and ".git/" not in str(path)}


def write(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode())


def committed(folder, before):
    git(folder, "init", "-q")
    write(folder, before)
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "m")


def test_a_change_is_turned_round_line_by_line():
    assert reversed_diff(CHANGE) == BACK
    assert touched_paths(CHANGE) == ("pkg/area.py",)


def test_a_diff_that_git_made_is_taken_back_exactly_whatever_it_does_to_files(tmp_path):
    before = {"kept.py": "1\n2\n3\n" * 9, "gone.py": "x\ny\n", "old name.py": "same\n" * 20, "no_end.txt": "a\nb", "dir/mode.sh": "#!\n"}
    committed(tmp_path, before)
    original = text_of(tmp_path)
    write(tmp_path, {"kept.py": "0\n" + "1\n2\n3\n" * 8 + "1\n9\n", "made/neu-ä.py": "n\n", "no_end.txt": "a\nc\nd"})
    (tmp_path / "gone.py").unlink()
    (tmp_path / "old name.py").rename(tmp_path / "new name.py")
    (tmp_path / "new name.py").write_text("same\n" * 19 + "other\n")
    (tmp_path / "dir/mode.sh").chmod(0o755)
    git(tmp_path, "add", "-A")
    diff = git(tmp_path, "diff", "--cached", "-M")
    assert "rename from" in diff and "deleted file mode" in diff and "new mode 100755" in diff and "\\ No newline" in diff
    assert set(touched_paths(diff)) == {
        "kept.py", "gone.py", "old name.py", "new name.py", "no_end.txt", "dir/mode.sh", "made/neu-ä.py"
    }  # fmt: skip
    git(tmp_path, "apply", "-", stdin=reversed_diff(diff))
    assert text_of(tmp_path) == original
    assert not (tmp_path / "dir/mode.sh").stat().st_mode & 0o111


LINES = st.lists(st.sampled_from(["a", "b", "", "--- a/x", "+++ b/x", "@@ -1 +1 @@", "\\ no"]), max_size=12)


@settings(max_examples=25, deadline=None)
@given(before=LINES, after=LINES, ends=st.tuples(st.booleans(), st.booleans()))
def test_any_change_of_a_text_is_taken_back(tmp_path_factory, before, after, ends):
    folder = tmp_path_factory.mktemp("texts")
    old, new = ("\n".join(lines) + "\n" * end for lines, end in zip((before, after), ends, strict=True))
    committed(folder, {"f.txt": old})
    write(folder, {"f.txt": new})
    diff = git(folder, "diff")
    if not diff:
        return
    assert touched_paths(diff) == ("f.txt",)
    git(folder, "apply", "-", stdin=reversed_diff(diff))
    assert (folder / "f.txt").read_bytes() == old.encode()
    assert reversed_diff(reversed_diff(diff)).splitlines()[4:] == diff.splitlines()[4:]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no file"),
        ("just words\n", "names no file"),
        (CHANGE.replace("+SECOND\n", ""), "ends too early"),
        (CHANGE.replace(" third\n", " third\n+fourth\n"), "more lines than its header"),
        (CHANGE.replace("-second", "?second"), "no line of a hunk"),
        ("@@ -1 +1 @@\n-a\n+b\n", "a hunk of no file"),
        (CHANGE.replace("a/pkg", "pkg").replace("b/pkg", "pkg"), "a/ and b/"),
        (CHANGE.replace("--- a/pkg/area.py", "--- /dev/null").replace("+++ b/pkg/area.py", "+++ /dev/null"), "names no file"),
    ],
    ids=["empty", "words", "too short", "too long", "no hunk line", "no file", "no prefix", "nothing to nothing"],
)
def test_what_is_no_diff_is_refused_with_the_place(text, words):
    with pytest.raises(DiffError, match=words):
        parse_diff(text)


def test_binary_data_is_read_but_not_turned_round():
    diff = "diff --git a/x.png b/x.png\nnew file mode 100644\nindex 0000000..1111111\nBinary files /dev/null and b/x.png differ\n"
    assert touched_paths(diff) == ("x.png",)
    with pytest.raises(DiffError, match="binary"):
        reversed_diff(diff)


def test_a_diff_without_a_last_newline_and_with_plain_headers_is_read():
    assert touched_paths("--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b") == ("x.py",)
