"""What goes to an engine and what comes back, exactly.

The JSON form of both lives in `engine_client/bodies.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SEED_STRIDE = 1_000_003
"""A prime: an episode's turns, and episodes with neighbouring seeds, get different seeds."""
SEED_RANGE = 2**31


def turn_seed(episode_seed: int, turn: int) -> int:
    """Sampling seed of a turn: `(episode_seed * 1_000_003 + turn) mod 2**31`. Says the same on every machine and in every retry."""
    return (episode_seed * SEED_STRIDE + turn) % SEED_RANGE


def turn_priority(admitted_version: int, *, is_validation: bool) -> int:
    """`GenerateRequest.priority` of an episode's turns: its V_traj; those of validation come first."""
    return -1 if is_validation else admitted_version


class FinishReason(StrEnum):
    """Why an engine stopped a turn."""

    STOP = "stop"
    """A stop id was sampled; it is the last of `token_ids`."""
    LENGTH = "length"
    """`max_tokens` or the context was reached: the turn is cut."""
    ABORT = "abort"
    """The request was aborted, or the replica paused with mode `abort`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The distribution that a turn is sampled from."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy; logprobs of a greedy turn are those at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 turns it off."""
    seed: int | None = None
    """Same seed, prompt and weights give the same ids, whatever else runs in the batch.

    The rest of a turn that was given back is asked for with the same seed: engines draw by seed and position, so it draws on. One whose
    draws begin anew with each request must mix the prompt's length in, or the rest would be drawn like the beginning.
    """
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One turn to generate."""

    request_id: str
    token_ids: list[int]  # [P]
    """The whole context; the engine reuses what its cache already holds."""
    sampling: SamplingParams
    session: str
    """Affinity key: the episode. Turns of one episode go to one replica."""
    instance: int | None = None
    """The replica that the episode was given; None leaves the choice to the client."""
    priority: int = 0
    """Waiting turns with a lower one begin first: the episode's V_traj, so that the oldest data is made first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One sampled turn."""

    token_ids: list[int]  # [S]
    """The sampled ids, the stop id included when `finish_reason` is `stop`."""
    logprobs: list[float]  # [S]
    """Of the distribution sampled from (temperature, top-k and top-p applied)."""
    policy_versions: list[int]  # [S]
    """Weights that sampled each token."""
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed again."""
    latency_s: float
    """Seconds from sending the request to having the answer."""
    num_resumes: int = 0
    """How often the engine gave it back unfinished and it was continued."""
