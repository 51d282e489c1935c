"""A small project with a bug, its tests and the mend; and mini-swe-agent's YAML for it."""

from psrl.types import SweProblem

BROKEN = "def add(a, b):\n    return a - b\n"
TESTS = "from calc import add\n\n\ndef test_adds():\n    assert add(2, 3) == 5\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n"
GOLD = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
PROBLEM = SweProblem(
    instance_id="calc-1",
    repo="calc",
    task_kind="swe_tiny",
    statement="add(2, 3) returns -1. It must add.",
    files={"calc.py": BROKEN, "tests/test_calc.py": TESTS},
    gold_patch=GOLD,
    test_paths=("tests",),
    fail_to_pass=("tests/test_calc.py::test_adds",),
    pass_to_pass=("tests/test_calc.py::test_zero",),
)
TEXT_YAML = {
    "task_kind": "swe_tiny",
    "agent": {"system_template": "You mend code.", "instance_template": "{{task}} One command per turn."},
    "environment": {"timeout": 5, "env": {"PAGER": "cat"}},
    "model": {
        "model_class": "litellm_textbased",
        "action_regex": r"```sh\n(.*?)\n```",
        "observation_template": "<rc>{{output.returncode}}</rc>\n{{output.exception_info}}{{output.output}}",
        "format_error_template": "Write one block. {{error}}",
    },
}
