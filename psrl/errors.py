"""Every error that psrl raises, one class per boundary.

`is_retryable` says whether doing the same thing again can help. Programmer's mistakes are assertions, not errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class PsrlError(Exception):
    """Root of all errors that psrl raises on purpose."""

    is_retryable = False


class ConfigError(PsrlError):
    """A setting is wrong. Carries what the user must change.

    Example:
        ConfigError(key="psrl.rollout_n", value=1, rule="GRPO needs groups of at least 2", fix="set psrl.rollout_n=8")
    """

    def __init__(self, *, key: str, value: object, rule: str, fix: str) -> None:
        super().__init__(f"{key}={value!r}: {rule}. Fix: {fix}")
        self.key = key
        self.value = value
        self.rule = rule
        self.fix = fix

    def __reduce__(self) -> tuple[Callable[..., PsrlError], tuple[object, ...]]:
        """Errors cross processes; keyword-only constructors do not survive pickle by themselves."""
        return _rebuild, (ConfigError, {"key": self.key, "value": self.value, "rule": self.rule, "fix": self.fix})


class MessageError(PsrlError):
    """A chat message or a batch of them does not have the promised shape."""


class RowError(PsrlError):
    """A dataset row cannot be used; `reason` is counted, `row` named."""

    def __init__(self, *, source: str, row: int, reason: str, detail: str) -> None:
        super().__init__(f"{source} row {row}: {reason}: {detail}")
        self.source = source
        self.row = row
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[Callable[..., PsrlError], tuple[object, ...]]:
        """As ConfigError's."""
        return _rebuild, (RowError, {"source": self.source, "row": self.row, "reason": self.reason, "detail": self.detail})


class TemplateError(PsrlError):
    """A chat template cannot be rendered as psrl needs it (not append-only, fails on a role)."""


class EngineError(PsrlError):
    """An engine replica failed, is unreachable or broke the contract."""

    is_retryable = True


class EngineRequestError(EngineError):
    """The engine refused a request as wrong; sending it again cannot help."""

    is_retryable = False


class GatewayError(PsrlError):
    """The gateway (router or SMG) failed or is unreachable."""

    is_retryable = True


class GatewayUnreachableError(GatewayError):
    """The gateway was not there, or went away before it answered."""


class SessionRequestError(PsrlError):
    """A request that a session answers with an error: `status` is HTTP's, `code` a short machine name."""

    def __init__(self, *, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[Callable[..., PsrlError], tuple[object, ...]]:
        """As ConfigError's."""
        fields = {"status": self.status, "code": self.code, "message": self.message, "param": self.param}
        return _rebuild, (SessionRequestError, fields)


class SandboxError(PsrlError):
    """The sandbox itself failed (not the program in it)."""

    is_retryable = True


class SandboxUnavailableError(SandboxError):
    """The sandbox backend is not installed or may not be used here."""

    is_retryable = False


class ToolError(PsrlError):
    """A tool refused its arguments; the text becomes the observation."""


class EnvironmentFault(PsrlError):
    """An environment broke its contract or failed for a reason that says nothing about the policy."""

    is_retryable = True


class AgentError(PsrlError):
    """The agent program failed; the outcome is `agent_error`."""


class RewardError(PsrlError):
    """A grader failed or ran out of time; the reward is None."""

    is_retryable = True


class DataPlaneError(PsrlError):
    """TransferQueue failed or does not hold what was asked for."""

    is_retryable = True


class WeightSyncError(PsrlError):
    """A replica did not end up with the weights that were pushed; the run stops."""


class RunFolderError(PsrlError):
    """The run folder cannot be written: its disk is full, read-only or broken."""


class CheckpointError(PsrlError):
    """A checkpoint cannot be written or read."""


class TrainingError(PsrlError):
    """The optimizer step cannot be taken (not finite, empty batch, a row too long)."""


class RowTooLongError(TrainingError):
    """A trajectory exceeds the tokens of one micro-batch; nothing is cut in silence."""


class ProcessDiedError(PsrlError):
    """A process of the run died; the message names it and its last words."""


class ActorDiedError(ProcessDiedError):
    """The process that was asked died before it answered; another, or its successor, can be asked again."""

    is_retryable = True


class DeadlineError(PsrlError):
    """A unit in flight reached its deadline; the message names the unit and who held it."""


class TooManyFailuresError(PsrlError):
    """The rate of an error class passed its limit; the run stops with the cause."""


def _rebuild(kind: Callable[..., PsrlError], fields: dict[str, Any]) -> PsrlError:
    return kind(**fields)
