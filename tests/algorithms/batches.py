"""Episodes of several turns with rewards at each of them, as psrl's rows and as the padded tensors of other trainers."""

import random
from dataclasses import dataclass

import torch

from psrl.algorithms.advantages import AdvantageBatch
from psrl.algorithms.rows import Rows


@dataclass(frozen=True)
class Episodes:
    tags: list
    columns: list
    values: list
    """[n] of each row: what a critic says."""

    @property
    def batch(self):
        return AdvantageBatch(tags=self.tags, has_loss=[True] * len(self.tags), columns=self.columns, values=self.values)

    @property
    def masks(self):
        return [each["loss_mask"].bool() for each in self.columns]

    @property
    def rows(self):
        return Rows([int(mask.sum()) for mask in self.masks], torch.device("cpu"))

    @property
    def mask(self):
        """[R, T] float64."""
        return self.padded([mask.double() for mask in self.masks])

    @property
    def groups(self):
        return [each["group"] for each in self.tags]

    def padded(self, rows):
        """[R, T] from [T] of each."""
        return torch.nn.utils.rnn.pad_sequence([row.double() for row in rows], batch_first=True)

    def scattered(self, values):
        """[R, T] from [n] of each row: 0 where nothing was sampled."""
        return self.padded(
            [torch.zeros(len(m), dtype=torch.float64).masked_scatter(m, v.double()) for m, v in zip(self.masks, values, strict=True)]
        )

    def split(self, values_N):
        """[n] of each row."""
        return values_N.split([int(mask.sum()) for mask in self.masks])


def random_episodes(*, num_groups=5, group_size=4, seed=0):
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tags, columns, values = [], [], []
    for group in range(num_groups):
        for member in range(group_size):
            turns = [-1] * draw.randint(2, 6)
            rewards = [0.0] * len(turns)
            num_turns = draw.randint(1, 4)
            for turn in range(num_turns):
                sampled = draw.randint(1, 12)
                turns += [turn] * sampled
                rewards += [0.0] * (sampled - 1) + [draw.choice([0.0, 0.25, -0.5, 1.0])]
                if turn + 1 < num_turns:
                    observed = draw.randint(1, 5)
                    turns += [-1] * observed
                    rewards += [0.0] * observed
            indices = torch.tensor(turns, dtype=torch.int32)
            mask = indices >= 0
            columns.append({"loss_mask": mask.to(torch.int8), "turn_indices": indices, "rewards": torch.tensor(rewards)})
            values.append(torch.randn(int(mask.sum()), generator=generator))
            tags.append({"group": f"g{group}", "episode": f"g{group}-e{member}", "reward": sum(rewards), "num_sampled": int(mask.sum())})
    return Episodes(tags, columns, values)
