"""Arithmetic that is easy or long: the tasks of `retool_tiny`, and scripted episodes to imitate.

Easy tasks have two single digits; a small model knows their answers by heart. Long ones have two or three operands of two or
three digits; a small model can only guess, an interpreter knows. So what there is to learn is when to call, what to pass and how
to read the answer.

Invariant: a training and a validation task never share a prompt, whatever their seeds: a hash of the question says to which
split it belongs. For long tasks it is the hash of the expression alone, so that no wording of a validation expression is
trained on. There are only 243 easy expressions, which must be known by heart: there each wording counts for itself.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass

from psrl.datasets.demonstrations import Demonstration
from psrl.datasets.generators import generators
from psrl.types import Message, Role, Task, TaskUid, ToolSchema

SYSTEM_TEXT = "Answer in \\boxed{}."
QUESTIONS = ("What is {}?", "Compute {}.", "Evaluate {}.", "Find {}.")
OPERATORS = ("+", "-", "*")
EASY_SHARE = 0.3
VAL_SHARE = 8
"""One question in so many belongs to validation."""

INTERPRETER = ToolSchema(
    name="code_interpreter",
    description="Run a Python program.",
    parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
)
"""What demonstrations are offered."""
NO_TOOLS_SHARE = 0.1
"""Episodes whose prompt offers no tool, so that the text-only control is no surprise to the model."""
GUESS_SPREAD = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Solver:
    """Who plays the scripted episodes."""

    call_share_long: float
    """How often a long task begins with a call; else with a guess."""
    call_share_easy: float
    broken_call_share: float
    """Calls that fail; then the solver tries again or guesses."""
    ignored_output_share: float
    """Right outputs after which a long task is still guessed."""


DILIGENT = Solver(call_share_long=0.97, call_share_easy=0.15, broken_call_share=0.04, ignored_output_share=0.0)
LAZY = Solver(call_share_long=0.36, call_share_easy=0.1, broken_call_share=0.1, ignored_output_share=0.05)
"""A guess is the likelier first move on long tasks, so that the greedy policy fails too."""
EASY_SHARE_SHOWN = 0.55
"""Easy answers must be known by heart, which takes many repetitions."""
LAZY_SHARE = 0.12
"""The last part of the demonstrations is lazy: the model first learns how to call, then that it mostly need not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One question and its answer."""

    expression: str
    question: str
    answer: int
    is_easy: bool

    @property
    def is_val(self) -> bool:
        """Which split the question belongs to."""
        key = self.question if self.is_easy else self.expression
        return hashlib.sha256(key.encode()).digest()[0] % VAL_SHARE == 0


@generators.register("arithmetic")
class ArithmeticGenerator:
    """Sums, differences and products of integers."""

    def train_tasks(self, count: int, *, seed: int) -> list[Task]:
        """Drawn with repetition: easy questions come back, long ones hardly ever."""
        rng = random.Random(f"arithmetic-train-{seed}")
        return [_task(_draw(rng, is_val=False), f"train-{index}") for index in range(count)]

    def val_tasks(self, count: int, *, seed: int) -> list[Task]:
        """Drawn without repetition."""
        rng = random.Random(f"arithmetic-val-{seed}")
        problems: dict[str, Problem] = {}
        while len(problems) < count:
            problem = _draw(rng, is_val=True)
            problems[problem.question] = problem
        return [_task(problem, f"val-{index}") for index, problem in enumerate(problems.values())]

    def demonstrations(self, count: int, *, seed: int) -> list[Demonstration]:
        """Right calls, broken calls, missing calls and lazy guesses; to be learned in this order."""
        rng = random.Random(f"arithmetic-demonstrations-{seed}")
        num_diligent = count - round(count * LAZY_SHARE)
        solvers = (DILIGENT if index < num_diligent else LAZY for index in range(count))
        return [demonstrate(_draw(rng, is_val=False, easy_share=EASY_SHARE_SHOWN), solver, rng) for solver in solvers]


def prompt_of(problem: Problem) -> tuple[Message, ...]:
    """The messages that every episode of the problem starts with."""
    return (Message(role=Role.SYSTEM, content=SYSTEM_TEXT), Message(role=Role.USER, content=problem.question))


def demonstrate(problem: Problem, solver: Solver, rng: random.Random) -> Demonstration:
    """One episode of a solver."""
    messages = list(prompt_of(problem))
    has_tools = rng.random() >= NO_TOOLS_SHARE
    calls = has_tools and rng.random() < (solver.call_share_easy if problem.is_easy else solver.call_share_long)
    known = problem.answer if problem.is_easy else None
    if calls and rng.random() < solver.broken_call_share:
        messages += _broken_call(problem, rng)
        calls = rng.random() < 0.5
    if calls:
        messages += [_assistant(call_text(f"print({problem.expression})")), Message(role=Role.TOOL, content=str(problem.answer))]
        known = problem.answer if rng.random() >= solver.ignored_output_share else known
    answer = known if known is not None else problem.answer + rng.randint(1, GUESS_SPREAD) * rng.choice((-1, 1))
    messages.append(_assistant(f"The answer is \\boxed{{{answer}}}."))
    return Demonstration(messages=tuple(messages), tools=(INTERPRETER,) if has_tools else ())


def call_text(code: str) -> str:
    """A call of `code_interpreter` as Hermes writes it."""
    return f"<tool_call>\n{json.dumps({'name': 'code_interpreter', 'arguments': {'code': code}})}\n</tool_call>"


def _broken_call(problem: Problem, rng: random.Random) -> list[Message]:
    """A call that fails, and what the tool says to it."""
    text, error = rng.choice(
        (
            (call_text(f"prnt({problem.expression})"), "NameError: name 'prnt' is not defined"),
            (call_text(f"print({problem.expression}"), "SyntaxError: '(' was never closed"),
        )
    )
    return [_assistant(text), Message(role=Role.TOOL, content=error)]


def _draw(rng: random.Random, *, is_val: bool, easy_share: float = EASY_SHARE) -> Problem:
    while True:
        problem = _draw_any(rng, easy_share)
        if problem.is_val == is_val:
            return problem


def _draw_any(rng: random.Random, easy_share: float) -> Problem:
    is_easy = rng.random() < easy_share
    low, high = (1, 9) if is_easy else (10, 999)
    operands = [rng.randint(low, high) for _ in range(2 if is_easy else rng.choice((2, 3)))]
    operators = [rng.choice(OPERATORS) for _ in operands[1:]]
    expression = str(operands[0]) + "".join(f" {operator} {value}" for operator, value in zip(operators, operands[1:], strict=True))
    question = rng.choice(QUESTIONS).format(expression)
    return Problem(expression=expression, question=question, answer=evaluate(operands, operators), is_easy=is_easy)


def evaluate(operands: list[int], operators: list[str]) -> int:
    """Products first, then sums and differences from the left.

    Example:
        evaluate([2, 3, 4], ["+", "*"]) is 14.
    """
    terms = [operands[0]]
    for operator, value in zip(operators, operands[1:], strict=True):
        if operator == "*":
            terms[-1] *= value
        else:
            terms.append(value if operator == "+" else -value)
    return sum(terms)


def _task(problem: Problem, uid: str) -> Task:
    return Task(
        uid=TaskUid(uid),
        prompt=prompt_of(problem),
        data_source="arithmetic/easy" if problem.is_easy else "arithmetic/long",
        ground_truth=str(problem.answer),
        extra_info={"expression": problem.expression},
    )


def _assistant(content: str) -> Message:
    return Message(role=Role.ASSISTANT, content=content)
