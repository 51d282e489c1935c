"""The commands as a user types them; what needs engines is in tests/runtime."""

import json
import os
import subprocess
import sys
from datetime import datetime

import pytest
from psrl_cli_model import write_tiny_model

from psrl.cli.main import main
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trajectories import TrajectoryWriter
from psrl.types import (
    Episode,
    EpisodeTicket,
    EpisodeUid,
    GroupUid,
    LoopResult,
    Message,
    Outcome,
    PolicyVersion,
    Role,
    Score,
    Step,
    Submission,
    Task,
    TaskUid,
    Timings,
    ToolCall,
    Trajectory,
    TrajectoryUid,
)

RECIPE = """
train_actor_rollout_ref:
  model: {{path: {model}}}
data:
  generator: {{name: arithmetic, num_train: 32}}
sft: {{generator: arithmetic, num_steps: 2, batch_size: 2, from_scratch: true, warmup_steps: 1, output_path: {folder}/tuned}}
"""


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def recipe(tmp_path, tiny_model):
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE.format(model=tiny_model, folder=tmp_path))
    return path


def run_psrl(*arguments):
    """(exit code) of the program, in this process."""
    with pytest.raises(SystemExit) as info:
        main([str(argument) for argument in arguments])
    return info.value.code


def test_a_dry_run_prints_settings_and_plan_and_starts_nothing(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_psrl("train", recipe, "psrl.rollout_n=4", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "rollout_n: 4" in printed
    for role in ("controller", "train worker", "torch engine", "agent worker", "TransferQueue"):
        assert role in printed
    assert "nothing was started" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml"]


def test_a_dry_run_refuses_a_plan_that_the_machine_cannot_hold(recipe, capsys):
    assert run_psrl("train", recipe, "trainer.num_workers=4096", "--dry-run") == 2
    assert "trainer.num_workers" in capsys.readouterr().err


def test_resume_without_a_run_says_so(recipe, tmp_path, capsys):
    assert run_psrl("train", recipe, f"trainer.default_local_dir={tmp_path}/runs", "--resume") == 2
    assert "has a checkpoint" in capsys.readouterr().err


def test_resume_from_a_folder_that_is_no_run_says_so(recipe, tmp_path, capsys):
    assert run_psrl("train", recipe, "--resume-from", tmp_path) == 2
    assert "is no run folder" in capsys.readouterr().err


def test_two_ways_to_name_the_run_to_resume_are_refused(recipe, tmp_path, capsys):
    assert run_psrl("train", recipe, "--resume", "--resume-from", tmp_path) == 2
    assert "leave one of them out" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "eval", "sft"])
def test_a_command_that_the_machine_cannot_hold_starts_nothing(recipe, tmp_path, capsys, command):
    # A vocabulary of 2^46 words times a width of 128: no machine holds its embedding.
    model = tmp_path / "huge"
    model.mkdir()
    sizes = {"num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 1, "vocab_size": 2**46}
    (model / "config.json").write_text(json.dumps(sizes))
    overrides = (f"train_actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={tmp_path}/runs")
    assert run_psrl(command, recipe, *overrides) == 2
    assert "GiB, this machine has" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_resume_takes_the_settings_of_the_run(recipe, tmp_path, capsys):
    runs = tmp_path / "runs"
    run = RunFolder.create(runs, "mine", datetime(2026, 1, 2, 3, 4, 5))
    (run.checkpoints / "step-3").mkdir()
    run.config.write_text(recipe.read_text() + "recipe: mine\npsrl: {rollout_n: 3}\n")
    assert run_psrl("train", recipe, f"trainer.default_local_dir={runs}", "--resume", "--dry-run") == 0
    assert "rollout_n: 3" in capsys.readouterr().out


def test_resume_refuses_a_setting_that_may_not_change_and_starts_nothing(recipe, tmp_path, capsys):
    runs = tmp_path / "runs"
    run = RunFolder.create(runs, "mine", datetime(2026, 1, 2, 3, 4, 5))
    (run.checkpoints / "step-3").mkdir()
    run.config.write_text(recipe.read_text() + "recipe: mine\n")
    root = f"trainer.default_local_dir={runs}"
    assert run_psrl("train", recipe, root, "data.train_batch_size=4", "--resume") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "data.train_batch_size = 4: was 16 when the run was started" in said
    assert "leave data.train_batch_size out" in said


def test_fine_tuning_writes_a_model_folder(recipe, tmp_path, capsys):
    assert run_psrl("sft", recipe) == 0
    assert (tmp_path / "tuned" / "config.json").is_file()
    assert list((tmp_path / "tuned").glob("*.safetensors"))
    assert "step 2/2" in capsys.readouterr().out


def test_fine_tuning_on_rows_of_a_file_learns_the_assistant_turns(recipe, tmp_path):
    rows = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "What is 2+3?"}, {"role": "assistant", "content": "It is 5."}]
    rows.write_text(json.dumps({"messages": messages}) + "\n")
    assert run_psrl("sft", recipe, "sft.generator=null", f"sft.train_files=[{rows}]", "sft.num_steps=1", "sft.batch_size=1") == 0
    assert (tmp_path / "tuned" / "config.json").is_file()


def test_a_row_without_messages_names_its_file_and_line(recipe, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x"}\n')
    assert run_psrl("sft", recipe, "sft.generator=null", f"sft.train_files=[{rows}]") == 2
    printed = capsys.readouterr().err
    assert "sft.train_files" in printed
    assert "rows.jsonl row 0" in printed
    assert "Traceback" not in printed


def test_debug_shows_the_traceback(recipe):
    program = [sys.executable, "-m", "psrl", "train", str(recipe), "psrl.rollout_n=1", "--debug"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_recipe_without_preparation_says_so(recipe, capsys):
    assert run_psrl("prepare", recipe) == 2
    assert "needs no preparation" in capsys.readouterr().err


def test_prepare_calls_the_function_of_a_users_own_recipe(recipe, tmp_path):
    (tmp_path / "prepare.py").write_text(
        "def prepare(source, output):\n    output.mkdir()\n    (output / 'made').write_text(source.read_text())\n"
    )
    (tmp_path / "raw.txt").write_text("rows")
    assert run_psrl("prepare", recipe, "--source", tmp_path / "raw.txt", "--output", tmp_path / "out") == 0
    assert (tmp_path / "out" / "made").read_text() == "rows"


def test_help_lists_every_command_and_is_quick_to_import():
    done = subprocess.run([sys.executable, "-m", "psrl", "--help"], capture_output=True, text=True, timeout=60, check=True)
    for command in ("train", "sft", "eval", "prepare", "doctor", "view"):
        assert f"  {command} " in done.stdout


@pytest.fixture
def run(tmp_path):
    """A run folder with one training episode: a call, its answer, the result."""
    folder = RunFolder.create(tmp_path, "retool_tiny", datetime(2026, 1, 2, 3, 4, 5))
    trajectory = Trajectory(uid=TrajectoryUid("train-0-7/0"))
    numbers = {"logprobs": [-0.5, -0.25], "policy_versions": [3, 3], "temperature": 1.0, "finish_reason": "stop"}
    trajectory.append(Step(observation_ids=[1, 2], sampled_ids=[3, 4], **numbers))
    trajectory.append(Step(observation_ids=[5], sampled_ids=[6, 7], **numbers))
    messages = (
        Message(role=Role.USER, content="What is 2+3?"),
        Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id="call-0-0", name="code_interpreter", arguments={"code": "2+3"}),)),
        Message(role=Role.TOOL, content="5", tool_call_id="call-0-0", name="code_interpreter"),
        Message(role=Role.ASSISTANT, content="[bold]It is[/bold] \\boxed{5}."),
    )
    task = Task(uid=TaskUid("train-0-7"), prompt=messages[:1], data_source="arithmetic", ground_truth="5")
    handed_in = Submission(exit_status="Submitted", patch="--- a/[red]x[/red]\n" + "+" * 20_000, text="my words")
    texts = ("call", "It is \\boxed{5}.")
    result = LoopResult(outcome=Outcome.FINISHED, trajectories=(trajectory,), messages=messages, turn_texts=texts, submission=handed_in)
    ticket = EpisodeTicket(uid=EpisodeUid("e-1"), group=GroupUid("g-1"), admitted_version=PolicyVersion(3), seed=1)
    writer = TrajectoryWriter(folder.trajectories)
    episode = Episode(ticket=ticket, task=task, result=result, score=Score(reward=1.0, accuracy=1.0), timings=Timings())
    writer.write(episode, step=4, pieces=[["<user>", "2+3", "<call>", "2+3;", "<5>", "It is ", "5."]])
    writer.close()
    return folder.path


def test_view_lists_the_episodes_of_a_run(run, capsys):
    assert run_psrl("view", run) == 0
    printed = capsys.readouterr().out
    for words in ("train-0-7", "finished", "boxed{5}"):
        assert words in printed


def test_view_shows_an_episode_with_messages_tokens_and_reward(run, capsys):
    assert run_psrl("view", run, "--episode", 0) == 0
    printed = capsys.readouterr().out
    for words in ("What is 2+3?", "code_interpreter(code=2+3)", "[bold]It is[/bold]", "<user>2+3<call>2+3;<5>It is 5.", "reward 1"):
        assert words in printed


def test_view_shows_what_an_agent_handed_in_as_plain_text_and_cuts_it(run, capsys):
    assert run_psrl("view", run, "--episode", 0) == 0
    printed = capsys.readouterr().out
    for words in ("submission: Submitted", "--- a/[red]x[/red]", "characters left out", "my words"):
        assert words in printed
    assert printed.count("+") < 7000


def test_view_colours_sampled_tokens_otherwise_than_observed_ones(run):
    environment = dict(os.environ, FORCE_COLOR="1", TERM="xterm-256color")
    program = [sys.executable, "-m", "psrl", "view", str(run), "--episode", "0"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True, env=environment)
    # ANSI: 32 is green, 2 is dim. Neighbours of one kind share a code.
    assert "\x1b[32m<call>" in done.stdout
    assert "\x1b[2m<user>" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--episode", 3], "0 to 0"), (["--val"], "val.jsonl"), (["--step", 9, "--episode", 0], "none")],
    ids=["unknown episode", "no validation", "no such step"],
)
def test_view_says_what_is_not_there(run, capsys, arguments, words):
    assert run_psrl("view", run, *arguments) == 2
    assert words in capsys.readouterr().err


def test_view_of_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert run_psrl("view", tmp_path / "nothing") == 2
    assert "no such folder" in capsys.readouterr().err
