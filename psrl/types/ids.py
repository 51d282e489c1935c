"""Identifiers, each its own type so that they cannot be mixed up."""

from typing import NewType

TaskUid = NewType("TaskUid", str)
"""One dataset row in one epoch, such as `train-0-000017` (partition, epoch, row)."""

GroupUid = NewType("GroupUid", str)
"""The `rollout_n` episodes of one task; equal to the task's uid."""

EpisodeUid = NewType("EpisodeUid", str)
"""One episode: `<group uid>-e<index>`; a retry keeps it."""

TrajectoryUid = NewType("TrajectoryUid", str)
"""One trajectory: `<episode uid>-t<branch>`. The key in the data plane."""

PolicyVersion = NewType("PolicyVersion", int)
"""How many optimizer updates made the weights; 0 is the starting model."""

SessionId = NewType("SessionId", str)
"""One session of the gateway: random, and unrelated to the episode's uid, so it cannot be guessed."""
