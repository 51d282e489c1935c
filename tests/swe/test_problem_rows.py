"""Rows of projects are hostile until `SweProblem.of_row` has read them."""

import json
from dataclasses import fields

import pytest
from calc_project import PROBLEM

from psrl.errors import RowError
from psrl.types import SweProblem
from psrl.types.swe_rules import RULES

DIGEST = f"sha256:{'0' * 64}"


def read(**changes):
    return SweProblem.of_row({**json.loads(json.dumps(PROBLEM.to_row())), **changes}, source="s", uid="u")


def test_every_field_has_its_rule():
    assert set(RULES) == {each.name for each in fields(SweProblem)}


# (field, value)
WRONG = [
    *(("workdir", value) for value in ("", "/", "//", "//x", "testbed", "/tmp/..", "/tmp/", "/a/./b", "/a\0b", 3)),
    *(("workdir", value) for value in ("/opt", "/opt/psrl", "/opt/psrl/bin", "/proc", "/sys/x", "/dev/shm", "/usr/local", "/bin", "/sbin")),
    *(("workdir", value) for value in ("/lib", "/lib64/x", "/etc", "/run/x")),
    *(("image", value) for value in ("", " ", "-v /:/x", "--privileged", "a b", "a@sha256:00", "a\n", "../a", "a;b", 3)),
    *(
        ("files", {path: "x"})
        for path in ("../x", "/etc/passwd", "", ".", "..", "a/../b", "a//b", "./a", "a/", "a\0b", "\ud800", ".git/config")
    ),
    *(("files", value) for value in ({"a": "", "a/b": ""}, {"a/b/c": "", "a/b": ""}, {"a": "\ud800"}, {"a": 3}, ["a"], {"sub/.GIT/x": ""})),
    *(("test_paths", value) for value in (["../../etc"], ["/tests"], [""], ["tests/"], "tests", [3])),
    *(("fail_to_pass", value) for value in ([], ["a\0"], ["\ud800"], "a", [None])),
    *(("pass_to_pass", value) for value in (["\udfff"], "a")),
    *(("setup_commands", value) for value in (["a\0b"], "make", ["\ud800"])),
    *(("timeout_s", value) for value in (float("inf"), float("nan"), 0, -1, 1e12, True, "60")),
    *((name, value) for name in ("statement", "gold_patch", "test_patch") for value in ("\ud800", "a\0b", 3)),
    *((name, value) for name in ("instance_id", "repo", "task_kind") for value in ("", " ", "a\nb", "\ud800", 3)),
    *(("allow_network", value) for value in (1, "yes")),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}={value!a:.40}" for name, value in WRONG])
def test_a_value_that_cannot_be_played_is_refused_with_its_field(name, value):
    with pytest.raises(RowError, match=f"u: {name} must be "):
        read(**{name: value})


@pytest.mark.parametrize(
    "changes",
    [{"workdir": value} for value in ("/testbed", "/work/a", "/tmp", "/opt/app", "/var/tmp/x", "/home/me")]
    + [{"image": value} for value in ("python:3", "python:3.11-slim", f"a/b@{DIGEST}", f"127.0.0.1:9/no/such:image@{DIGEST}", DIGEST)]
    + [{"files": value} for value in ({}, {"a": "\0", "a.b": "", "a-b/c": ""}, {"..a": "", "caf\u00e9/\u4e2d.py": "\u4e2d"})]
    + [{"fail_to_pass": ["tests/test_a.py::test[\u00e9 \n]"], "timeout_s": 86400, "test_paths": []}]
    + [{"test_command": "make test", "log_parser": "parse_log_pytest"}],
)
def test_a_value_that_can_be_played_is_kept(changes):
    problem = read(**changes)
    for name, value in changes.items():
        assert getattr(problem, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("changes", [{"test_command": "make test"}, {"log_parser": "parse_log_pytest"}])
def test_a_command_and_its_parser_come_together(changes):
    with pytest.raises(RowError, match="test_command and log_parser come together"):
        read(**changes)
