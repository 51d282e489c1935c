"""What `scripts/setup.sh` finds out about the machine."""

import os
import subprocess
from pathlib import Path

SETUP = Path(__file__).parents[1] / "scripts" / "setup.sh"


def test_a_machine_of_many_gpus_has_one(tmp_path):
    """The driver's program writes a line for each card, and must not be cut off at the first."""
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\nfor card in 0 1 2 3; do echo "GPU $card: NVIDIA"; sleep 0.05; done\n')
    program.chmod(0o755)
    (definition,) = (line for line in SETUP.read_text().splitlines() if line.startswith("has_gpu()"))
    ask = f"set -euo pipefail\n{definition}\nhas_gpu && echo yes || echo no"
    answer = subprocess.run(
        ["bash", "-c", ask], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True, check=True, timeout=30
    )
    assert answer.stdout == "yes\n"
