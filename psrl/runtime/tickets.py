"""Tickets: the uid and the seed of every episode, derived from what it is and never from when it runs.

An episode that is issued again (a retry, a resume) therefore asks the engine for the same random numbers.
"""

from __future__ import annotations

import hashlib

from psrl.types import EpisodeTicket, EpisodeUid, GroupUid, PolicyVersion, Task

SEED_BITS = 62


def seed_of(run_seed: int, uid: str) -> int:
    """A seed below 2**62 for whatever has a uid."""
    digest = hashlib.blake2b(f"{run_seed}/{uid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


def training_tickets(task: Task, *, rollout_n: int, version: PolicyVersion, run_seed: int) -> tuple[EpisodeTicket, ...]:
    """The members of a training group."""
    uids = [EpisodeUid(f"{task.uid}-e{index}") for index in range(rollout_n)]
    return tuple(EpisodeTicket(uid=uid, group=GroupUid(task.uid), admitted_version=version, seed=seed_of(run_seed, uid)) for uid in uids)


def validation_tickets(
    task: Task, *, num_sampled: int, is_greedy_too: bool, version: PolicyVersion, run_seed: int
) -> tuple[EpisodeTicket, ...]:
    """`num_sampled` episodes at the rollout's temperature and, if asked for, a greedy one, which comes last."""
    kinds = [(f"e{index}", None) for index in range(num_sampled)] + ([("greedy", 0.0)] if is_greedy_too else [])
    return tuple(
        EpisodeTicket(
            uid=EpisodeUid(f"{task.uid}-v{version}-{name}"),
            group=GroupUid(f"{task.uid}-v{version}"),
            admitted_version=version,
            seed=seed_of(run_seed, f"{task.uid}-{name}"),
            is_validation=True,
            temperature=temperature,
        )
        for name, temperature in kinds
    )
