"""DAPO's overlong filtering: which trajectories get no loss because a token limit cut them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psrl.types import Outcome


def has_loss(tags: Mapping[str, Any], *, mask_truncated: bool) -> bool:
    """Whether a trajectory is trained on. Its reward stays in the baseline of its group either way.

    Decided by how the engine and the limits ended the episode, never by looking for an end-of-turn id.
    """
    return not (mask_truncated and tags["outcome"] == Outcome.MAX_TOKENS)
