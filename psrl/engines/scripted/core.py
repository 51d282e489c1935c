"""The scripted engine without its HTTP face: one thread that emits tokens when they are due.

Consumes: requests and commands. Waits for: the next due token, or the inbox. Unblocked by: any submit or command, and `close`.
Weights are checked as the manifest says (file, size, checksum) and thrown away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from psrl.engines.contract import EngineLoad, PauseMode, SampledTurn, TurnDone, TurnFailure, TurnRequest
from psrl.engines.scripted.script import Script, ScriptedFailure, ScriptedTurn
from psrl.errors import EngineError, WeightSyncError
from psrl.parameter_server.layout import checksum, read_tensors
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
    on_done: TurnDone
    due: float
    versions: list[int] = field(default_factory=list)

    def tokens(self) -> list[int]:
        """The ids emitted so far."""
        ids = self.script.token_ids
        return [ids[index % len(ids)] for index in range(len(self.versions))]


class ScriptedCore:
    """Implements `contract.EngineCore`."""

    def __init__(self, script: Script, *, model_name: str = "scripted") -> None:
        """Answers from now on."""
        self.model_name, self.max_model_len, self.vocab_size = model_name, script.max_model_len, script.vocab_size
        self.failure: str | None = None
        self._script = script
        self._running: list[PlayedTurn] = []
        self._queued: list[PlayedTurn] = []
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
            try:
                script = self._script.turn_for(request.token_ids, number=self._num_requests)
            except EngineError:
                on_done(TurnFailure.ERROR)
                return
            self._num_requests += not script.when_prompt_contains
            self._num_prompt += len(request.token_ids)
            played = PlayedTurn(request, script, on_done, due=time.monotonic() + script.latency_s)
            (self._running if self._paused_at is None else self._queued).append(played)
            self._wake.notify()

    def abort(self, request_ids: Sequence[str] | None) -> Future[int]:
        """See the contract."""
        return self._locked(lambda: self._abort(request_ids))

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> Future[None]:
        """See the contract; there is no cache."""
        done: Future[None] = Future()
        with self._wake:
            if mode is PauseMode.ABORT:
                self._abort(None)
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
        """See the contract."""
        return self._locked(lambda: self._stage(manifest))

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
        """See the contract."""
        return EngineLoad(
            num_running=len(self._running),
            num_waiting=len(self._queued),
            num_prompt_tokens=self._num_prompt,
            num_cached_tokens=0,
            num_sampled_tokens=self._num_sampled,
            cache_usage=0.0,
        )

    def close(self) -> None:
        """End the thread; unfinished requests fail."""
        with self._wake:
            self._is_closing = True
            self.failure = "engine is closed"
            self._wake.notify()
        self._thread.join(JOIN_TIMEOUT_S)
        for played in [*self._running, *self._queued]:
            played.on_done(TurnFailure.ERROR)

    def _run(self) -> None:
        with self._wake:
            while not self._is_closing:
                now = time.monotonic()
                next_due = now + LONGEST_WAIT_S
                if self._paused_at is None or self._drained:
                    for played in list(self._running):
                        self._emit(played, now)
                        if played.script.failure is not ScriptedFailure.HANG:
                            next_due = min(next_due, played.due)
                    self._end_drain()
                self._wake.wait(max(0.0, next_due - time.monotonic()))

    def _emit(self, played: PlayedTurn, now: float) -> None:
        request, script = played.request, played.script
        if script.failure is ScriptedFailure.HANG or played.due > now:
            return
        if script.failure is not None:
            self._running.remove(played)
            played.on_done(TurnFailure(script.failure.value))
            return
        limit = min(request.sampling.max_tokens, self.max_model_len - len(request.token_ids))
        while played.due <= now:
            token = script.token_ids[len(played.versions) % len(script.token_ids)]
            played.versions.append(self._report.version)
            self._num_sampled += 1
            played.due += script.per_token_s
            if token in request.sampling.stop_token_ids:
                return self._finish(played, FinishReason.STOP)
            if len(played.versions) >= limit:
                return self._finish(played, FinishReason.LENGTH)

    def _finish(self, played: PlayedTurn, reason: FinishReason) -> None:
        (self._running if played in self._running else self._queued).remove(played)
        logprobs = [played.script.logprob] * len(played.versions)
        played.on_done(SampledTurn(token_ids=played.tokens(), logprobs=logprobs, versions=played.versions, finish_reason=reason))

    def _abort(self, request_ids: Sequence[str] | None) -> int:
        meant = [one for one in [*self._running, *self._queued] if request_ids is None or one.request.request_id in request_ids]
        for played in meant:
            self._finish(played, FinishReason.ABORT)
        self._end_drain()
        return len(meant)

    def _end_drain(self) -> None:
        if not self._running:
            for done in self._drained:
                done.set_result(None)
            self._drained.clear()

    def _resume(self) -> None:
        if self._paused_at is None:
            return
        stood_s = time.monotonic() - self._paused_at
        self._paused_at = None
        self._running += self._queued
        self._queued = []
        for played in self._running:
            played.due += stood_s
        for done in self._drained:
            done.set_result(None)
        self._drained.clear()

    def _stage(self, manifest: WeightManifest) -> WeightReport:
        self._staged = None
        buffer = open_version(manifest)
        found = checksum(buffer)
        if found != manifest.checksum:
            raise WeightSyncError(f"version {manifest.version} has checksum {found}, its manifest says {manifest.checksum}")
        count = len(read_tensors(buffer, manifest))
        self._staged = WeightReport(version=manifest.version, num_matched=count, num_expected=count, checksum=found)
        return self._staged

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
