"""Run folders: layout, collisions, finding the run to resume."""

import subprocess
import sys
from datetime import datetime, timedelta

import pytest

from psrl.errors import ConfigError
from psrl.telemetry.run_folder import RunFolder

STARTED = datetime(2026, 3, 4, 5, 6, 7)


def test_a_run_lies_below_its_recipe_under_its_start_time(tmp_path):
    run = RunFolder.create(tmp_path, "retool_tiny", STARTED)
    assert run.path == tmp_path / "retool_tiny" / "2026-03-04_05-06-07"
    assert run.recipe == "retool_tiny"
    assert {path.name for path in run.path.iterdir()} == {"tensorboard", "trajectories", "checkpoints", "logs"}
    assert [p.name for p in (run.config, run.metrics, run.errors, run.report)] == [
        "config.yaml",
        "metrics.jsonl",
        "errors.jsonl",
        "report.html",
    ]


def test_runs_of_the_same_second_get_folders_of_their_own_and_the_last_made_is_the_latest(tmp_path):
    runs = [RunFolder.create(tmp_path, "gsm8k", STARTED) for _ in range(11)]
    assert len({run.path for run in runs}) == 11
    # "-11" sorts before "-2" as text; the order is by number.
    assert [run.path for run in RunFolder.all(tmp_path, "gsm8k")] == [run.path for run in runs]
    assert RunFolder.latest(tmp_path, "gsm8k") == runs[-1]


def test_the_latest_run_with_a_checkpoint_is_not_hidden_by_a_start_that_failed(tmp_path):
    good = RunFolder.create(tmp_path, "gsm8k", STARTED)
    (good.checkpoints / "step_3").mkdir()
    failed = RunFolder.create(tmp_path, "gsm8k", STARTED + timedelta(minutes=1))
    assert RunFolder.latest(tmp_path, "gsm8k") == failed
    assert RunFolder.latest(tmp_path, "gsm8k", with_checkpoint=True) == good
    (failed.checkpoints / "step_1.unfinished").mkdir()
    (failed.checkpoints / "step_2.damaged").mkdir()
    assert RunFolder.latest(tmp_path, "gsm8k", with_checkpoint=True) == good


def test_there_is_no_latest_run_of_a_recipe_that_never_ran(tmp_path):
    (tmp_path / "gsm8k" / "notes").mkdir(parents=True)
    assert RunFolder.latest(tmp_path, "gsm8k") is None
    assert RunFolder.latest(tmp_path, "swe") is None


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".", "..", "a b"])
def test_a_recipe_name_that_would_leave_the_root_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="one folder name"):
        RunFolder.create(tmp_path, name, STARTED)


def test_opening_what_is_no_run_says_so(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        RunFolder.open(tmp_path / "missing")
    with pytest.raises(ConfigError, match="holds no run"):
        RunFolder.open(tmp_path)
    run = RunFolder.create(tmp_path, "gsm8k", STARTED)
    assert RunFolder.open(run.path) == run


def test_a_run_is_held_by_one_process_until_that_is_gone_however_it_went(tmp_path):
    run = RunFolder.create(tmp_path, "gsm8k", STARTED)
    program = (
        "import sys; from pathlib import Path; from psrl.telemetry.run_folder import RunFolder\n"
        "RunFolder(Path(sys.argv[1])).hold(); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program, run.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="still going on in another process"):
            run.hold()
        holder.kill()
    run.hold()


def test_a_record_that_has_nothing_to_cut_is_not_written_again(tmp_path):
    run = RunFolder.create(tmp_path, "gsm8k", STARTED)
    run.cut(3, run.log_lengths())
    run.metrics.write_text('{"step": 3, "metrics": {}}\n')
    before = run.metrics.stat().st_ino
    run.cut(3, run.log_lengths())
    assert run.metrics.stat().st_ino == before
    run.cut(2, run.log_lengths())
    assert run.metrics.read_text() == ""
