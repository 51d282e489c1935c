"""A session: one episode of an agent that talks to the policy over HTTP, and what was captured of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from psrl.types.ids import EpisodeUid, GroupUid, PolicyVersion, SessionId
from psrl.types.message import Message
from psrl.types.outcome import Outcome
from psrl.types.trajectory import Trajectory


class AgentSampling(StrEnum):
    """What becomes of a sampling parameter of the agent's that breaks the sampling contract."""

    OVERRIDE = "override"
    """The contract's value is used; the agent's is counted as `sampling_overrides/<name>`."""
    REFUSE = "refuse"
    """The request is answered 400."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingContract:
    """The distribution that every turn of a session is sampled from, whatever the agent asks for."""

    seed: int
    """Of the episode; each turn derives its own."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    agent_sampling: AgentSampling = AgentSampling.OVERRIDE


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    """How much the turns of a session may use. A request beyond is answered 400 and ends the episode with its outcome."""

    max_turns: int
    """Over all branches."""
    prompt_length: int
    """Most tokens of the first prompt. A branch that begins anew may use `prompt_length + response_length` in all."""
    response_length: int
    """Most tokens of a branch after its first prompt."""
    max_tokens_per_turn: int = 0
    """0 leaves only `response_length`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSpec:
    """What a session is bound to when it is opened."""

    uid: EpisodeUid
    group: GroupUid
    admitted_version: PolicyVersion
    is_validation: bool
    contract: SamplingContract
    limits: SessionLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionAddress:
    """How an agent reaches its session: any OpenAI client works with these two."""

    id: SessionId
    url: str
    """`http://host:port/sessions/<id>`; OpenAI's base URL is `<url>/v1`, Anthropic's is `<url>`."""
    api_key: str
    """The session's own secret; no other session can be reached with it."""
    model: str = "policy"
    """Name of the model that requests carry; a session answers to any, an endpoint of somebody else's only to its own."""

    @property
    def base_url(self) -> str:
        """What `OPENAI_BASE_URL` is set to."""
        return f"{self.url}/v1"


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRecord:
    """Everything captured of a session so far."""

    id: SessionId
    uid: EpisodeUid
    trajectories: tuple[Trajectory, ...]
    """One per leaf, in the order in which the leaves were made. A turn that several leaves share is trained on in the first of them
    and context in the others, so every sampled token is trained on once."""
    paths: tuple[tuple[int, ...], ...] = ()
    """Of each trajectory, the numbers of its turns in order, those included that it shares with an earlier one."""
    messages: tuple[Message, ...]
    """Of the branch of the last turn."""
    turn_texts: tuple[str, ...]
    """Decoded turns of that branch, in order."""
    num_turns: int
    """Over all branches."""
    end: Outcome | None = None
    """The limit that the agent ran into (`max_turns`, `max_tokens`), or `infra_error` where its last turn could not be sampled."""
    error: str | None = None
    """What ended it, in words."""
    counts: dict[str, float] = field(default_factory=dict)
    """Such as `branches` (beyond the first), `tool_calls`, `tool_errors/<cause>`, `sampling_overrides/<name>`."""
    generation_s: float = 0.0
    """Seconds in which at least one turn waited for engines."""
    is_captured: bool = True
    """False of an endpoint of somebody else's, of whose turns nothing is seen: that there are none says nothing then."""
