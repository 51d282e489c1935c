"""Scripted episodes on generated projects: what the shell would answer is computed from the files.

What an episode looks like is fixed by `psrl/recipes/swe_tiny/agent.yaml`; the constants here repeat it, and a test holds them together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from psrl.datasets.demonstrations import Demonstration
from psrl.datasets.generators.swe_projects.project import Case, Function, draw_function
from psrl.datasets.generators.swe_projects.shapes import SHAPES_BY_KIND
from psrl.types import Message, Role

SYSTEM_TEXT = "Mend the project by shell commands."
NUM_LINES_AFTER = 6
"""That `grep` shows after the one with `def`: enough for the longest function."""
SUBMIT = "$ echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SILENT = "exit 0"
"""What the observation template says of a command without output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Solver:
    """Who plays the scripted episodes."""

    read_share: float
    """How often the function is read first."""
    read_share_of_examples: float
    """The same, where the issue has an example."""
    give_up_share: float
    """Episodes without reading that submit at once; the others edit what they have not seen."""
    wrong_share: float
    """Episodes that read and then edit something else."""
    unmended_share: float
    """Episodes that read and then submit."""
    check_share: float
    """Episodes that read again after the edit."""


DILIGENT = Solver(read_share=0.97, read_share_of_examples=0.97, give_up_share=0.5, wrong_share=0.0, unmended_share=0.0, check_share=0.05)
LAZY = Solver(read_share=0.2, read_share_of_examples=0.65, give_up_share=0.6, wrong_share=0.04, unmended_share=0.04, check_share=0.02)
"""An example makes reading likelier than not, so that the greedy policy solves something."""


def prompt_of(statement: str) -> tuple[Message, ...]:
    """The messages that an episode starts with."""
    return (Message(role=Role.SYSTEM, content=SYSTEM_TEXT), Message(role=Role.USER, content=statement))


def demonstrate(case: Case, solver: Solver, rng: random.Random) -> Demonstration:
    """One episode of a solver."""
    messages = list(prompt_of(case.statement))

    def play(command: str, answer: str) -> None:
        messages.extend((Message(role=Role.ASSISTANT, content=command), Message(role=Role.USER, content=answer)))

    if rng.random() < (solver.read_share_of_examples if case.has_example else solver.read_share):
        play(read_command(case), shown(case.text(is_mended=False), case.bug.name))
        choice = rng.random()
        if choice < solver.wrong_share:
            play(edit_command(case.path, _guess(case, rng)), SILENT)
        elif choice >= solver.wrong_share + solver.unmended_share:
            play(edit_command(case.path, case.bug), SILENT)
            if rng.random() < solver.check_share:
                play(read_command(case), shown(case.text(is_mended=True), case.bug.name))
    elif rng.random() >= solver.give_up_share:
        play(edit_command(case.path, _guess(case, rng)), SILENT)
    return Demonstration(messages=(*messages, Message(role=Role.ASSISTANT, content=SUBMIT)))


def read_command(case: Case) -> str:
    """The turn that reads the function of the issue."""
    return f"$ grep -A{NUM_LINES_AFTER} 'def {case.bug.name}' {case.path}"


def edit_command(path: str, function: Function) -> str:
    """The turn that mends a function."""
    wrong, right = function.edit
    return f"$ sed -i 's/{_pattern(wrong)}/{right}/' {path}"


def shown(text: str, name: str) -> str:
    """What `read_command` prints."""
    lines = text.splitlines()
    first = next(index for index, line in enumerate(lines) if f"def {name}" in line)
    return "\n".join(lines[first : first + NUM_LINES_AFTER + 1]).rstrip()


def _pattern(piece: str) -> str:
    """A basic regular expression that matches the piece."""
    return piece.replace("[", r"\[").replace("*", r"\*")


def _guess(case: Case, rng: random.Random) -> Function:
    """A function that could have been there."""
    while True:
        guess = draw_function(rng, rng.choice(SHAPES_BY_KIND[case.bug.shape.kind]))
        if guess.edit[0] not in case.text(is_mended=False):
            return guess
