"""Every contract of psrl on one page.

Parts are given what they need through constructors, typed by these protocols; `runtime/build.py` passes the real ones in.
Implementations may subclass a protocol (users' environments do) or just have its shape.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from psrl.types import (
    CommandResult,
    EpisodeTicket,
    GenerateRequest,
    Generation,
    LoopResult,
    Message,
    ParsedTurn,
    PolicyVersion,
    SandboxLimits,
    SandboxSpec,
    Score,
    SessionAddress,
    SessionRecord,
    SessionSpec,
    Task,
    ToolSchema,
    Trajectory,
)

ObsType_co = TypeVar("ObsType_co", covariant=True)
ObsType_contra = TypeVar("ObsType_contra", contravariant=True)
ActType_co = TypeVar("ActType_co", covariant=True)
ActType_contra = TypeVar("ActType_contra", contravariant=True)

Info = dict[str, Any]
"""What an environment says beside its observation: numbers under any name become metrics `env/<name>`."""


# ---------------------------------------------------------------- the episode


class Environment(Protocol[ObsType_co, ActType_contra]):
    """A world that answers actions with observations. One object serves one episode.

    `close` is always called, also after a failure or a cancellation, and may be called twice.
    """

    @abstractmethod
    async def reset(self, task: Task) -> tuple[ObsType_co, Info]:
        """Begin the episode of `task`; called once."""

    @abstractmethod
    async def step(self, action: ActType_contra) -> tuple[ObsType_co, float | None, bool, Info]:
        """Apply one action: (observation, reward, done, info).

        The reward is None where this environment does not judge (a scorer does it at the end). The observation of a
        step that is done is not rendered.
        """

    @abstractmethod
    async def close(self) -> None:
        """Free everything that the episode held."""


class AgentData(Protocol[ObsType_contra, ActType_co]):
    """Between observations and token ids: the only place where an environment meets them. One object, one episode."""

    @property
    @abstractmethod
    def trajectory(self) -> Trajectory:
        """The tokens so far."""

    @property
    @abstractmethod
    def messages(self) -> Sequence[Message]:
        """The conversation so far, for people and scorers."""

    @property
    @abstractmethod
    def turn_texts(self) -> Sequence[str]:
        """The decoded sampled text of each turn."""

    @abstractmethod
    def begin(self, task: Task, observation: ObsType_contra, info: Info) -> None:
        """Render the first observation; called once, before the first turn."""

    @abstractmethod
    def context_ids(self) -> list[int]:
        """[P] what the model reads before its next turn."""

    @abstractmethod
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn."""

    @abstractmethod
    def act(self, generation: Generation, *, temperature: float) -> ActType_co:
        """Append the sampled tokens to the trajectory and read the action from them.

        Never raises for what the policy wrote: a broken call is part of the action.
        """

    @abstractmethod
    def observe(self, observation: ObsType_contra, info: Info) -> None:
        """Render what the environment answered; called after each step that is not done."""

    @abstractmethod
    def counts(self) -> dict[str, float]:
        """Counters of this episode for metrics."""


class AgentLoop(Protocol):
    """Runs one episode from a task to an outcome. Knows nothing of rewards, staleness or training."""

    @abstractmethod
    async def run(self, task: Task, ticket: EpisodeTicket) -> LoopResult:
        """Play the episode. Ends in a LoopResult for everything but cancellation."""


class Scorer(Protocol):
    """Judges finished episodes."""

    @abstractmethod
    async def score(self, task: Task, result: LoopResult) -> Score:
        """Reward of an episode whose outcome judges the policy.

        Raises:
            RewardError: The grader failed; the caller records reward None.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the grader's child processes."""


# ---------------------------------------------------------------- tokens


class Renderer(Protocol):
    """Messages to token ids, append-only. Stateless between calls; safe to share."""

    @property
    @abstractmethod
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn."""

    @abstractmethod
    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Render the first prompt, the header of the assistant's turn included."""

    @abstractmethod
    def following(self, last_id: int | None, messages: Sequence[Message]) -> list[int]:
        """Ids between a sampled turn that ends with `last_id` (None: it has no ids) and the turn that answers `messages`.

        The assistant's header is included. `messages` may hold assistant messages that were never sampled here.
        """

    @abstractmethod
    def extend(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """`[*ids, *following(last of ids, messages)]`, in one list."""

    @abstractmethod
    def parse(self, sampled_ids: Sequence[int], *, turn: int, tools: Sequence[ToolSchema] = ()) -> ParsedTurn:
        """Read content, reasoning and calls from a sampled turn; `tools` are those that the prompt offered."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text with special tokens, for people only."""


# ---------------------------------------------------------------- tools and sandboxes


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """What a call gave."""

    text: str
    """The observation that the model reads."""
    error_cause: str | None = None
    """None when the call worked, else a short name that is counted: `timeout`, `exception`, `bad_arguments`, ..."""
    queue_s: float = 0.0
    """Seconds waited for a free sandbox; not run time."""
    run_s: float = 0.0


@runtime_checkable
class Tool(Protocol):
    """Something that the policy may call. Shared by all episodes of a worker; holds no episode state."""

    @property
    @abstractmethod
    def schema(self) -> ToolSchema:
        """Name, description and JSON Schema of the arguments."""

    @abstractmethod
    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one call. What the policy got wrong is a ToolResult; what the world got wrong raises SandboxError."""

    @abstractmethod
    async def close(self) -> None:
        """Free what the tool holds."""


class Sandbox(Protocol):
    """An isolated place in which programs run: start, then any number of run, read, write, then stop."""

    @abstractmethod
    async def start(self) -> None:
        """Make the place. Raises SandboxUnavailableError with the fix when the backend cannot be used."""

    @abstractmethod
    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: SandboxLimits | None = None,
    ) -> CommandResult:
        """Run a program to its end or its limit; its whole process tree is gone when this returns.

        It starts in `cwd`, else in the sandbox's workdir. Files stay for the next one.
        """

    @abstractmethod
    async def read(self, path: str) -> bytes:
        """A file inside."""

    @abstractmethod
    async def write(self, path: str, content: bytes) -> None:
        """Make or replace a file inside."""

    @abstractmethod
    async def stop(self) -> None:
        """Remove the place and everything in it; may be called twice."""


class Sandboxes(Protocol):
    """Makes sandboxes of the run's backend."""

    @abstractmethod
    def make(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that is not started. ConfigError where the backend cannot make such a place (an image without containers)."""


class ProgramRunner(Protocol):
    """Runs whole Python programs: each call is stateless, in a fresh process that nothing else shares."""

    @abstractmethod
    async def start(self) -> None:
        """Make the sandboxes. Raises SandboxUnavailableError with the fix when the backend cannot be used."""

    @abstractmethod
    async def preflight(self) -> None:
        """Run `print(2+3)`; raises SandboxUnavailableError unless it prints 5."""

    @abstractmethod
    async def run_program(self, code: str) -> CommandResult:
        """Run one program to its end or its limit. `queue_s` is the wait for a free sandbox, `run_s` the program's own time.

        Raises:
            SandboxError: No sandbox could be had; says nothing about the program.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End every sandbox; may be called twice."""


# ---------------------------------------------------------------- engines and weights


class Generator(Protocol):
    """What agent loops see of the engines: one call. Chooses the replica by session."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn, or the part of it that the engine gives back (`abort`); `engine_client.whole_turn` asks for the rest.

        Raises:
            EngineRequestError: The request is wrong.
            EngineError: No replica could answer within the deadline.
        """


class Sessions(Protocol):
    """What agent loops see of the gateway: places where an agent that speaks OpenAI's API meets the policy. Every call has an end."""

    @abstractmethod
    async def open(self, spec: SessionSpec) -> SessionAddress:
        """A new session, bound to `spec`.

        Raises:
            GatewayError: The gateway cannot be reached or takes no more sessions.
        """

    @abstractmethod
    async def record(self, address: SessionAddress) -> SessionRecord:
        """What was captured so far. GatewayError where the session is unknown."""

    @abstractmethod
    async def close(self, address: SessionAddress, *, abort: bool) -> SessionRecord:
        """End the session and take its record: turns in flight are waited for, or with `abort` cancelled down to the engine.

        The gateway forgets the session. GatewayError where it is unknown.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSlice:
    """Where one tensor lies in the flat buffer of a weight version."""

    name: str
    dtype: str
    """torch's name without the prefix: `float32`, `bfloat16`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the buffer's start."""
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightManifest:
    """One version of the weights, without the weights."""

    version: PolicyVersion
    tensors: tuple[TensorSlice, ...]
    total_bytes: int
    checksum: str
    """Of the flat buffer, as `parameter_server.layout.checksum` computes it."""
    location: dict[str, str] = field(default_factory=dict)
    """What the transport needs to find the buffer, such as {"transport": "shared_memory", "path": ...}."""
    follower_locations: tuple[dict[str, str], ...] = ()
    """The same on the other nodes of a replica that spans several, by node rank from 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightReport:
    """What a replica says after a pull."""

    version: PolicyVersion
    num_matched: int
    num_expected: int
    checksum: str


class ReplicaControl(Protocol):
    """Control of one engine replica."""

    @abstractmethod
    async def wait_ready(self, timeout_s: float) -> None:
        """Until it answers; EngineError with its last words otherwise."""

    @abstractmethod
    async def pause(self, mode: str) -> None:
        """`keep` freezes running requests, `abort` returns what they have, `wait` lets them end."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on after a pause."""

    @abstractmethod
    async def stage_weights(self, manifest: WeightManifest) -> WeightReport:
        """Find and check a version; what is served stays, and turns go on."""

    @abstractmethod
    async def finish_weights(self, version: PolicyVersion) -> WeightReport:
        """Serve the staged version from the next token on; no key of older weights is used again."""

    @abstractmethod
    async def version(self) -> PolicyVersion:
        """The weights that it serves."""


# ---------------------------------------------------------------- telemetry


class Tracker(Protocol):
    """Takes the metrics of each step somewhere."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Names are `area/noun/stat`; values are finite numbers."""

    @abstractmethod
    def close(self) -> None:
        """Flush and free."""
