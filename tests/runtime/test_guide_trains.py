"""The guide in psrl/environments/README.md, followed literally in an empty folder with an installed package, trains."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from psrl.telemetry.metric_log import read_metrics

REPOSITORY = Path(__file__).parents[2]
GUIDE = (REPOSITORY / "psrl" / "environments" / "README.md").read_text()
INSTALL_LIMIT_S = 300
TRAIN_LIMIT_S = 400


def printed(language: str, name: str) -> str:
    """The block of the guide whose first line names the file."""
    blocks = re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(f"# {name}")]
    return block


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package as `pip install` from the clone puts it, away from the repository; what it needs is there already."""
    # A copy is installed: pip builds inside the folder that it is given, and takes along what an earlier build left there.
    clone, target = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("installed")
    shutil.copytree(REPOSITORY / "psrl", clone / "psrl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, clone)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(clone)]
    subprocess.run(command, check=True, timeout=INSTALL_LIMIT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return target


@pytest.mark.slow
def test_the_guides_example_trains_outside_of_the_repository(tmp_path, installed):
    (tmp_path / "sum_game.py").write_text(printed("python", "sum_game.py"))
    (tmp_path / "sum_game.yaml").write_text(printed("yaml", "sum_game.yaml"))
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    train = [sys.executable, "-m", "psrl", "train", "./sum_game.yaml"]
    run = subprocess.run(train, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TRAIN_LIMIT_S)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    (metrics_file,) = tmp_path.glob("runs/sum_game/*/metrics.jsonl")
    metrics = read_metrics(metrics_file)
    early = [metrics[step]["reward/episode/mean"] for step in range(1, 6)]
    late = [metrics[step]["reward/episode/mean"] for step in range(16, 21)]
    assert sum(late) / 5 > sum(early) / 5 + 0.1, (early, late)
    assert "env/wrong_first_answers" in metrics[1]
