"""One group while a worker plays it: who is needed, who ended first, and who is ended because of it.

Invariant: `run` ends when `num_needed` members are judged, or all have ended, or the group is cancelled, whichever is first. Whoever
still runs then is cancelled, down to the engine, and stays this object's until its environment is closed (`left`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from psrl.agent_loops.runner import EpisodePool
from psrl.types import Episode, EpisodeTicket, Outcome, Task


class EndHow(StrEnum):
    """How a group that is played is ended by psrl."""

    CANCEL = "cancel"
    """Its episodes are ended and nothing of it is kept."""
    TRUNCATE = "truncate"
    """Its running episodes end now as if their time were up: what they have is judged and kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One episode of a group, and what became of it."""

    ticket: EpisodeTicket
    episode: Episode | None
    """None where it was ended before it had an outcome."""
    num_retries: int

    @property
    def is_judged(self) -> bool:
        """Whether it has a reward."""
        return self.episode is not None and self.episode.score.reward is not None


class GroupPlay:
    """The episodes of one group in one worker."""

    def __init__(self, pool: EpisodePool, task: Task, tickets: Sequence[EpisodeTicket], *, num_needed: int, max_retries: int) -> None:
        """`max_retries`: how often a member that ends `infra_error` is played again, alone."""
        assert 0 < num_needed <= len(tickets), f"{num_needed} of {len(tickets)} episodes are needed"
        self.tickets = tickets
        self._pool, self._task = pool, task
        self._num_needed, self._max_retries = num_needed, max_retries
        self._how: EndHow | None = None
        self._changed = asyncio.Event()
        """A member has ended, or the group is cancelled."""
        self._num_retries = dict.fromkeys(tickets, 0)
        self._work: dict[EpisodeTicket, asyncio.Task[Episode]] = {}

    @property
    def is_cancelled(self) -> bool:
        """Whether nothing of it is to be kept."""
        return self._how is EndHow.CANCEL

    async def run(self) -> tuple[Member, ...]:
        """Members in the order of their tickets: the first `num_needed` judged, and those that ended, or were ended, without a reward.

        Waits for: the members. Unblocked by: their ends, which their deadlines bound; or `end`.
        """
        self._work = {ticket: asyncio.create_task(self._play(ticket), name=f"episode {ticket.uid}") for ticket in self.tickets}
        for work in self._work.values():
            work.add_done_callback(lambda _: self._changed.set())
        if self._how is not None:
            self.end(self._how)  # It came before anything was played.
        try:
            judged: list[Member] = []
            seen: set[EpisodeTicket] = set()
            while len(judged) < self._num_needed and len(seen) < len(self._work) and not self.is_cancelled:
                await self._changed.wait()
                self._changed.clear()
                ended = [ticket for ticket in self.tickets if ticket not in seen and self._work[ticket].done()]
                seen.update(ended)
                judged += [member for member in map(self._member, ended) if member.is_judged]
        finally:
            self._cancel_members()
        kept = {member.ticket for member in judged[: self._num_needed]}
        is_short = len(kept) < self._num_needed
        members = [self._member(ticket) for ticket in self.tickets]
        return tuple(
            member for member in members if member.ticket in kept or (not member.is_judged and (is_short or member.episode is not None))
        )

    def end(self, how: EndHow) -> None:
        """End it early; may be called again, and a cancellation is stronger than a truncation."""
        if how is EndHow.CANCEL:
            self._how = how
            self._changed.set()
        elif not self.is_cancelled:
            self._how = how
            for ticket, work in self._work.items():
                if not work.done() and not self._pool.truncate(ticket.uid):
                    work.cancel()

    @property
    def left(self) -> tuple[asyncio.Task[Episode], ...]:
        """Members that are still closing what they held."""
        return tuple(work for work in self._work.values() if not work.done())

    def _cancel_members(self) -> None:
        for ticket, work in self._work.items():
            if not work.done() and not self._pool.cancel(ticket.uid):
                work.cancel()

    async def _play(self, ticket: EpisodeTicket) -> Episode:
        while True:
            episode = await self._pool.run(self._task, ticket)
            may_play_again = self._how is None and self._num_retries[ticket] < self._max_retries
            if episode.result.outcome is not Outcome.INFRA_ERROR or not may_play_again:
                return episode
            self._num_retries[ticket] += 1

    def _member(self, ticket: EpisodeTicket) -> Member:
        work = self._work[ticket]
        has_outcome = work.done() and not work.cancelled()
        return Member(ticket=ticket, episode=work.result() if has_outcome else None, num_retries=self._num_retries[ticket])
