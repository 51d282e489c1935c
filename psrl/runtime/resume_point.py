"""Where a run goes on: the part of a checkpoint that is no tensor, as data and as JSON.

Invariant: every task that the source gave has its fate in `groups.jsonl`, or has arrived, or is issued again; never two of them.
A checkpoint does not keep whole episodes of arrived groups: what controller and trainer need of them (summaries, keys, tags) is here,
their tokens are rows of the data plane (`saved_rows.py`), and who looks at them finds them in the run folder.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from psrl.data_plane import KVBatchMeta
from psrl.errors import CheckpointError
from psrl.runtime.groups import EpisodeSummary, GroupResult
from psrl.staleness import LedgerSnapshot
from psrl.types import EpisodeUid, GroupUid, Outcome, PolicyVersion, Timings


@dataclass(frozen=True, kw_only=True, slots=True)
class Reissue:
    """A group that was in flight: it is issued again before any new task."""

    uid: GroupUid
    attempt: int
    """As it was issued: a resume is no attempt of its own, so that the same episodes come out where they can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """Where a run goes on. Taken between two awaits of the driver, so that all of it is of one moment."""

    step: int
    """Training steps done."""
    version: PolicyVersion
    """Policy version of the weights; as many as there were steps."""
    source_state: dict[str, Any]
    """The data order, pointing at the first task that was never admitted."""
    ledger: LedgerSnapshot | None = None
    """Which buffer holds which arrived group. None: a run that has not begun."""
    reissue: tuple[Reissue, ...] = ()
    """Groups in flight, in the order in which they were admitted, and those that waited to be issued again."""
    arrived: tuple[GroupResult, ...] = ()
    """Groups that wait for their update; a checkpoint does not keep their records."""
    log_lengths: dict[str, int] = field(default_factory=dict)
    """`RunFolder.log_lengths()`: what the record held. A resume cuts the files to it, so that nothing stands there twice."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON; without `arrived`, which `arrived_as_list` gives."""
        assert self.ledger is not None, "a run that has not begun has nothing to go on with"
        return {
            "step": self.step,
            "version": self.version,
            "source_state": self.source_state,
            "ledger": self.ledger.as_dict(),
            "reissue": [{"uid": one.uid, "attempt": one.attempt} for one in self.reissue],
            "log_lengths": self.log_lengths,
        }

    def arrived_as_list(self) -> list[dict[str, Any]]:
        """For JSON."""
        return [_result_as_dict(result) for result in self.arrived]

    @classmethod
    def of(cls, values: Mapping[str, Any], arrived: Iterable[Mapping[str, Any]]) -> ResumePoint:
        """From `as_dict` and `arrived_as_list`, after a journey through JSON.

        Raises:
            KeyError, TypeError, ValueError: A field is missing or is not what it should be.
        """
        return cls(
            step=values["step"],
            version=PolicyVersion(values["version"]),
            source_state=values["source_state"],
            ledger=LedgerSnapshot.of(values["ledger"]),
            reissue=tuple(Reissue(uid=GroupUid(one["uid"]), attempt=one["attempt"]) for one in values["reissue"]),
            arrived=tuple(_result_of(one) for one in arrived),
            log_lengths=values["log_lengths"],
        )


def check_point(point: ResumePoint) -> None:
    """Versions, ledger and groups must tell the same story.

    Raises:
        CheckpointError: They do not.
    """
    ledger = point.ledger
    assert ledger is not None, "a run that has not begun has nothing to go on with"
    if not point.step == point.version == ledger.version:
        raise CheckpointError(f"{point.step} steps were done, the weights have version {point.version}, the ledger {ledger.version}")
    placed = [group for groups in ledger.occupied.values() for group in groups]
    arrived, again = [result.group for result in point.arrived], [one.uid for one in point.reissue]
    if Counter(placed) != Counter(arrived):
        raise CheckpointError(f"the ledger holds {_few(placed)}, and {_few(arrived)} have arrived")
    if not set(ledger.in_flight) <= set(again):
        raise CheckpointError(f"{_few(set(ledger.in_flight) - set(again))} were in flight and would not be issued again")
    twice = [uid for uid, count in Counter(arrived + again).items() if count > 1]
    if twice:
        raise CheckpointError(f"{_few(twice)} would be trained on twice")
    for buffer, groups in ledger.occupied.items():
        wrong = [group for group, admitted in groups.items() if not admitted <= point.version <= buffer]
        if wrong:
            raise CheckpointError(f"{_few(wrong)} lie in buffer {buffer} with {groups[wrong[0]]} as version, at version {point.version}")
    admitted_of = {group: admitted for groups in ledger.occupied.values() for group, admitted in groups.items()}
    for result in point.arrived:
        if result.oldest_version is not None and result.oldest_version < admitted_of[result.group]:
            raise CheckpointError(
                f"{result.group} holds tokens of version {result.oldest_version}, and the ledger says {admitted_of[result.group]}"
            )


def _few(uids: Iterable[str]) -> str:
    names = sorted(uids)
    return f"{len(names)} groups ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else "no groups"


def _result_as_dict(result: GroupResult) -> dict[str, Any]:
    assert not result.is_cancelled, f"{result.group} was cancelled and cannot wait for an update"
    return {
        "group": result.group,
        "attempt": result.attempt,
        "oldest_version": result.oldest_version,
        "num_surplus": result.num_surplus,
        "summaries": [dataclasses.asdict(summary) for summary in result.summaries],
        "meta": {"keys": result.meta.keys, "tags": result.meta.tags, "partition_id": result.meta.partition_id},
    }


def _result_of(values: Mapping[str, Any]) -> GroupResult:
    return GroupResult(
        group=GroupUid(values["group"]),
        attempt=values["attempt"],
        oldest_version=values["oldest_version"],
        num_surplus=values["num_surplus"],
        summaries=tuple(_summary_of(summary) for summary in values["summaries"]),
        meta=KVBatchMeta(**values["meta"]),
        records=(),
    )


def _summary_of(values: Mapping[str, Any]) -> EpisodeSummary:
    typed = {"uid": EpisodeUid(values["uid"]), "outcome": Outcome(values["outcome"]), "timings": Timings(**values["timings"])}
    return EpisodeSummary(**{**values, **typed})
