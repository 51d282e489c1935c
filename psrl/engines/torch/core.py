"""The torch engine without its HTTP face: a thread that admits, computes and samples, one step after the other.

Consumes: requests and commands from its inbox. Waits for: the inbox, when nothing can run. Unblocked by: any submit or command, and
by `close`. Everything but the inbox belongs to the thread; commands run between two steps.

A new version is made ready in a thread of its own while decoding goes on, and takes the place of the old one between two steps. It
drops all keys: sequences that run on (pause mode `keep`) are computed again from their tokens, so every token is sampled from exactly
the version that it is marked with.
"""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from psrl.engines.contract import EngineLoad, PauseMode, SampledTurn, TurnDone, TurnFailure, TurnRequest
from psrl.engines.rate import TokenRate
from psrl.engines.torch.architecture import Architecture
from psrl.engines.torch.forward import Batch, Forward, Span
from psrl.engines.torch.sampling import sample, uniforms
from psrl.engines.torch.slots import MIN_SHARED_TOKENS, SlotTable, allocate_cache, num_slots_of
from psrl.engines.torch.update import WeightUpdate
from psrl.engines.torch.weights import Weights
from psrl.errors import EngineError, WeightSyncError
from psrl.protocols import WeightManifest, WeightReport
from psrl.types import FinishReason, PolicyVersion

PREFILL_TOKENS_PER_STEP = 2048
"""Bounds how long a long prompt holds up the sequences that decode."""
IDLE_WAIT_S = 1.0
JOIN_TIMEOUT_S = 10.0
Answer = TypeVar("Answer")


@dataclass(eq=False, slots=True)
class Running:
    """A request in the engine."""

    request: TurnRequest
    prompt: np.ndarray  # [P] int64
    on_done: TurnDone
    sampling: tuple[float, float, int, int, int]
    """As `slots.SAMPLING` has it."""
    num_cached: int = 0


class TorchCore:
    """Implements `contract.EngineCore`."""

    def __init__(
        self, weights: Weights, *, model_name: str, max_num_seqs: int, num_cache_slots: int, max_model_len: int, num_threads: int
    ) -> None:
        """`num_cache_slots`: slots beside the running ones that keep the keys of ended turns."""
        shape: Architecture = weights.shape
        self.model_name, self.max_model_len, self.vocab_size = model_name, max_model_len, shape.vocab_size
        num_slots = num_slots_of(max_num_seqs, num_cache_slots)
        dtype, device = weights.embedding.dtype, weights.embedding.device
        cache = allocate_cache(shape, num_slots=num_slots, max_len=max_model_len, dtype=dtype, device=device)
        self._max_num_seqs, self._num_threads = max_num_seqs, num_threads
        self._slots = SlotTable(cache, max_len=max_model_len)
        self._forward = Forward(weights, cache, max_len=max_model_len)
        self._running: list[Running] = []  # index = slot
        self._waiting: list[Running] = []  # by priority, then as they came
        self._is_paused = False
        self._drained: list[Future[None]] = []  # pauses with `wait`, ended when nothing runs
        self._update = WeightUpdate(weights)
        self._rate = TokenRate()
        self._seeds = np.random.default_rng()
        self._num_prompt = self._num_cached = self._num_sampled = 0
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ called from any thread

    def submit(self, request: TurnRequest, on_done: TurnDone) -> None:
        """Queue a request; the caller has checked it against max_model_len and the vocabulary."""
        sampling = request.sampling
        seed = sampling.seed if sampling.seed is not None else int(self._seeds.integers(2**63))
        sequence = Running(
            request=request,
            prompt=np.array(request.token_ids, np.int64),
            on_done=on_done,
            sampling=(
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
                seed % 2**64,
                min(len(request.token_ids) + sampling.max_tokens, self.max_model_len),
            ),
        )
        self._post(lambda: self._queue(sequence), refused=lambda: on_done(TurnFailure.ERROR))

    def abort(self, request_ids: Sequence[str] | None) -> Future[int]:
        """See the contract."""
        wanted = None if request_ids is None else set(request_ids)
        return self._command(lambda: self._abort(wanted))

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> Future[None]:
        """See the contract. Requests that wait stay queued, except with `abort`."""
        done: Future[None] = Future()

        def begin() -> None:
            if mode is PauseMode.ABORT:
                self._abort(None)
            if mode is not PauseMode.WAIT:
                self._end_drain()
            self._is_paused = True
            if mode is PauseMode.WAIT and self._running:
                self._drained.append(done)
            else:
                done.set_result(None)
            if clear_cache:
                self._slots.clear_idle()

        self._post(begin, refused=self._refusal(done))
        return done

    def resume(self) -> Future[None]:
        """See the contract."""

        def go_on() -> None:
            self._is_paused = False
            self._end_drain()

        return self._command(go_on)

    def stage_weights(self, manifest: WeightManifest) -> Future[WeightReport]:
        """See the contract. A version that was staged and not committed is forgotten."""
        done: Future[WeightReport] = Future()
        self._post(lambda: self._update.stage(manifest, done, self._post), refused=self._refusal(done))
        return done

    def commit_weights(self, version: PolicyVersion) -> Future[WeightReport]:
        """See the contract."""
        return self._command(lambda: self._commit(version))

    def reset_prefix_cache(self) -> Future[None]:
        """See the contract."""
        return self._command(self._slots.clear_idle)

    def weight_report(self) -> WeightReport:
        """See the contract."""
        return self._update.served.report

    def load(self) -> EngineLoad:
        """Counts now; taken without waiting for the step under way."""
        return EngineLoad(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_prompt_tokens=self._num_prompt,
            num_cached_tokens=self._num_cached,
            num_sampled_tokens=self._num_sampled,
            cache_usage=self._slots.usage(self._max_num_seqs),
            cache_filled=self._slots.filled,
            tokens_per_s=self._rate.per_s(),
        )

    def close(self) -> None:
        """End the thread."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(JOIN_TIMEOUT_S)

    # ------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # the setting belongs to the calling thread
        try:
            with torch.inference_mode():
                while self._take_inbox():
                    self._step()
        finally:
            with self._wake:
                self.failure = "engine is closed" if self._is_closing else "the engine's thread failed; its log has the cause"
                self._is_closing = True
                unread = list(self._inbox)
            for command in unread:
                command()
            for sequence in [*self._running, *self._waiting]:
                sequence.on_done(TurnFailure.ERROR)
            for done in self._drained:
                done.set_exception(EngineError(self.failure))

    def _take_inbox(self) -> bool:
        """Run the commands that came; waits while nothing can run. False when closing."""
        while True:
            with self._wake:
                if not self._inbox and not self._can_step and not self._is_closing:
                    self._wake.wait(IDLE_WAIT_S)
                if self._is_closing:
                    return False
                commands = list(self._inbox)
                self._inbox.clear()
            for command in commands:
                command()
            if self._can_step:
                return True

    @property
    def _can_step(self) -> bool:
        if self._is_paused:
            return bool(self._drained)
        return bool(self._running or self._waiting)

    def _step(self) -> None:
        if not self._is_paused:
            self._admit()
        batch, sampled_slots = self._plan()
        slots = self._slots
        slots.num_computed[: len(self._running)] += self._planned
        if len(sampled_slots):
            self._sample(self._forward.logits(batch), sampled_slots)
        else:
            self._forward.logits(batch)
        if not self._running:
            self._end_drain()

    def _queue(self, sequence: Running) -> None:
        bisect.insort(self._waiting, sequence, key=lambda one: one.request.priority)  # behind its equals

    def _admit(self) -> None:
        held_back: list[Running] = []
        while self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting.pop(0)
            match = self._slots.match(sequence.prompt)
            if match.num_coming >= match.num_tokens + MIN_SHARED_TOKENS:
                held_back.append(sequence)  # its prefix is being computed: copy it after this step
                continue
            self._slots.sampling[self._slots.admit(sequence.prompt, match)] = sequence.sampling
            self._running.append(sequence)
            sequence.num_cached = match.num_tokens
            self._num_prompt += len(sequence.prompt)
            self._num_cached += match.num_tokens
        self._waiting[:0] = held_back

    def _plan(self) -> tuple[Batch, np.ndarray]:
        """The tokens to compute now: one of each sequence that decodes, then prompts up to the budget."""
        slots, count = self._slots, len(self._running)
        left = slots.num_tokens[:count] - slots.num_computed[:count]
        if count and (left[:-1] > 1).any():
            left = self._put_decoding_first(left)
        num_decode = int((left == 1).sum())
        decode = np.arange(num_decode)
        positions = [slots.num_computed[:num_decode]]
        slot_ids = [decode]
        spans, ends = [], list(range(num_decode))
        sampled = list(range(num_decode))
        planned = np.zeros(count, np.int64)
        planned[:num_decode] = 1
        budget, row = PREFILL_TOKENS_PER_STEP, num_decode
        for slot in range(num_decode, count):
            length = min(int(left[slot]), budget)
            if length == 0:
                break
            start = int(slots.num_computed[slot])
            spans.append(Span(slot=slot, start=start, end=start + length))
            positions.append(np.arange(start, start + length))
            slot_ids.append(np.full(length, slot))
            planned[slot] = length
            budget -= length
            row += length
            if length == left[slot]:
                sampled.append(slot)
                ends.append(row - 1)
        self._planned = planned
        positions_T, slots_T = np.concatenate(positions), np.concatenate(slot_ids)
        batch = Batch(
            token_ids_T=slots.tokens[slots_T, positions_T],
            positions_T=positions_T,
            slots_T=slots_T,
            num_decode=num_decode,
            spans=spans,
            rows_R=np.array(ends, np.int64),
        )
        return batch, np.array(sampled, np.int64)

    def _put_decoding_first(self, left: np.ndarray) -> np.ndarray:
        order = list(left)
        front, back = 0, len(order) - 1
        while True:
            while front < back and order[front] == 1:
                front += 1
            while front < back and order[back] != 1:
                back -= 1
            if front >= back:
                return np.array(order)
            self._slots.swap(front, back)
            for row in (order, self._running):
                row[front], row[back] = row[back], row[front]

    def _sample(self, logits: torch.Tensor, rows: np.ndarray) -> None:
        slots = self._slots
        wanted, ends = slots.sampling[rows], slots.num_tokens[rows]
        ids, logprobs = sample(
            logits,
            temperature_R=wanted["temperature"],
            top_p_R=wanted["top_p"],
            top_k_R=wanted["top_k"],
            uniforms_R=uniforms(wanted["seed"], ends),
        )
        slots.tokens[rows, ends] = ids
        slots.logprobs[rows, ends] = logprobs
        slots.versions[rows, ends] = self._update.served.report.version
        slots.num_tokens[rows] += 1
        self._num_sampled += len(rows)
        self._rate.add(len(rows))
        is_full = ends + 1 >= wanted["max_tokens"]
        finished = []
        for slot, token, is_at_limit in zip(rows.tolist(), ids.tolist(), is_full.tolist(), strict=True):
            if token in self._running[slot].request.sampling.stop_token_ids:
                finished.append((slot, FinishReason.STOP))
            elif is_at_limit:
                finished.append((slot, FinishReason.LENGTH))
        for slot, reason in sorted(finished, reverse=True):
            self._finish(slot, reason)

    def _finish(self, slot: int, reason: FinishReason) -> None:
        """Highest slots first where several end: the last running one takes the freed place."""
        slots, sequence = self._slots, self._running[slot]
        sampled = slice(len(sequence.prompt), int(slots.num_tokens[slot]))
        turn = SampledTurn(
            token_ids=slots.tokens[slot, sampled].tolist(),
            logprobs=slots.logprobs[slot, sampled].tolist(),
            versions=slots.versions[slot, sampled].tolist(),
            finish_reason=reason,
            cached_tokens=sequence.num_cached,
        )
        slots.release(slot)
        last = self._running.pop()
        if last is not sequence:
            self._running[slot] = last
        sequence.on_done(turn)

    def _abort(self, request_ids: set[str] | None) -> int:
        def is_meant(sequence: Running) -> bool:
            return request_ids is None or sequence.request.request_id in request_ids

        aborted = [slot for slot, sequence in enumerate(self._running) if is_meant(sequence)]
        for slot in reversed(aborted):
            self._finish(slot, FinishReason.ABORT)
        queued = [sequence for sequence in self._waiting if is_meant(sequence)]
        self._waiting = [sequence for sequence in self._waiting if not is_meant(sequence)]
        for sequence in queued:
            sequence.on_done(SampledTurn(finish_reason=FinishReason.ABORT))
        if not self._running:
            self._end_drain()
        return len(aborted) + len(queued)

    def _end_drain(self) -> None:
        """Nothing runs any more, or a later command took the place of the pauses that waited for that."""
        for done in self._drained:
            done.set_result(None)
        self._drained.clear()

    def _commit(self, version: PolicyVersion) -> WeightReport:
        report = self._update.commit(version, self._forward.use)
        self._slots.clear_all()
        return report

    def _refusal(self, done: Future[Answer]) -> Callable[[], None]:
        return lambda: done.set_exception(EngineError(self.failure or "engine is closed"))

    def _post(self, command: Callable[[], None], *, refused: Callable[[], None]) -> None:
        with self._wake:
            if not self._is_closing:
                self._inbox.append(command)
                self._wake.notify()
                return
        refused()

    def _command(self, work: Callable[[], Answer]) -> Future[Answer]:
        done: Future[Answer] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except WeightSyncError as error:
                done.set_exception(error)
            except (RuntimeError, ValueError) as error:  # torch's, such as memory that runs out
                done.set_exception(EngineError(f"{type(error).__name__}: {error}"))

        self._post(run, refused=self._refusal(done))
        return done
