"""What a resume does before the first process starts: it refuses, or settings, data order and record are at the checkpoint."""

import dataclasses
import json
import shutil

import pytest

from psrl.config.load import load_config
from psrl.errors import CheckpointError, ConfigError
from psrl.runtime.recovery import checkpoints_in, newest_whole_checkpoint
from psrl.runtime.resume import fit_to_settings, resume_run
from psrl.runtime.resume_point import Reissue
from psrl.runtime.tickets import training_tickets, validation_tickets
from psrl.telemetry.group_log import Fate, GroupFate, check_group_log, read_group_log
from psrl.telemetry.json_lines import JsonLinesFile, read_json_lines
from psrl.telemetry.metric_log import read_metrics
from psrl.telemetry.names import REWARD_MEAN, VAL_SECONDS
from psrl.telemetry.trackers import TrackedRun, open_metric_log
from tests.runtime.resume_builders import a_point, a_run, a_saved_run, a_source, save, settings, trained, write_fates


def log_metrics(folder, *lines):
    log = open_metric_log(["jsonl"], TrackedRun(folder=folder))
    for step, metrics in lines:
        log.log(metrics, step=step)
    log.close()


def write_episodes(path, *lines):
    file = JsonLinesFile(path)
    for line in lines:
        file.append(line)
    file.close()


def test_a_resume_gives_point_order_and_folder(tmp_path):
    folder, source = a_saved_run(tmp_path), a_source()
    resumed = resume_run(folder.path, settings(), source)
    assert resumed.folder == folder
    assert resumed.checkpoint == folder.checkpoints / "step-000003"
    assert resumed.point == a_point(log_lengths=folder.log_lengths())
    assert resumed.notes == ()
    assert [task.uid for task in source.next_tasks(2)] == ["train-0-10", "train-0-11"]
    assert [source.task_of(one.uid).uid for one in resumed.point.reissue] == ["train-0-7", "train-0-9"]


def test_what_was_recorded_after_the_checkpoint_is_cut_and_the_rest_stays(tmp_path):
    folder = a_run(tmp_path)
    log_metrics(folder, (0, {VAL_SECONDS: 1.0}), *((step, {REWARD_MEAN: step / 10}) for step in (1, 2, 3)))
    # The group of train-0-8 arrived before the checkpoint and is trained on later: its episode is not played again.
    write_episodes(folder.trajectories / "train.jsonl", {"step": 3, "group": "train-0-5"}, {"step": 4, "group": "train-0-8"})
    write_episodes(folder.trajectories / "val.jsonl", {"step": 0, "group": "val-0-0-v0"})
    save(folder, a_point(log_lengths=folder.log_lengths()))
    log_metrics(folder, (4, {REWARD_MEAN: 0.4}), (3, {VAL_SECONDS: 2.0}), (5, {REWARD_MEAN: 0.5}), (5, {VAL_SECONDS: 2.0}))
    write_episodes(folder.trajectories / "train.jsonl", {"step": 4, "group": "train-0-7"})
    write_episodes(folder.trajectories / "val.jsonl", {"step": 3, "group": "val-0-0-v3"}, {"step": 5, "group": "val-0-0-v5"})
    write_fates(folder, trained(4, "train-0-6", "train-0-7"))
    with folder.groups.open("ab") as file:
        file.write(b'{"uid": "train-0-8", "fa')

    resumed = resume_run(folder.path, settings(), a_source())

    assert list(read_metrics(folder.metrics)) == [0, 1, 2, 3]
    assert read_metrics(folder.metrics)[3] == {REWARD_MEAN: 0.3, VAL_SECONDS: 2.0}, "the validation of a finished step stays"
    assert resumed.is_validated
    assert [line["group"] for line in read_json_lines(folder.trajectories / "train.jsonl")] == ["train-0-5", "train-0-8"]
    assert [line["step"] for line in read_json_lines(folder.trajectories / "val.jsonl")] == [0, 3]
    assert [fate.uid for fate in read_group_log(folder.groups)] == [f"train-0-{row}" for row in range(6)]


def test_episodes_of_a_validation_that_had_not_ended_go_and_it_is_to_be_made_again(tmp_path):
    folder = a_run(tmp_path)
    log_metrics(folder, (2, {VAL_SECONDS: 1.0}), (3, {REWARD_MEAN: 0.3}))
    write_episodes(folder.trajectories / "val.jsonl", {"step": 2, "group": "val-0-0-v2"}, {"step": 3, "group": "val-0-0-v3"})
    save(folder, a_point(log_lengths=folder.log_lengths()))
    assert not resume_run(folder.path, settings(), a_source()).is_validated
    assert [line["step"] for line in read_json_lines(folder.trajectories / "val.jsonl")] == [2]


def test_a_second_resume_finds_what_the_first_left(tmp_path):
    folder = a_saved_run(tmp_path)
    first = resume_run(folder.path, settings(), a_source())
    # Elsewhere, because this process holds the run until its end.
    moved = shutil.copytree(folder.path, tmp_path / "elsewhere" / folder.path.name)
    second = resume_run(moved, settings(), a_source())
    assert second.point == first.point
    lines = list(read_json_lines(second.folder.resumes))
    assert [(line["checkpoint"], line["step"], line["num_arrived"], line["num_issued_again"]) for line in lines] == [
        ("step-000003", 3, 2, 2)
    ] * 2


def test_a_run_that_still_goes_on_is_not_resumed(tmp_path):
    folder = a_saved_run(tmp_path)
    folder.hold()
    with pytest.raises(ConfigError, match="still going on in another process"):
        resume_run(folder.path, settings(), a_source())
    assert not folder.resumes.exists()


def test_a_damaged_checkpoint_leads_to_the_one_before_and_a_note(tmp_path):
    folder = a_run(tmp_path)
    save(folder, a_point(log_lengths=folder.log_lengths()))
    later = a_point(
        step=4,
        version=4,
        ledger=dataclasses.replace(a_point().ledger, version=4, occupied={}),
        arrived=(),
        log_lengths=folder.log_lengths(),
    )
    (save(folder, later) / "arrived.json").unlink()
    resumed = resume_run(folder.path, settings(), a_source())
    assert resumed.point.step == 3
    (note,) = resumed.notes
    assert "going on from step-000003: step-000004 is damaged: arrived.json is missing" in note
    assert [path.name for path in checkpoints_in(folder.checkpoints)] == ["step-000003"]


def test_what_a_crash_left_half_written_is_removed(tmp_path):
    folder = a_saved_run(tmp_path)
    (folder.checkpoints / "step-000004.unfinished").mkdir()
    resume_run(folder.path, settings(), a_source())
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-000003"]


@pytest.mark.parametrize(
    ("missing_from_point", "extra_fate", "named"),
    [
        ({"reissue": (Reissue(uid="train-0-7", attempt=0),)}, None, r"1 groups were given and are neither .*: train-0-9"),
        ({}, "train-0-7", r"1 groups stand in groups.jsonl and would be played again: train-0-7"),
        ({}, "train-0-15", r"1 groups were never given: train-0-15"),
    ],
)
def test_a_record_that_tells_another_story_than_the_checkpoint_is_refused_and_left_alone(tmp_path, missing_from_point, extra_fate, named):
    folder = a_run(tmp_path)
    if extra_fate:
        write_fates(folder, [GroupFate(uid=extra_fate, fate=Fate.DROPPED, step=3)])
    changes = dict(missing_from_point)
    if changes:
        changes["ledger"] = dataclasses.replace(a_point().ledger, in_flight=("train-0-7",))
    save(folder, a_point(log_lengths=folder.log_lengths(), **changes))
    write_fates(folder, trained(4, "train-0-6", "train-0-7"))
    before = folder.groups.read_bytes()
    with pytest.raises(CheckpointError, match=named):
        resume_run(folder.path, settings(), a_source())
    assert folder.groups.read_bytes() == before


def test_a_record_that_somebody_removed_is_noted_and_does_not_stop_the_run(tmp_path):
    folder = a_saved_run(tmp_path)
    folder.groups.unlink()
    (note,) = resume_run(folder.path, settings(), a_source()).notes
    assert "groups.jsonl has 0 bytes" in note


def test_other_tasks_under_the_same_settings_are_refused(tmp_path):
    folder = a_saved_run(tmp_path)
    with pytest.raises(ConfigError, match="not those of the checkpoint"):
        resume_run(folder.path, settings(), a_source(word="!"))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.train_batch_size=4", r"data\.train_batch_size=4: was 2 .* checkpoint counts steps"),
        ("trainer.seed=7", r"trainer\.seed=7: was 1 .* validation too"),
        ("data.seed=7", r"data\.seed=7: was 1 .* in which order"),
        ("trainer.total_training_steps=2", r"total_training_steps=2: the run has done 3 steps already"),
    ],
)
def test_a_setting_that_may_not_change_is_refused_before_anything_is_touched(tmp_path, override, named):
    folder = a_saved_run(tmp_path)
    before = folder.config.read_text()
    with pytest.raises(ConfigError, match=named):
        resume_run(folder.path, settings(override), a_source())
    assert folder.config.read_text() == before
    assert not folder.resumes.exists()


def test_a_damaged_checkpoint_stays_in_its_place_while_the_resume_is_refused(tmp_path):
    folder = a_saved_run(tmp_path)
    half = folder.checkpoints / "step-000004"
    half.mkdir()
    with pytest.raises(ConfigError, match="not those of the checkpoint"):
        resume_run(folder.path, settings(), a_source(word="!"))
    assert half.is_dir()


def test_a_manifest_that_does_not_know_the_record_is_refused(tmp_path):
    folder = a_run(tmp_path)
    save(folder, a_point())
    with pytest.raises(CheckpointError, match=r"does not say how long groups\.jsonl was"):
        resume_run(folder.path, settings(), a_source())


def test_a_setting_that_may_change_is_noted_and_is_in_force_for_the_next_resume(tmp_path):
    folder = a_saved_run(tmp_path)
    now = settings("psrl.redundant_groups=1", "trainer.total_training_steps=12")
    resumed = resume_run(folder.path, now, a_source())
    assert set(resumed.notes) == {"psrl.redundant_groups is 1 now, was 0", "trainer.total_training_steps is 12 now, was 9"}
    (line,) = read_json_lines(folder.resumes)
    assert line["changed"] == {
        "psrl.redundant_groups": {"from": 0, "to": 1},
        "trainer.total_training_steps": {"from": 9, "to": 12},
    }
    assert load_config(str(folder.config)) == now


def test_with_less_staleness_groups_that_are_too_old_are_issued_again_before_those_that_were_in_flight(tmp_path):
    folder = a_saved_run(tmp_path)
    resumed = resume_run(folder.path, settings("psrl.staleness=0"), a_source())
    # train-0-6 has V_traj 2 and version 3 comes next; train-0-8 was meant for buffer 4, which V_traj 3 may not enter any more.
    assert [result.group for result in resumed.point.arrived] == ["train-0-8"]
    assert resumed.point.ledger.occupied == {3: {"train-0-8": 3}}
    assert [(one.uid, one.attempt) for one in resumed.point.reissue] == [("train-0-6", 0), ("train-0-7", 0), ("train-0-9", 1)]
    assert "1 arrived groups do not fit the changed settings and are issued again" in resumed.notes


@pytest.mark.parametrize("override", ["psrl.staleness=2", "psrl.staleness=5", "psrl.redundant_groups=3", "psrl.rollout_n=8"])
def test_with_the_same_or_more_room_every_arrived_group_stays_where_it_was(override):
    assert fit_to_settings(a_point(), settings(override)) == a_point()


def test_a_finished_run_can_be_resumed_to_export_its_model(tmp_path):
    folder = a_saved_run(tmp_path)
    resumed = resume_run(folder.path, settings("trainer.total_training_steps=3"), a_source())
    assert resumed.point.arrived == ()
    assert len(resumed.point.reissue) == 4, "they stay known, should the run be made longer again"


def test_episodes_that_are_issued_again_draw_the_random_numbers_they_had(tmp_path):
    folder = a_saved_run(tmp_path)
    source = a_source()
    before = training_tickets(source.task_of("train-0-7"), rollout_n=2, version=2, run_seed=1, attempt=0)
    again = newest_whole_checkpoint(folder.checkpoints).point.reissue[0]
    after = training_tickets(a_source().task_of(again.uid), rollout_n=2, version=3, run_seed=1, attempt=again.attempt)
    assert [(ticket.uid, ticket.seed) for ticket in before] == [(ticket.uid, ticket.seed) for ticket in after]


def test_validation_asks_the_same_whenever_it_is_made():
    (task,) = a_source().next_tasks(1)
    first, later = (validation_tickets(task, num_sampled=2, is_greedy_too=True, version=version, run_seed=1) for version in (0, 7))
    assert [ticket.seed for ticket in first] == [ticket.seed for ticket in later]


def test_the_record_of_a_resumed_run_is_that_of_an_unbroken_one(tmp_path):
    folder = a_saved_run(tmp_path)
    write_fates(folder, trained(4, "train-0-6", "train-0-8"))  # done again after the kill
    resume_run(folder.path, settings(), a_source())
    write_fates(folder, trained(4, "train-0-6", "train-0-7") + trained(5, "train-0-8", "train-0-9"))
    given = [f"train-0-{row}" for row in range(10)]
    assert check_group_log(read_group_log(folder.groups), staleness=2, groups_per_step=2, given=given) == []


def test_the_manifest_can_be_read_by_people(tmp_path):
    folder = a_saved_run(tmp_path)
    manifest = json.loads((folder.checkpoints / "step-000003" / "manifest.json").read_text())
    assert manifest["point"]["step"] == 3
    assert manifest["point"]["ledger"] == {
        "version": 3, "occupied": {"3": {"train-0-6": 2}, "4": {"train-0-8": 3}}, "in_flight": ["train-0-7", "train-0-9"],
    }  # fmt: skip
    assert set(manifest["files"]) == {"arrived.json", "rows-00000.safetensors"}
