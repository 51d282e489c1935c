"""A run folder as a driver leaves it, made of plain objects: settings, record, groups that have arrived, their rows."""

import asyncio
import dataclasses
from datetime import datetime
from functools import cache
from pathlib import Path

import torch

from psrl.config.load import load_config, to_yaml
from psrl.data_plane import KVBatchMeta, MemoryDataPlane, TrajectoryRow
from psrl.datasets.source import SourceReport, TaskSource
from psrl.runtime.groups import EpisodeSummary, GroupResult
from psrl.runtime.recovery import save_checkpoint
from psrl.runtime.resume_point import Reissue, ResumePoint
from psrl.staleness.ledger import LedgerSnapshot
from psrl.telemetry.group_log import Fate, GroupFate, GroupLog
from psrl.telemetry.run_folder import RunFolder
from psrl.types import Message, Outcome, Role, Task, Timings

NUM_TASKS = 20
STARTED = datetime(2026, 3, 4, 5, 6, 7)
SETTINGS = ("data.train_batch_size=2", "psrl.rollout_n=2", "psrl.staleness=2", "trainer.total_training_steps=9", "trainer.test_freq=0")


@cache
def settings(*overrides):
    """To be read only."""
    return load_config("retool_tiny", [*SETTINGS, *overrides])


def a_source(num_tasks=NUM_TASKS, *, word="?"):
    """Not shuffled: the n-th task is `train-0-n`."""
    rows = [Task(uid=str(row), prompt=(Message(role=Role.USER, content=f"{word}{row}"),), data_source="t") for row in range(num_tasks)]
    return TaskSource(rows, [], shuffle=False, seed=1, report=SourceReport(num_train=0, num_val=0, bad_row_counts={}, num_overlong=0))


def row(key, length, *, version):
    columns = {
        "input_ids": torch.arange(length),
        "loss_mask": torch.ones(length, dtype=torch.int8),
        "rollout_logprobs": torch.full((length,), -0.25),
        "policy_versions": torch.full((length,), version),
        "turn_indices": torch.zeros(length, dtype=torch.int32),
        "rewards": torch.linspace(0, 1, length),
    }
    return TrajectoryRow(key=key, tags={"group": key.rsplit("-", 1)[0], "reward": 1.0, "num_tokens": length}, columns=columns)


def a_result(group, *, admitted=3, attempt=0, num_surplus=0):
    summaries = tuple(
        EpisodeSummary(
            uid=f"{group}-e{index}",
            outcome=Outcome.FINISHED,
            reward=[1.0, None][index],
            accuracy=None,
            num_turns=2,
            num_sampled=7,
            counts={"tool_calls": 1.0},
            timings=Timings(total_s=1.5, generation_s=1.0),
            temperature=None,
            error=[None, "SandboxError: gone"][index],
            num_retries=index,
        )
        for index in range(2)
    )
    meta = KVBatchMeta(keys=[f"{group}-e0"], tags=[dict(row(f"{group}-e0", 4, version=admitted).tags)], partition_id="train")
    return GroupResult(
        group=group, summaries=summaries, meta=meta, records=(), oldest_version=admitted, attempt=attempt, num_surplus=num_surplus
    )


def a_plane(*results):
    plane = MemoryDataPlane()
    for number, result in enumerate(results):
        plane.put([row(key, 3 + number, version=result.oldest_version) for key in result.meta.keys])
    return plane


def a_point(**changes):
    """Three steps of two groups are done; two more have arrived (one of them late), two are in flight, the 11th task comes next."""
    late, fresh = a_result("train-0-6", admitted=2), a_result("train-0-8", admitted=3, attempt=1)
    point = ResumePoint(
        step=3,
        version=3,
        source_state=a_source().state_dict() | {"index": 10},
        ledger=LedgerSnapshot(version=3, occupied={3: {late.group: 2}, 4: {fresh.group: 3}}, in_flight=("train-0-7", "train-0-9")),
        reissue=(Reissue(uid="train-0-7", attempt=0), Reissue(uid="train-0-9", attempt=1)),
        arrived=(late, fresh),
    )
    return dataclasses.replace(point, **changes)


def save(folder: RunFolder, point: ResumePoint, plane=None, *, num_kept=2) -> Path:
    """As the driver does, without train workers."""
    plane = a_plane(*point.arrived) if plane is None else plane
    saving = save_checkpoint(folder.checkpoints, point, train_workers=(), data_plane=plane, num_kept=num_kept, deadline_s=30.0)
    return asyncio.run(saving)


def trained(step, *uids):
    return [GroupFate(uid=uid, fate=Fate.TRAINED, step=step, admitted_version=step - 1, buffer_version=step - 1) for uid in uids]


def write_fates(folder: RunFolder, fates):
    log = GroupLog(folder.groups)
    for fate in fates:
        log.write(fate)
    log.close()


def a_run(root, *overrides) -> RunFolder:
    """A run that has trained on the first six tasks in three steps."""
    folder = RunFolder.create(root, "retool_tiny", STARTED)
    folder.config.write_text(to_yaml(settings(*overrides)))
    write_fates(folder, [fate for step in (1, 2, 3) for fate in trained(step, f"train-0-{2 * step - 2}", f"train-0-{2 * step - 1}")])
    return folder


def a_saved_run(root, *overrides, **changes):
    """The same with its checkpoint."""
    folder = a_run(root, *overrides)
    save(folder, dataclasses.replace(a_point(**changes), log_lengths=folder.log_lengths()))
    return folder
