"""The `code_interpreter` tool: one stateless Python program per call; the policy reads what it printed and its last expression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psrl.errors import ConfigError
from psrl.protocols import ProgramRunner, Tool, ToolResult
from psrl.tools.base import problem_with, tools
from psrl.types import CommandResult, ToolSchema

NO_OUTPUT = "(no output)"
SCHEMA = ToolSchema(
    name="code_interpreter",
    description="Run a Python program and return what it prints and the value of its last expression. Nothing is kept between calls.",
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The Python program."}},
        "required": ["code"],
    },
)
ENDINGS: dict[str, tuple[str, str]] = {
    "wall_time": ("timeout", "the program ran out of time and was ended"),
    "cpu_time": ("cpu_time", "the program used too much CPU time and was ended"),
    "memory": ("memory", "the program used too much memory and was ended"),
    "output": ("output", "the program printed too much and was ended"),
    "processes": ("processes", "the program started too many processes and was ended"),
    "disk": ("disk", "the program made too many files and was ended"),
    "sandbox_lost": ("sandbox_lost", "the program broke its sandbox"),
}
"""`CommandResult.killed_by` to (`ToolResult.error_cause`, what the policy reads)."""


@tools.register("code_interpreter")
class CodeInterpreter(Tool):
    """Runs the policy's programs in a `ProgramRunner`, which other tools may share; so `close` leaves it running."""

    def __init__(self, program_runner: ProgramRunner, *, schema: ToolSchema = SCHEMA) -> None:
        """`schema` renames or describes the tool differently.

        Raises:
            ConfigError: Its one argument is not `code`, a required string.
        """
        parameters = schema.parameters
        properties = parameters.get("properties", {})
        if set(properties) != {"code"} or properties["code"].get("type") != "string" or parameters.get("required") != ["code"]:
            raise ConfigError(
                key="tools.tool_schema.parameters",
                value=parameters,
                rule="the interpreter takes one argument, `code`",
                fix="{type: object, properties: {code: {type: string}}, required: [code]}",
            )
        self._program_runner = program_runner
        self._schema = schema

    @property
    def schema(self) -> ToolSchema:
        """One argument, `code`."""
        return self._schema

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Run `arguments["code"]`; SandboxError when no sandbox could be had."""
        problem = problem_with(arguments, self._schema.parameters)
        if problem is not None:
            return ToolResult(text=problem, error_cause="bad_arguments")
        result = await self._program_runner.run_program(arguments["code"])
        cause, ending = cause_of(result)
        output = (result.stdout + result.stderr).decode("utf-8", "replace").rstrip("\n")
        lines = [text for text in (output, ending) if text]
        return ToolResult(text="\n".join(lines) or NO_OUTPUT, error_cause=cause, queue_s=result.queue_s, run_s=result.run_s)

    async def close(self) -> None:
        """The runner belongs to who made it."""


def cause_of(result: CommandResult) -> tuple[str | None, str]:
    """Why a program failed, for counting (None: it did not), and the line that tells the policy."""
    if result.killed_by in ENDINGS:
        cause, words = ENDINGS[result.killed_by]
        return cause, f"Error: {words} after {result.run_s:.1f} s" if cause in ("timeout", "cpu_time") else f"Error: {words}"
    if result.killed_by is not None:
        return "signal", f"Error: the program was ended by {result.killed_by.replace(':', ' ')}"
    if result.exit_code == 0:
        return None, ""
    last_line = result.stderr.rstrip().rpartition(b"\n")[2]
    if last_line.startswith(b"MemoryError"):
        return "memory", ""
    if result.exit_code == 1 and last_line:
        return "exception", ""
    return "exit_code", f"Error: exit code {result.exit_code}"
