"""What became of every group of a run: `groups.jsonl`, one line for each group that got its fate.

Invariant of a run, however often it was resumed: a group has one fate, the trained groups of step k came from versions that the
staleness allows for buffer k - 1, and no task that was given is without a fate once nothing is in flight. `check_group_log` holds
a file against it. The file is append-only; a resume cuts it to its length at the checkpoint (`RunFolder.cut`), so that steps that
are done again stand there once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from psrl.telemetry.json_lines import JsonLinesFile, read_json_lines
from psrl.types import GroupUid, PolicyVersion

MAX_NAMED = 5
"""Groups that one finding lists by name."""


class Fate(StrEnum):
    """What became of a group."""

    TRAINED = "trained"
    FILTERED = "filtered"
    """Its rewards carry no signal (dynamic sampling)."""
    DROPPED = "dropped"
    """It lost members for good."""
    NULL = "null"
    """It was in flight too long and was left out."""
    SURPLUS = "surplus"
    """Others came first, and it was not issued again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFate:
    """One line of `groups.jsonl`."""

    uid: GroupUid
    fate: Fate
    step: int
    """The training step that trained it; of other fates the steps done when it was decided."""
    admitted_version: PolicyVersion | None = None
    """V_traj of the ledger."""
    buffer_version: PolicyVersion | None = None
    """V_buf of the update that it trained; None of other fates."""
    oldest_version: PolicyVersion | None = None
    """Of the oldest weights that sampled a token of it; None where that is not known."""
    attempt: int = 0
    """How often it had been issued before."""


class GroupLog:
    """Appends fates; each line is with the operating system before `write` returns."""

    def __init__(self, path: Path) -> None:
        """`path` is the run folder's `groups`."""
        self._lines = JsonLinesFile(path)

    def write(self, fate: GroupFate) -> None:
        """Add one line."""
        self._lines.append(asdict(fate))

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._lines.close()


def read_group_log(path: Path, *, size_bytes: int | None = None) -> list[GroupFate]:
    """The fates in order (of the first `size_bytes`); an unfinished last line is left out, without a file there are none."""
    return [
        GroupFate(
            uid=GroupUid(line["uid"]),
            fate=Fate(line["fate"]),
            step=line["step"],
            admitted_version=line["admitted_version"],
            buffer_version=line["buffer_version"],
            oldest_version=line["oldest_version"],
            attempt=line["attempt"],
        )
        for line in read_json_lines(path, size_bytes=size_bytes)
    ]


def check_group_log(
    fates: Sequence[GroupFate],
    *,
    staleness: int,
    groups_per_step: int,
    given: Iterable[str] | None = None,
    unfinished: Iterable[str] = (),
) -> list[str]:
    """What is wrong with the fates of a run, in words; empty when nothing is.

    Args:
        fates: All lines of the file.
        staleness: The bound under which the run was made (the largest, if it was resumed with another).
        groups_per_step: `data.train_batch_size`.
        given: Every task that the source gave (`datasets.source.uids_given`), to find gaps and strangers; None leaves that out.
        unfinished: Groups that may still be without a fate: in flight, or arrived and waiting for their update.
    """
    findings = _named("have more than one fate", [uid for uid, count in Counter(fate.uid for fate in fates).items() if count > 1])
    trained = [fate for fate in fates if fate.fate is Fate.TRAINED]
    per_step = Counter(fate.step for fate in trained)
    for step in range(1, max(per_step, default=0) + 1):
        if per_step[step] != groups_per_step:
            findings.append(f"step {step} trained {per_step[step]} groups, not {groups_per_step}")
    findings += _named("were trained from another buffer than their step's", [f.uid for f in trained if f.buffer_version != f.step - 1])
    findings += _named(f"are more than {staleness} versions old", [f.uid for f in trained if _version_gap(f) > staleness])
    findings += _named("were admitted after the update that they trained", [f.uid for f in trained if _version_gap(f) < 0])
    if given is not None:
        fated, known, open_ones = {fate.uid for fate in fates}, set(given), set(unfinished)
        findings += _named("were given and have no fate", sorted(known - fated - open_ones))
        findings += _named("have a fate and were never given", sorted(fated - known))
        findings += _named("have a fate and are said to be unfinished", sorted(fated & open_ones))
    return findings


def _version_gap(fate: GroupFate) -> int:
    versions = [version for version in (fate.admitted_version, fate.oldest_version) if version is not None]
    assert versions and fate.buffer_version is not None, f"{fate.uid} was trained and names no version"
    return fate.buffer_version - min(versions)


def _named(what: str, uids: Sequence[str]) -> list[str]:
    if not uids:
        return []
    shown = ", ".join(uids[:MAX_NAMED]) + (", ..." if len(uids) > MAX_NAMED else "")
    return [f"{len(uids)} groups {what}: {shown}"]
