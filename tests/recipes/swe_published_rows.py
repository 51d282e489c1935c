"""Small rows in the columns of the published data sets, written for these tests."""

import json

GOLD = """diff --git a/pkg/area.py b/pkg/area.py
index 1111111..2222222 100644
--- a/pkg/area.py
+++ b/pkg/area.py
@@ -1,2 +1,2 @@
 def area(width, height):
-    return width + height
+    return width * height
"""
TEST_PATCH = """diff --git a/tests/test_area.py b/tests/test_area.py
index 3333333..4444444 100644
--- a/tests/test_area.py
+++ b/tests/test_area.py
@@ -1,2 +1,5 @@
 from pkg.area import area
 
+
+def test_area():
+    assert area(2, 5) == 10
"""
EVAL_SCRIPT = f"""#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git config --global --add safe.directory /testbed
cd /testbed
git status
git show
git -c core.fileMode=false diff 0123456789abcdef
source /opt/miniconda3/bin/activate
conda activate testbed
python -m pip install -e .
git checkout 0123456789abcdef tests/test_area.py
git apply -v - <<'EOF_114329324912'
{TEST_PATCH}
EOF_114329324912
: '>>>>> Start Test Output'
pytest -rA tests/test_area.py
: '>>>>> End Test Output'
git checkout 0123456789abcdef tests/test_area.py
"""


def bench_row(**changes):
    """SWE-bench Verified as it was published before version 5 of the package."""
    row = {
        "repo": "pallets/flask",
        "instance_id": "pallets__flask-5014",
        "base_commit": "7ee9ceb71e868944a46e1ff00b506772a53a4f1d",
        "patch": GOLD,
        "test_patch": TEST_PATCH,
        "problem_statement": "The area of a rectangle is wrong.\n\nIt adds.",
        "hints_text": "multiply",
        "created_at": "2023-03-04T18:36:21Z",
        "version": "2.3",
        "FAIL_TO_PASS": json.dumps(["tests/test_area.py::test_area"]),
        "PASS_TO_PASS": json.dumps(["tests/test_area.py::test_other", "tests/test_area.py::test_other"]),
        "environment_setup_commit": "182ce3dd15dfa3537391c3efaf9c3ff407d134d4",
        "difficulty": "<15 min fix",
    }
    return {**row, **changes}


def bench_row_5(**changes):
    """SWE-bench as version 5 publishes it: image, script and parser in the row."""
    more = {
        "image": "swebench/sweb.eval.x86_64.pallets_1776_flask-5014:latest",
        "eval_script": EVAL_SCRIPT,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "image_assets": None,
    }
    return {**bench_row(), **more, **changes}


def gym_row(**changes):
    """SWE-Gym: lists instead of JSON text, no environment commit."""
    row = {
        "instance_id": "getmoto__moto-5752",
        "hints_text": "",
        "patch": GOLD,
        "test_patch": TEST_PATCH,
        "created_at": "2022-12-10 00:00:00",
        "problem_statement": "describe_area adds",
        "repo": "getmoto/moto",
        "base_commit": "b2300f1eae1323e3e8bc45f97e530ce129dff12e",
        "version": "4.0",
        "PASS_TO_PASS": ["tests/test_area.py::test_other[a"],
        "FAIL_TO_PASS": ["tests/test_area.py::test_area"],
    }
    return {**row, **changes}


def smith_row(**changes):
    """SWE-smith: the patch makes the bug, and there is no patch of tests."""
    bug = GOLD.replace("-    return width + height\n+    return width * height", "-    return width * height\n+    return width + height")
    row = {
        "instance_id": "mewwts__addict.75284f95.func_basic__vnamiqd1",
        "repo": "swesmith/mewwts__addict.75284f95",
        "patch": bug,
        "FAIL_TO_PASS": ["tests/test_area.py::test_area"],
        "PASS_TO_PASS": ["tests/test_area.py::test_other", "tests/test_more.py::Tests::test_more"],
        "created_at": "",
        "image_name": "jyangballin/swesmith.x86_64.mewwts_1776_addict.75284f95",
        "base_commit": "",
        "problem_statement": "Area adds where it should multiply",
    }
    return {**row, **changes}
