"""How much an episode may use: turns, tokens, seconds. Looked at in one place, before each generation."""

from __future__ import annotations

from dataclasses import dataclass

from psrl.config.rollout import RolloutConfig
from psrl.errors import EnvironmentFault
from psrl.types import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of one kind of rollout."""

    max_turns: int
    max_tokens_per_turn: int
    """0 leaves only `response_length`."""
    prompt_length: int
    """Most tokens of the first prompt."""
    response_length: int
    """Most tokens after the first prompt, observations included."""
    step_timeout_s: float
    episode_timeout_s: float

    @classmethod
    def from_rollout(cls, rollout: RolloutConfig) -> Limits:
        """As configured; one turn where `multi_turn.enable` is false."""
        return cls(
            max_turns=rollout.multi_turn.max_turns if rollout.multi_turn.enable else 1,
            max_tokens_per_turn=rollout.multi_turn.max_tokens_per_turn,
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            step_timeout_s=rollout.agent.step_timeout_s,
            episode_timeout_s=rollout.agent.episode_timeout_s,
        )

    def check_prompt(self, num_tokens: int) -> None:
        """The first prompt must fit.

        Raises:
            EnvironmentFault: It does not. Rows that are too long are refused at load, so what is too long here is what the
                environment made of its row, or the tools' schemas: nothing that the policy did, so no outcome that judges it.
        """
        if num_tokens > self.prompt_length:
            raise EnvironmentFault(f"the first prompt has {num_tokens} tokens, rollout.prompt_length allows {self.prompt_length}")

    def before_generation(self, *, num_turns: int, num_response_tokens: int, elapsed_s: float) -> int | Outcome:
        """How many tokens the next turn may have, or the outcome that ends the episode.

        Args:
            num_turns: Turns generated so far.
            num_response_tokens: Tokens of the context after the first prompt.
            elapsed_s: Seconds since the episode began.

        Example:
            response_length=10 and 8 tokens used gives 2; with 10 used, `max_tokens`.
        """
        if num_turns >= self.max_turns:
            return Outcome.MAX_TURNS
        if elapsed_s >= self.episode_timeout_s:
            return Outcome.TIMEOUT
        room = self.response_length - num_response_tokens
        if room <= 0:
            return Outcome.MAX_TOKENS
        return min(room, self.max_tokens_per_turn) if self.max_tokens_per_turn else room
