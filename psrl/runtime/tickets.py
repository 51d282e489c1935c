"""Tickets: the uid and the seed of every episode, derived from what it is and never from when it runs.

An episode that is played again (a retry, a resume) therefore asks the engine for the same random numbers; a group that is issued again
because psrl ended it asks for others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from psrl.types import EpisodeTicket, EpisodeUid, GroupUid, PolicyVersion, Task

SEED_BITS = 62


def seed_of(run_seed: int, uid: str) -> int:
    """A seed below 2**62 for whatever has a uid."""
    digest = hashlib.blake2b(f"{run_seed}/{uid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


def training_tickets(
    task: Task,
    *,
    rollout_n: int,
    version: PolicyVersion,
    run_seed: int,
    instances: Sequence[int | None] | None = None,
    attempt: int = 0,
) -> tuple[EpisodeTicket, ...]:
    """The members of a training group.

    Args:
        task: Theirs.
        rollout_n: How many, redundant ones included.
        version: The weights that the group is admitted with.
        run_seed: `trainer.seed`.
        instances: Where each is played; None leaves all of them to the client.
        attempt: How often the group was issued before; each has seeds of its own.
    """
    places = [None] * rollout_n if instances is None else instances
    return tuple(
        EpisodeTicket(
            uid=EpisodeUid(f"{task.uid}-e{index}"),
            group=GroupUid(task.uid),
            admitted_version=version,
            seed=seed_of(run_seed, f"{task.uid}-e{index}" + (f"-a{attempt}" if attempt else "")),
            instance=place,
        )
        for index, place in zip(range(rollout_n), places, strict=True)
    )


def validation_tickets(
    task: Task, *, num_sampled: int, is_greedy_too: bool, version: PolicyVersion, run_seed: int, instance: int | None = None
) -> tuple[EpisodeTicket, ...]:
    """`num_sampled` episodes at the rollout's temperature and, if asked for, a greedy one, which comes last.

    All are played at `instance`; None leaves them to the client.
    """
    kinds = [(f"e{index}", None) for index in range(num_sampled)] + ([("greedy", 0.0)] if is_greedy_too else [])
    return tuple(
        EpisodeTicket(
            uid=EpisodeUid(f"{task.uid}-v{version}-{name}"),
            group=GroupUid(f"{task.uid}-v{version}"),
            admitted_version=version,
            seed=seed_of(run_seed, f"{task.uid}-{name}"),
            is_validation=True,
            temperature=temperature,
            instance=instance,
        )
        for name, temperature in kinds
    )
