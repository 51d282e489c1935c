"""What the HTTP server needs of an engine. The torch core and the scripted core have this shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from psrl.protocols import WeightManifest, WeightReport
from psrl.types import FinishReason, PolicyVersion, SamplingParams


class PauseMode(StrEnum):
    """What happens to running requests."""

    KEEP = "keep"
    ABORT = "abort"
    WAIT = "wait"


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """A checked body of `/generate`."""

    request_id: str
    token_ids: list[int]  # [P]
    sampling: SamplingParams
    priority: int = 0
    """Requests with a lower one leave the queue first; those with the same one as they came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTurn:
    """What an engine made of a request."""

    token_ids: list[int] = field(default_factory=list)  # [S]
    logprobs: list[float] = field(default_factory=list)  # [S]
    versions: list[int] = field(default_factory=list)  # [S]
    finish_reason: FinishReason
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """A moment's counts, for `/metrics`."""

    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    """Received since the start, those served from the cache included."""
    num_cached_tokens: int
    num_sampled_tokens: int
    cache_usage: float
    """Keys of running requests (newer weights make them be computed again) as a share of what as many requests of full length as can
    run at once would have, 0 to 1."""
    cache_filled: float
    """Share of the KV cache that holds keys, those of ended turns included, 0 to 1. It hardly ever falls."""
    tokens_per_s: float
    """Sampled, over the last two seconds."""


class TurnFailure(StrEnum):
    """Why there is no turn."""

    ERROR = "error"
    """The engine failed: answered 500."""
    DISCONNECT = "disconnect"
    """Only of a script: the connection is cut in the middle of the answer."""


TurnDone = Callable[[SampledTurn | TurnFailure], None]
"""Called once, from any thread."""


class EngineCore(Protocol):
    """An engine without its HTTP face. Methods may be called from any thread; futures end when the engine has done it.

    A future of an engine that has failed or is closed ends with EngineError.
    """

    model_name: str
    max_model_len: int
    vocab_size: int

    @property
    def failure(self) -> str | None:
        """Why the engine cannot serve any more; None while it can."""

    def submit(self, request: TurnRequest, on_done: TurnDone) -> None:
        """Queue a request."""

    def abort(self, request_ids: Sequence[str] | None) -> Future[int]:
        """End these (or all) requests with what they have; how many there were."""

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> Future[None]:
        """Stand still after the running step (with `wait`: after the running requests).

        `keep`, `abort` and `resume` end a `wait` that is still under way: the latest command decides.
        """

    def resume(self) -> Future[None]:
        """Go on."""

    def stage_weights(self, manifest: WeightManifest) -> Future[WeightReport]:
        """Find and check a version without serving it; turns go on meanwhile. WeightSyncError when it is not whole or does not fit."""

    def commit_weights(self, version: PolicyVersion) -> Future[WeightReport]:
        """Serve the staged version from the next step on. WeightSyncError when another or none is staged."""

    def reset_prefix_cache(self) -> Future[None]:
        """Forget the keys of ended turns."""

    def weight_report(self) -> WeightReport:
        """The weights that are served."""

    def load(self) -> EngineLoad:
        """Counts now."""

    def close(self) -> None:
        """End the engine's threads; unfinished requests fail, and later ones. May be called twice."""
