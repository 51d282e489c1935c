"""The feed loop: tasks become groups in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from psrl.datasets.source import TaskSource
from psrl.runtime.board import Board, Candidate
from psrl.runtime.groups import GroupRequest, GroupResult
from psrl.runtime.tickets import training_tickets
from psrl.staleness import Admission
from psrl.types import Task


class GroupPlayer(Protocol):
    """Who turns a request into a group that has ended: the agent workers, or a store of what they once played."""

    async def play(self, request: GroupRequest, *, what: str, deadline_s: float) -> GroupResult:
        """The group; its rows are in the data plane."""


class FeedLoop:
    """Admits tasks while the ledger has room and has them played.

    Consumes: groups to be issued again, then tasks of the source, in order, without end.
    Waits for: room on the board.
    Unblocked by: the assemble loop (a group that arrived or was left out), the train loop (an advanced version), the sync loop (a
    replica with newer weights).
    """

    def __init__(
        self,
        *,
        source: TaskSource,
        board: Board,
        player: GroupPlayer,
        arrivals: asyncio.Queue[GroupResult],
        rollout_n: int,
        redundant_episodes: int,
        run_seed: int,
        group_deadline_s: float,
        wants_records: Callable[[], bool],
    ) -> None:
        """`rollout_n` members of a group are kept, `redundant_episodes` more are played."""
        self._source = source
        self._board = board
        self._player = player
        self._arrivals = arrivals
        self._rollout_n = rollout_n
        self._redundant_episodes = redundant_episodes
        self._run_seed = run_seed
        self._group_deadline_s = group_deadline_s
        self._wants_records = wants_records
        self._pending: Candidate | None = None
        self._pending_state = source.state_dict()

    @property
    def pending_state(self) -> dict[str, Any]:
        """The data order before the first task that was never admitted: where a checkpoint goes on."""
        return self._pending_state

    async def run(self) -> None:
        """Until cancelled; a group that fails ends the run with its error."""
        async with asyncio.TaskGroup() as plays:
            while True:
                candidate, admission = await self._board.admit(self._next_new, prompt_of=prompt_text)
                if candidate is self._pending:
                    self._pending, self._pending_state = None, self._source.state_dict()
                plays.create_task(self._play(candidate.task, admission), name=f"group {candidate.group}")

    def _next_new(self) -> Candidate:
        if self._pending is None:
            self._pending_state = self._source.state_dict()
            (task,) = self._source.next_tasks(1)
            self._pending = Candidate(task=task)
        return self._pending

    async def _play(self, task: Task, admission: Admission) -> None:
        tickets = training_tickets(
            task,
            rollout_n=self._rollout_n + self._redundant_episodes,
            version=admission.version,
            run_seed=self._run_seed,
            instances=self._board.places_of(admission),
            attempt=admission.attempt,
        )
        request = GroupRequest(
            task=task, tickets=tickets, num_needed=self._rollout_n, wants_records=self._wants_records(), attempt=admission.attempt
        )
        result = await self._player.play(request, what=f"group {task.uid}", deadline_s=self._group_deadline_s)
        await self._arrivals.put(result)


def prompt_text(task: Task) -> str:
    """What routing by cache compares."""
    return "\n".join(message.content for message in task.prompt)
