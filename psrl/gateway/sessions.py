"""Sessions: who may use them, what they are bound to, and how they end.

Invariant: a session is in the table from `open` until `close` or its expiry; turns begin only while it is open, and `close` returns when
none is in flight. The gateway holds nothing of a session that is not in the table.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Coroutine
from typing import Any, TypeVar

from psrl.errors import SessionRequestError
from psrl.gateway.dialects.fields import ReadBefore
from psrl.gateway.tito import SessionTree, Turn
from psrl.protocols import Renderer
from psrl.types import EpisodeUid, Message, Outcome, SessionId, SessionRecord, SessionSpec

T = TypeVar("T")

SECRET_BYTES = 24
CANCEL_GRACE_S = 5.0
"""Cancelled turns may take so long to tell the engine."""


class Session:
    """One open session."""

    def __init__(self, id: SessionId, spec: SessionSpec, renderer: Renderer) -> None:
        """Its secret is made here."""
        self.id = id
        self.spec = spec
        self.api_key = secrets.token_urlsafe(SECRET_BYTES)
        self.tree = SessionTree(renderer)
        self.read_before: defaultdict[str, ReadBefore] = defaultdict(ReadBefore)
        """By the dialect's path."""
        self.counts: Counter[str] = Counter()
        self.num_turns_begun = 0
        """Numbers given out; a turn's seed derives from its number."""
        self.num_turns_granted = 0
        """Captured or on the way: what `max_turns` counts."""
        self.end: Outcome | None = None
        self.error: str | None = None
        self._end_number = 0
        """How many turns had begun when the agent ran into `end`."""
        self._waited_s = 0.0
        self._waiting_since = 0.0
        self.last_used = time.monotonic()
        self.is_closing = False
        self._in_flight: set[asyncio.Task[Any]] = set()

    @property
    def num_in_flight(self) -> int:
        """Turns that are being sampled."""
        return len(self._in_flight)

    @property
    def generation_s(self) -> float:
        """Seconds in which at least one turn waited for engines."""
        return self._waited_s + (time.monotonic() - self._waiting_since if self._in_flight else 0.0)

    def ran_into(self, end: Outcome, error: str) -> None:
        """Remember why the agent got no turn; a turn that begins later takes it back."""
        self.end, self.error, self._end_number = end, error, self.num_turns_begun

    def took_turn(self, number: int) -> None:
        """The agent got turn `number`: what was in its way before that turn began is not what ended it."""
        if number >= self._end_number:
            self.end = self.error = None

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a turn; `close` waits for it or cancels it.

        Raises:
            SessionRequestError: 409, the session is being closed.
        """
        if self.is_closing:
            work.close()
            raise closing_error(self.id)
        self.last_used = time.monotonic()
        task = asyncio.create_task(work)
        if not self._in_flight:
            self._waiting_since = self.last_used
        self._in_flight.add(task)
        task.add_done_callback(self._ended)
        return task

    async def end_turns(self, *, abort: bool, timeout_s: float) -> None:
        """No new turn from here on. Returns when none is in flight: each has `timeout_s` to end by itself, with `abort` none.

        Waits for: the turns in flight. Unblocked by: their own deadline, and at last by cancelling them.
        """
        self.is_closing = True
        if self._in_flight and not abort:
            await asyncio.wait(self._in_flight, timeout=timeout_s)
        for task in self._in_flight:
            task.cancel()
        if self._in_flight:
            await asyncio.wait(self._in_flight, timeout=CANCEL_GRACE_S)

    def abandon(self) -> None:
        """Nobody waits for it any more: no new turn, and those in flight are cancelled down to the engine; returns at once."""
        self.is_closing = True
        for task in self._in_flight:
            task.cancel()

    def record(self) -> SessionRecord:
        """Everything captured so far."""
        turns = self.tree.turns
        branch: list[Turn] = turns[-1].path() if turns else []
        messages: list[Message] = turns[-1].conversation() if turns else []
        trajectories = self.tree.trajectories(self.spec.uid)
        return SessionRecord(
            id=self.id,
            uid=self.spec.uid,
            trajectories=trajectories,
            paths=self.tree.paths(),
            messages=tuple(messages),
            turn_texts=tuple(turn.text for turn in branch),
            num_turns=len(turns),
            end=self.end,
            error=self.error,
            counts={**{name: float(value) for name, value in self.counts.items()}, "branches": float(max(0, len(trajectories) - 1))},
            generation_s=self.generation_s,
        )

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._in_flight.discard(task)
        self.last_used = time.monotonic()
        if not self._in_flight:
            self._waited_s += self.last_used - self._waiting_since


class SessionTable:
    """Every open session of a gateway."""

    def __init__(self, renderer: Renderer, *, max_sessions: int, idle_timeout_s: float, turn_timeout_s: float) -> None:
        """`turn_timeout_s` bounds how long a close waits for a turn in flight."""
        self._renderer = renderer
        self._max_sessions = max_sessions
        self._idle_timeout_s = idle_timeout_s
        self._turn_timeout_s = turn_timeout_s
        self._sessions: dict[SessionId, Session] = {}
        self._last_of: dict[EpisodeUid, Session] = {}
        """The session that was opened last for each episode that has one."""
        self.num_opened = 0
        self.num_expired = 0

    @property
    def open_sessions(self) -> tuple[Session, ...]:
        """Those in the table now."""
        return tuple(self._sessions.values())

    def open(self, spec: SessionSpec) -> Session:
        """A new session. One of the same episode is abandoned: the worker that played it died, and the episode is played again.

        Raises:
            SessionRequestError: 503, there are `max_sessions` already.
        """
        if spec.uid in self._last_of:
            before = self._last_of[spec.uid]
            before.abandon()
            self._forget(before)
        if len(self._sessions) >= self._max_sessions:
            message = f"{len(self._sessions)} sessions are open, psrl.rollout_gateway.max_sessions allows no more; delete some"
            raise SessionRequestError(status=503, code="too_many_sessions", message=message)
        session = Session(SessionId(secrets.token_hex(12)), spec, self._renderer)
        self._sessions[session.id] = self._last_of[spec.uid] = session
        self.num_opened += 1
        return session

    def of_id(self, id: str) -> Session:
        """The session of an id. SessionRequestError 404: there is none."""
        session = self._sessions.get(SessionId(id))
        if session is None:
            raise SessionRequestError(
                status=404, code="unknown_session", message=f"there is no session {id!r} (never opened, deleted or expired)"
            )
        return session

    def get(self, id: str, key: str) -> Session:
        """The session of an id, for who knows its secret.

        Raises:
            SessionRequestError: 404, there is none; 401, the secret is another.
        """
        session = self.of_id(id)
        if not hmac.compare_digest(key.encode(), session.api_key.encode()):
            raise SessionRequestError(status=401, code="wrong_secret", message="the API key is not this session's")
        return session

    async def close(self, session: Session, *, abort: bool) -> SessionRecord:
        """End it, forget it, and give its record.

        Raises:
            SessionRequestError: 409, somebody else closes it already.
        """
        if session.is_closing:
            raise closing_error(session.id)
        try:
            await session.end_turns(abort=abort, timeout_s=self._turn_timeout_s)
        finally:
            self._forget(session)
        return session.record()

    async def expire_idle(self) -> None:
        """Forget, for ever, sessions that nobody used for `idle_timeout_s`: their agents died without a word.

        Waits for: the clock. Unblocked by: being cancelled when the gateway ends.
        """
        while True:
            await asyncio.sleep(min(self._idle_timeout_s / 4, 60.0))
            now = time.monotonic()
            for session in self.open_sessions:
                if not session.num_in_flight and not session.is_closing and now - session.last_used > self._idle_timeout_s:
                    session.abandon()  # a turn that is being placed must not begin in it
                    self._forget(session)
                    self.num_expired += 1

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.id, None)
        if self._last_of.get(session.spec.uid) is session:
            del self._last_of[session.spec.uid]


def closing_error(id: SessionId) -> SessionRequestError:
    """The answer to whoever asks something of a session that ends."""
    return SessionRequestError(status=409, code="session_closed", message=f"session {id} is being closed")
