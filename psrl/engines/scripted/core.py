"""The scripted engine without its HTTP face: one thread that emits tokens when they are due.

Consumes: requests and commands. Waits for: the next due token. Unblocked by: any submit or command, and `close`. A turn without
latencies is answered inside `submit`, where a slot is free.
Weights of any version are checked as the manifest says (place, size, checksum) and thrown away; tokens carry the version.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from psrl.engines.contract import EngineLoad, PauseMode, SampledTurn, TurnDone, TurnFailure, TurnRequest
from psrl.engines.rate import TokenRate
from psrl.engines.scripted.script import Answer as ScriptedAnswer
from psrl.engines.scripted.script import Script, ScriptedFailure, ScriptedTurn, turn_begins_at
from psrl.errors import EngineError, WeightSyncError
from psrl.parameter_server.checksum import checksum
from psrl.parameter_server.transports.shared_memory import open_version
from psrl.protocols import WeightManifest, WeightReport
from psrl.types import FinishReason, PolicyVersion

LONGEST_WAIT_S = 1.0
JOIN_TIMEOUT_S = 5.0
Answer = TypeVar("Answer")


@dataclass(eq=False, slots=True)
class PlayedTurn:
    """A request that is being answered."""

    request: TurnRequest
    script: ScriptedTurn
    answer: ScriptedAnswer
    on_done: TurnDone
    due: float = 0.0
    """When the next token comes; set when it gets a slot."""
    versions: list[int] = field(default_factory=list)
    """Of the tokens emitted so far."""

    def sampled(self, reason: FinishReason) -> SampledTurn:
        """What was emitted so far."""
        count, ids, logprobs = len(self.versions), self.answer.ids, self.answer.logprobs
        repeats = -(-count // len(ids)) if count else 0
        token_ids, logprobs = (ids * repeats)[:count], (logprobs * repeats)[:count]
        return SampledTurn(token_ids=token_ids, logprobs=logprobs, versions=self.versions, finish_reason=reason)


class ScriptedCore:
    """Implements `contract.EngineCore`."""

    def __init__(self, script: Script, *, model_name: str = "scripted", max_num_seqs: int = 256) -> None:
        """Answers `max_num_seqs` turns at once from now on; others wait, by priority and as they came."""
        self.model_name, self.max_model_len, self.vocab_size = model_name, script.max_model_len, script.vocab_size
        self.failure: str | None = None
        self._script = script
        self._running: dict[PlayedTurn, None] = {}  # in order of arrival
        self._queued: list[PlayedTurn] = []  # by priority, then as they came
        self._max_num_seqs = max_num_seqs
        self._rate = TokenRate()
        self._due: list[tuple[float, int, PlayedTurn]] = []
        """Heap of the running turns' next tokens; turns that ended are skipped when their time comes."""
        self._entries = itertools.count()
        self._num_requests = self._num_prompt = self._num_sampled = 0
        self._report = WeightReport(version=PolicyVersion(0), num_matched=0, num_expected=0, checksum="start")
        self._staged: WeightReport | None = None
        self._paused_at: float | None = None
        self._drained: list[Future[None]] = []
        self._wake = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="scripted-engine", daemon=True)
        self._thread.start()

    def submit(self, request: TurnRequest, on_done: TurnDone) -> None:
        """Queue a request; while paused it waits."""
        with self._wake:
            if self._is_closing:
                return on_done(TurnFailure.ERROR)
            try:
                played = self._played(request, on_done)
            except EngineError:
                return on_done(TurnFailure.ERROR)
            bisect.insort(self._queued, played, key=lambda one: one.request.priority)  # behind its equals
            self._fill()

    def abort(self, request_ids: Sequence[str] | None) -> Future[int]:
        """See the contract."""
        return self._locked(lambda: self._abort(request_ids))

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> Future[None]:
        """See the contract; there is no cache."""
        done: Future[None] = Future()
        with self._wake:
            if mode is PauseMode.ABORT:
                self._abort(None)
            if mode is not PauseMode.WAIT:
                self._end_drain()
            if self._paused_at is None or mode is not PauseMode.WAIT:
                self._paused_at = time.monotonic()
            if mode is PauseMode.WAIT and self._running:
                self._drained.append(done)
                self._wake.notify()
            else:
                done.set_result(None)
        return done

    def resume(self) -> Future[None]:
        """See the contract; the time that the pause took does not count."""
        return self._locked(self._resume)

    def stage_weights(self, manifest: WeightManifest) -> Future[WeightReport]:
        """See the contract. The check has a thread of its own: it must hold up neither tokens nor other requests."""
        done: Future[WeightReport] = Future()
        with self._wake:
            self._staged = None
        threading.Thread(target=lambda: self._stage(manifest, done), name="weight-staging", daemon=True).start()
        return done

    def commit_weights(self, version: PolicyVersion) -> Future[WeightReport]:
        """See the contract."""
        return self._locked(lambda: self._commit(version))

    def reset_prefix_cache(self) -> Future[None]:
        """Nothing to forget."""
        return self._locked(lambda: None)

    def weight_report(self) -> WeightReport:
        """See the contract."""
        return self._report

    def load(self) -> EngineLoad:
        """See the contract. There is no cache: a running turn is counted as if it held keys of all its tokens, an ended one holds none."""
        with self._wake:
            num_keys = sum(len(played.request.token_ids) + len(played.versions) for played in self._running)
        share = num_keys / (self._max_num_seqs * self.max_model_len)
        return EngineLoad(
            num_running=len(self._running),
            num_waiting=len(self._queued),
            num_prompt_tokens=self._num_prompt,
            num_cached_tokens=0,
            num_sampled_tokens=self._num_sampled,
            cache_usage=share,
            cache_filled=share,
            tokens_per_s=self._rate.per_s(),
        )

    def close(self) -> None:
        """End the thread; unfinished requests fail."""
        with self._wake:
            self._is_closing = True
            self.failure = "engine is closed"
            self._wake.notify()
        self._thread.join(JOIN_TIMEOUT_S)
        unfinished = [*self._running, *self._queued]
        self._running, self._queued = {}, []
        for played in unfinished:
            played.on_done(TurnFailure.ERROR)

    def _run(self) -> None:
        with self._wake:
            while not self._is_closing:
                wait_s = LONGEST_WAIT_S
                if self._paused_at is None or self._drained:
                    now = time.monotonic()
                    while self._due and self._due[0][0] <= now:
                        played = heapq.heappop(self._due)[2]
                        if played in self._running:
                            self._emit(played, now)
                    self._fill()
                    if not self._running:
                        self._end_drain()
                    if self._due:
                        wait_s = min(wait_s, max(0.0, self._due[0][0] - time.monotonic()))
                self._wake.wait(wait_s)

    def _played(self, request: TurnRequest, on_done: TurnDone) -> PlayedTurn:
        """What this request will be given: the script's turn, or what is left of it when the prompt ends with a part of it."""
        ids, seed = request.token_ids, -1 if request.sampling.seed is None else request.sampling.seed
        begins_at = turn_begins_at(ids, self._script.turn_header)
        script = self._script.turn_for(ids[:begins_at], number=self._num_requests)
        answer = script.answer_to(ids[:begins_at], seed).after(ids[begins_at:], repeats=script.finish_reason is None)
        if answer is None:
            script = self._script.turn_for(ids, number=self._num_requests)
            answer = script.answer_to(ids, seed)
        self._num_requests += not script.when_prompt_contains
        self._num_prompt += len(ids)
        return PlayedTurn(request, script, answer, on_done)

    def _fill(self) -> None:
        """Give free slots to those that wait."""
        while self._queued and self._paused_at is None and len(self._running) < self._max_num_seqs:
            played = self._queued.pop(0)
            now = time.monotonic()
            played.due = now + played.answer.latency_s
            self._running[played] = None
            self._emit(played, now)
            if self._due and self._due[0][2] is played:
                self._wake.notify()

    def _emit(self, played: PlayedTurn, now: float) -> None:
        """The tokens that are due; then the turn ends or waits for its next one."""
        request, script, ids, versions = played.request, played.script, played.answer.ids, played.versions
        num_before = len(versions)
        if script.failure is ScriptedFailure.HANG:
            return
        if script.failure is not None and played.due <= now:
            del self._running[played]
            return played.on_done(TurnFailure(script.failure.value))
        stop_ids, last = request.sampling.stop_token_ids, len(ids) if script.finish_reason is not None else 0
        limit = min(request.sampling.max_tokens, self.max_model_len - len(request.token_ids))
        while played.due <= now:
            token = ids[len(versions) % len(ids)]
            versions.append(self._report.version + bisect.bisect_right(script.new_version_at, len(versions)))
            played.due += played.answer.per_token_s
            if token in stop_ids:
                reason = FinishReason.STOP
            elif script.finish_reason is not None and len(versions) == last:
                reason = script.finish_reason
            elif len(versions) >= limit:
                reason = FinishReason.LENGTH
            else:
                continue
            self._count(len(versions) - num_before)
            return self._finish(played, reason)
        self._count(len(versions) - num_before)
        heapq.heappush(self._due, (played.due, next(self._entries), played))

    def _count(self, num_tokens: int) -> None:
        if num_tokens:
            self._num_sampled += num_tokens
            self._rate.add(num_tokens)

    def _finish(self, played: PlayedTurn, reason: FinishReason) -> None:
        if played in self._running:
            del self._running[played]
        else:
            self._queued.remove(played)
        played.on_done(played.sampled(reason))

    def _abort(self, request_ids: Sequence[str] | None) -> int:
        meant = [one for one in [*self._running, *self._queued] if request_ids is None or one.request.request_id in request_ids]
        for played in meant:
            self._finish(played, FinishReason.ABORT)
        self._fill()
        if not self._running:
            self._end_drain()
        return len(meant)

    def _end_drain(self) -> None:
        """Nothing runs any more, or a later command took the place of the pauses that waited for that."""
        for done in self._drained:
            done.set_result(None)
        self._drained.clear()

    def _resume(self) -> None:
        if self._paused_at is None:
            return
        stood_s = 0.0 if self._drained else time.monotonic() - self._paused_at
        self._paused_at = None
        self._end_drain()
        for played in self._running:
            played.due += stood_s
        self._due = []
        for played in list(self._running):
            self._emit(played, time.monotonic())
        self._fill()

    def _stage(self, manifest: WeightManifest, done: Future[WeightReport]) -> None:
        try:
            found = checksum(open_version(manifest))
            if found != manifest.checksum:
                raise WeightSyncError(f"version {manifest.version} has checksum {found}, its manifest says {manifest.checksum}")
        except WeightSyncError as error:
            return done.set_exception(error)
        count = len(manifest.tensors)
        report = WeightReport(version=manifest.version, num_matched=count, num_expected=count, checksum=found)
        with self._wake:
            self._staged = report
        return done.set_result(report)

    def _commit(self, version: PolicyVersion) -> WeightReport:
        if self._staged is None or self._staged.version != version:
            raise WeightSyncError(f"version {version} cannot be finished: staged is {self._staged and self._staged.version}")
        self._report, self._staged = self._staged, None
        return self._report

    def _locked(self, work: Callable[[], Answer]) -> Future[Answer]:
        done: Future[Answer] = Future()
        with self._wake:
            try:
                done.set_result(work())
            except WeightSyncError as error:
                done.set_exception(error)
            self._wake.notify()
        return done
