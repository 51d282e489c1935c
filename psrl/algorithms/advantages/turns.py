"""Values of turns compared within a group, and given to the tokens of their turns.

Legend: K turns of a trajectory, T tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from psrl.algorithms.advantages.base import AdvantageBatch
from psrl.algorithms.advantages.groups import centred
from psrl.algorithms.advantages.tokens import spread_over_tokens, turns_of


def centred_by_turn(values: Sequence[Tensor], batch: AdvantageBatch, *, divide: bool) -> list[Tensor]:
    """[K] of each trajectory from [K]: `centred` among the trajectories of its group that have a value at the same place."""
    result = [torch.zeros_like(each) for each in values]
    members: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for row, (each, tags) in enumerate(zip(values, batch.tags, strict=True)):
        for turn in range(len(each)):
            members[tags["group"], turn].append(row)
    for (_, turn), rows in members.items():
        compared = centred([float(values[row][turn]) for row in rows], divide=divide)
        for row, advantage in zip(rows, compared, strict=True):
            result[row][turn] = advantage
    return result


def spread_over_turns(values: Sequence[Tensor], columns: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """[T] float32 of each trajectory from [K]: each sampled token has its turn's value."""
    return spread_over_tokens([each[turns_of(of_row)] for each, of_row in zip(values, columns, strict=True)], columns)
