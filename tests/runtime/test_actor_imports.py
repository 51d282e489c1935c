"""Actors that only watch or pass on start without torch: a second and 120 MiB of each."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["engine_replica", "parameter_server", "gateway"])
def test_an_actor_that_computes_nothing_imports_no_torch(module):
    code = f"import sys; import psrl.runtime.actors.{module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


def test_peft_is_imported_only_where_there_is_an_adapter():
    code = "import sys; import psrl.runtime.controller; print('peft' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
