"""A checkpoint is as it was written or is not used; what cannot be written leaves the one before it."""

import asyncio
import dataclasses
import json
import resource
import signal
from contextlib import contextmanager

import pytest

from psrl.data_plane import COLUMN_NAMES, MemoryDataPlane
from psrl.errors import CheckpointError, DataPlaneError
from psrl.runtime.groups import GroupResult
from psrl.runtime.recovery import OtherFormatError, checkpoints_in, newest_whole_checkpoint, read_checkpoint, restore_rows
from psrl.runtime.resume_point import Reissue, ResumePoint, check_point
from psrl.runtime.saved_rows import read_rows, save_rows
from psrl.staleness.ledger import LedgerSnapshot
from tests.runtime.resume_builders import a_plane, a_point, a_result, a_run, save


@pytest.fixture
def folder(tmp_path):
    return a_run(tmp_path)


def at_step(step):
    """A point with nothing arrived, and nothing in flight."""
    return a_point(step=step, version=step, ledger=LedgerSnapshot(version=step, occupied={}, in_flight=()), reissue=(), arrived=())


def test_what_was_saved_comes_back_field_by_field(folder):
    point = a_point(log_lengths={"groups.jsonl": 12}, arrived=(a_result("train-0-6", admitted=2, num_surplus=3), a_result("train-0-8")))
    assert read_checkpoint(save(folder, point)) == point


def test_every_field_of_a_group_is_kept_but_its_records_and_that_it_was_not_cancelled():
    kept = set(a_point().arrived_as_list()[0])
    assert kept == {field.name for field in dataclasses.fields(GroupResult)} - {"records", "is_cancelled"}


async def restored(checkpoint, point):
    plane = MemoryDataPlane()
    await restore_rows(checkpoint, point, data_plane=plane)
    return plane


def rows_in(plane, keys):
    return [{name: (column.dtype, column.tolist()) for name, column in row.items()} for row in plane.fetch(keys, COLUMN_NAMES)]


async def rows_after(checkpoint, point):
    plane = await restored(checkpoint, point)
    return plane, rows_in(plane, sorted(plane.keys()))


def test_rows_of_arrived_groups_come_back_with_their_dtypes_and_lengths(folder):
    point = a_point()
    plane = a_plane(*point.arrived)
    plane.put([dataclasses.replace(a_row, key="of-nobody") for a_row in plane._rows.values()][:1])
    checkpoint = save(folder, point, plane)
    back, rows = asyncio.run(rows_after(checkpoint, point))
    assert sorted(back.keys()) == ["train-0-6-e0", "train-0-8-e0"], "rows of groups that had not arrived are made again"
    assert rows == rows_in(plane, sorted(back.keys()))
    assert [len(row["input_ids"][1]) for row in rows] == [3, 4]


def test_groups_that_are_issued_again_leave_their_rows_behind(folder):
    point = a_point()
    checkpoint = save(folder, point)
    fewer = dataclasses.replace(point, arrived=point.arrived[:1])
    assert asyncio.run(restored(checkpoint, fewer)).keys() == ["train-0-6-e0"]


def test_rows_lie_in_files_of_a_bounded_size_and_come_back_file_by_file(tmp_path):
    results = [a_result(f"train-0-{number}") for number in range(5)]
    plane, metas = a_plane(*results), [result.meta for result in results]
    # The tags of every row say 4 tokens: two rows fill a file of 11.
    save_rows(tmp_path, metas, plane, tokens_per_file=11)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rows-0000{number}.safetensors" for number in range(3)]
    parts = list(read_rows(tmp_path, metas[1:4]))
    assert [[row.key for row in part] for part in parts] == [["train-0-1-e0"], ["train-0-2-e0", "train-0-3-e0"]]
    assert [len(row.columns["input_ids"]) for part in parts for row in part] == [4, 5, 6]
    (tmp_path / "rows-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="does not hold 2 of 5 rows, such as train-0-2-e0"):
        list(read_rows(tmp_path, metas))


def test_a_run_without_arrived_groups_saves_no_rows(folder):
    checkpoint = save(folder, at_step(3))
    assert not (checkpoint / "rows-00000.safetensors").exists()
    assert asyncio.run(restored(checkpoint, read_checkpoint(checkpoint))).keys() == []


def test_the_newest_are_kept_and_counted_as_numbers(folder):
    for step in (8, 9, 10, 1_000_000):
        save(folder, at_step(step), num_kept=3)
    assert [path.name for path in checkpoints_in(folder.checkpoints)] == ["step-000009", "step-000010", "step-1000000"]


def test_what_a_crash_left_is_no_checkpoint_and_goes_with_the_next_one(folder):
    save(folder, at_step(2))
    half = folder.checkpoints / "step-000003.unfinished"
    (half / "train").mkdir(parents=True)
    (half / "manifest.json").write_text("{}")
    assert newest_whole_checkpoint(folder.checkpoints).point.step == 2
    save(folder, at_step(4))
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step-000002", "step-000004"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def change_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def zeros(path):
    path.write_bytes(b"\0" * path.stat().st_size)


def gone(path):
    path.unlink()


def change_manifest(change):
    def damage(path):
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return damage


DAMAGES = [
    ("rows-00000.safetensors", cut, "rows-00000.safetensors has"),
    ("rows-00000.safetensors", change_a_byte, "rows-00000.safetensors is not what was written"),
    ("rows-00000.safetensors", gone, "rows-00000.safetensors is missing"),
    ("arrived.json", cut, "arrived.json has"),
    ("arrived.json", change_a_byte, "arrived.json is not what was written"),
    ("manifest.json", cut, "JSONDecodeError"),
    ("manifest.json", zeros, "JSONDecodeError"),
    ("manifest.json", gone, "FileNotFoundError"),
    ("manifest.json", change_manifest(lambda manifest: manifest.pop("files")), "KeyError"),
    ("manifest.json", change_manifest(lambda manifest: manifest["point"].pop("ledger")), "KeyError"),
    ("manifest.json", change_manifest(lambda manifest: manifest["point"].update(version=4)), "weights have version 4"),
]


@pytest.mark.parametrize(("name", "damage", "named"), DAMAGES, ids=[f"{name}-{named}" for name, _, named in DAMAGES])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it_and_named(folder, name, damage, named):
    save(folder, at_step(2))
    damage(save(folder, a_point()) / name)
    found = newest_whole_checkpoint(folder.checkpoints)
    assert (found.path.name, found.point.step) == ("step-000002", 2)
    assert len(checkpoints_in(folder.checkpoints)) == 2, "looking changes nothing"
    (note,) = found.set_aside()
    assert "step-000003" in note and named in note
    assert [path.name for path in checkpoints_in(folder.checkpoints)] == ["step-000002"]
    assert (folder.checkpoints / "step-000003.damaged").is_dir(), "it stays for people to look at"


def test_when_no_checkpoint_is_whole_the_error_says_what_is_wrong_with_each(folder):
    cut(save(folder, at_step(2)) / "manifest.json")
    gone(save(folder, a_point()) / "arrived.json")
    with pytest.raises(CheckpointError, match=r"step-000003 is damaged: arrived.json is missing.*step-000002 is damaged: JSONDecodeError"):
        newest_whole_checkpoint(folder.checkpoints)
    assert len(checkpoints_in(folder.checkpoints)) == 2, "nothing is renamed where there is nothing to go on from"


def test_a_folder_without_checkpoints_says_so(folder):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        newest_whole_checkpoint(folder.checkpoints)


def test_a_checkpoint_of_another_psrl_is_refused_by_name_and_not_passed_over(folder):
    save(folder, at_step(2))
    old = folder.checkpoints / "step-000003"
    old.mkdir()
    (old / "manifest.json").write_text(json.dumps({"step": 3, "version": 3, "source_state": {}}))
    with pytest.raises(OtherFormatError, match=r"step-000003 was written by another psrl \(format 1; this one reads 2\)"):
        newest_whole_checkpoint(folder.checkpoints)


@contextmanager
def files_at_most(num_bytes):
    """What a full disk does to a writer: its write fails half-way with an OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("num_bytes", [100, 1200], ids=["at the rows", "at the groups"])
def test_a_full_disk_is_named_and_leaves_the_checkpoint_before_and_nothing_else(folder, num_bytes):
    save(folder, at_step(2))
    with files_at_most(num_bytes), pytest.raises(CheckpointError, match="step-000003 cannot be written"):
        save(folder, a_point())
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-000002"]
    assert newest_whole_checkpoint(folder.checkpoints).point.step == 2


def test_rows_that_are_not_there_fail_the_checkpoint_and_leave_nothing(folder):
    with pytest.raises(DataPlaneError, match="train-0-6-e0"):
        save(folder, a_point(), MemoryDataPlane())
    assert list(folder.checkpoints.iterdir()) == []


def test_a_step_that_is_saved_again_replaces_what_was_there(folder):
    save(folder, a_point())
    save(folder, at_step(3))
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-000003"]
    assert newest_whole_checkpoint(folder.checkpoints).point.arrived == ()


def occupied(**changes):
    ledger = a_point().ledger
    return dataclasses.replace(ledger, **changes)


CONTRADICTIONS = [
    ({"version": 4}, "3 steps were done, the weights have version 4"),
    ({"ledger": occupied(version=2)}, "the ledger 2"),
    ({"arrived": ()}, "the ledger holds 2 groups .* and no groups have arrived"),
    ({"reissue": (Reissue(uid="train-0-7", attempt=0),)}, "train-0-9.* would not be issued again"),
    ({"reissue": (*a_point().reissue, Reissue(uid="train-0-6", attempt=0))}, "train-0-6.* would be trained on twice"),
    ({"ledger": occupied(occupied={3: {"train-0-6": 2}, 4: {"train-0-8": 4}})}, "train-0-8.* lie in buffer 4"),
    ({"ledger": occupied(occupied={2: {"train-0-6": 2}, 4: {"train-0-8": 3}})}, "train-0-6.* lie in buffer 2"),
    (
        {"ledger": occupied(occupied={3: {"train-0-6": 3}, 4: {"train-0-8": 3}})},
        "train-0-6 holds tokens of version 2, and the ledger says 3",
    ),
]


@pytest.mark.parametrize(("changes", "named"), CONTRADICTIONS, ids=[named for _, named in CONTRADICTIONS])
def test_a_point_that_contradicts_itself_is_refused(changes, named):
    check_point(a_point())
    with pytest.raises(CheckpointError, match=named):
        check_point(a_point(**changes))


def test_a_run_that_has_not_begun_has_no_checkpoint(folder):
    with pytest.raises(AssertionError, match="has not begun"):
        save(folder, ResumePoint(step=0, version=0, source_state={}))
