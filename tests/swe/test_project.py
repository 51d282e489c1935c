"""A project in a sandbox: whatever state an agent leaves it in, a right mend is taken as a patch that grading applies."""

import asyncio
from dataclasses import replace

import pytest
from calc_project import PROBLEM

from psrl.config.reward import ExecutionConfig
from psrl.config.sandbox import SandboxConfig
from psrl.rewards.execution import ProjectGrader
from psrl.sandbox import BackendSandboxes, limits_of
from psrl.swe.project import prepare_project, sandbox_spec, take_patch

SETTINGS = SandboxConfig(packages=["pytest"])
LIMITS = limits_of(SETTINGS)
MEND = "sed -i 's/a - b/a + b/' calc.py"
LATIN = replace(PROBLEM, setup_commands=("printf '# coding: latin-1\\n# caf\\xe9\\n' | cat - calc.py > new && mv new calc.py",))
AUTHOR = "git -c user.name=a -c user.email=b"

# What is done after the mend.
LEFT = {
    "an empty repository inside": "git init -q sub",
    "a repository with a commit inside": f"git init -q sub && cd sub && touch a && git add a && {AUTHOR} commit -qm a",
    "the lock of a git that was killed": "touch .git/index.lock",
    "a file that cannot be read": "echo x > unreadable; chmod 000 unreadable",
    "a file of which git was told that it does not change": "git update-index --assume-unchanged calc.py",
    "a file of which git was told to leave it": "git update-index --skip-worktree calc.py",
    "a commit": f"{AUTHOR} commit -qam mended",
    "diffs without prefixes": "git config diff.noprefix true",
    "diffs with other prefixes": "git config diff.mnemonicPrefix true",
    "diffs without context": "git config diff.context 0; git config diff.relative sub; git config diff.ignoreSubmodules none",
    "a repository that says it is bare": "git config core.bare true",
    "a repository of another folder": "mkdir ../other; git config core.worktree /tmp",
    "a folder as the index": "rm .git/index; mkdir .git/index",
    "a filter that fails": "git config filter.x.clean false; git config filter.x.required 1; echo '* filter=x' > .git/info/attributes",
    "settings that git cannot read": "echo '[core' > .git/config",
    "no branch": "rm .git/HEAD",
}


HIDDEN = "tests/test_calc [a] #1*.py"
WITH_HIDDEN = replace(
    PROBLEM,
    files={**PROBLEM.files, HIDDEN: "def test_seen(): pass\n"},
    hidden_paths=(HIDDEN, "tests/test_calc.py"),
)


def played(commands, *, problem=PROBLEM, times=1):
    """The patches that are taken, one after the other."""

    async def run():
        sandbox = BackendSandboxes(SETTINGS).make(sandbox_spec(problem, LIMITS))
        try:
            await sandbox.start()
            base = await prepare_project(sandbox, problem, is_for_agent=True)
            for command in commands:
                ended = await sandbox.run(["bash", "-c", command])
                assert ended.exit_code == 0, ended
            return [await take_patch(sandbox, base, LIMITS, hidden_paths=problem.hidden_paths) for _ in range(times)]
        finally:
            await sandbox.stop()

    return asyncio.run(run())


def is_resolved(patch, problem=PROBLEM):
    async def run():
        grader = ProjectGrader(BackendSandboxes(SETTINGS), ExecutionConfig())
        try:
            return (await grader.grade(problem, patch)).is_resolved
        finally:
            await grader.close()

    return asyncio.run(run())


@pytest.mark.parametrize("left", LEFT)
def test_a_mend_is_taken_from_a_repository_in_any_state(left):
    (plain,) = played([MEND])
    assert played([MEND, LEFT[left]]) == [plain]


def test_a_mend_of_a_file_that_is_no_utf8_is_graded_as_it_was_made():
    first, second = played([MEND], problem=LATIN, times=2)
    assert first == second
    assert first.isascii()
    assert is_resolved(first, LATIN)


def test_a_file_of_bytes_comes_with_the_patch_and_text_stays_text():
    (patch,) = played([MEND, "printf '\\000\\377' > picture"])
    assert "+    return a + b" in patch
    assert "GIT binary patch" in patch
    assert is_resolved(patch)


def test_hidden_tests_are_not_there_for_the_agent_and_what_it_puts_in_their_place_is_no_part_of_its_patch():
    gone = 'test -d tests && [ -z "$(ls tests)" ] && ! git log --all -p | grep test_adds'
    (patch,) = played([gone, MEND, f"touch '{HIDDEN}' tests/test_calc.py 'tests/test_calc a #1.py'"], problem=WITH_HIDDEN)
    assert [line for line in patch.splitlines() if line.startswith("diff --git")] == [
        "diff --git a/calc.py b/calc.py",
        "diff --git a/tests/test_calc a #1.py b/tests/test_calc a #1.py",
    ]
    assert is_resolved(patch, WITH_HIDDEN)
