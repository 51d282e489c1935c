"""What `POST /run_code` takes and answers, with SandboxFusion's names (bytedance/SandboxFusion, sandbox/server/sandbox_api.py).

Answers have four fields that the published service does not have, which its clients leave unread: `killed_by` and
`dropped_output_bytes` of a command, `queue_time` and `served_by` of the whole.
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from psrl.types import CommandResult

Language = Literal["python", "bash"]
LANGUAGES: tuple[str, ...] = get_args(Language)
KILLED = -9
"""`return_code` of a program that a limit ended, as Python's subprocess says it."""


class RunCodeRequest(BaseModel):
    """The published fields and defaults; others are left unread, as there."""

    model_config = ConfigDict(extra="ignore")

    code: str
    language: Language
    compile_timeout: float = 10.0
    """Neither language is compiled."""
    run_timeout: float = 10.0
    memory_limit_MB: int = -1
    """Zero and less: the server's."""
    stdin: str | None = None
    files: dict[str, str | None] = Field(default_factory=dict)
    """Path from the working folder -> base64 of its content; null is left out."""
    fetch_files: list[str] = Field(default_factory=list)
    """Paths to give back after the run; one that is not there is left out."""
    args: list[str] = Field(default_factory=list)
    """Of pytest, which is not served."""

    @field_validator("run_timeout")
    @classmethod
    def _is_time(cls, value: float) -> float:
        if not (math.isfinite(value) and value > 0):
            raise ValueError("must be a number of seconds above 0")
        return value

    @field_validator("files")
    @classmethod
    def _is_base64(cls, value: dict[str, str | None]) -> dict[str, str | None]:
        for path, content in value.items():
            try:
                base64.b64decode(content or "", validate=True)
            except (binascii.Error, ValueError) as error:
                raise ValueError(f"the content of {path!r} is not base64: {error}") from error
        return value

    def contents(self) -> dict[str, bytes]:
        """The files to write."""
        return {path: base64.b64decode(content) for path, content in self.files.items() if content is not None}


def answer_of(result: CommandResult, *, fetched: dict[str, bytes], served_by: str) -> dict[str, Any]:
    """The response to a program that ran, whatever became of it.

    Example:
        Exit code 0 -> `Success`, `run_result.status` `Finished`; exit code 1 -> `Failed`, `Finished`; out of time -> `Failed`,
        `TimeLimitExceeded` without a `return_code`.
    """
    is_late = result.killed_by == "wall_time"
    return_code = result.exit_code if result.killed_by is None else None if is_late else _code_of(result.killed_by)
    run_result = {
        "status": "TimeLimitExceeded" if is_late else "Finished",
        "execution_time": result.run_s,
        "return_code": return_code,
        "stdout": result.stdout.decode("utf-8", "replace"),
        "stderr": result.stderr.decode("utf-8", "replace"),
        "killed_by": result.killed_by,
        "dropped_output_bytes": result.dropped_output_bytes,
    }
    return {
        "status": "Success" if return_code == 0 else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": run_result,
        "executor_pod_name": None,
        "files": {path: base64.b64encode(content).decode() for path, content in fetched.items()},
        "queue_time": result.queue_s,
        "served_by": served_by,
    }


def sandbox_error(message: str, *, served_by: str) -> dict[str, Any]:
    """The response where no sandbox could be had: it says nothing about the program."""
    return {
        "status": "SandboxError",
        "message": message,
        "compile_result": None,
        "run_result": None,
        "executor_pod_name": None,
        "files": {},
        "queue_time": 0.0,
        "served_by": served_by,
    }


def _code_of(killed_by: str) -> int:
    kind, _, number = killed_by.partition(":")
    return -int(number) if kind == "signal" else KILLED
