"""A project in a sandbox: made ready before an episode and before grading, in the same way; and what was changed in it.

Invariant: after `prepare_project` the repository has one commit, made of what lies in `workdir`: no later (or earlier) history is there
to copy a mend from, and the same problem gives the same files everywhere.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Sequence
from dataclasses import replace

from psrl.errors import EnvironmentFault
from psrl.protocols import Sandbox
from psrl.types import CommandResult, SandboxLimits, SandboxSpec, SweProblem

GIT_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "psrl",
    "GIT_AUTHOR_EMAIL": "psrl@localhost",
    "GIT_AUTHOR_DATE": "2020-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "psrl",
    "GIT_COMMITTER_EMAIL": "psrl@localhost",
    "GIT_COMMITTER_DATE": "2020-01-01T00:00:00Z",
}
"""Fixed, so that the base commit of a problem has one id."""
MAX_PATCH_BYTES = 2 * 2**20
"""Of what `take_patch` reads; graders refuse less than that as too large."""
EXCLUDED = ("__pycache__/", "*.pyc", ".pytest_cache/")
"""What running the project leaves behind is no part of a patch."""
COMMIT_SCRIPT = """
set -e
rm -rf .git
git init -q --template= .
mkdir -p .git/info
printf '%s\\n' "$@" >> .git/info/exclude
git add -A
git commit -q --allow-empty --no-verify -m base
git rev-parse HEAD
"""
DIFF_SCRIPT = """
set -e
own=$(mktemp -d "$PWD/.git/psrl.XXXXXXXX")
trap 'rm -rf "$own"' EXIT
export HOME="$own" GIT_DIR="$own" GIT_ALTERNATE_OBJECT_DIRECTORIES="$PWD/.git/objects" GIT_WORK_TREE="$PWD"
base=$1; attributes=$2; shift 2
git init -q --template= >&2
mkdir -p "$own/info"
printf '%s\\n' "$@" > "$own/info/exclude"
printf '%s\\n' "$attributes" > "$own/info/attributes"
git read-tree "$base"
git add -A --ignore-errors >&2 || true
git diff --cached --binary --no-color --no-ext-diff --no-textconv --no-renames --ignore-submodules=all "$base"
"""
"""In a repository of its own beside the agent's, whose commit it borrows: settings, hooks, marks and locks that the agent, or a git that
was killed, left in the project's repository lose no mend. A repository inside the project is no part of a patch."""
GLOB_LETTERS, BACKSLASHED = r"([\\*?\[\]!# ])", r"\\\1"
AS_BINARY = "* -diff"
"""Git attributes: a diff in ASCII, whatever the files hold."""


def sandbox_spec(problem: SweProblem, limits: SandboxLimits) -> SandboxSpec:
    """The place that the problem is played and graded in; with the network where both `limits` and the problem say so."""
    limits = replace(limits, allow_network=limits.allow_network and problem.allow_network)
    return SandboxSpec(image=problem.image, workdir=problem.workdir, limits=limits)


async def prepare_project(sandbox: Sandbox, problem: SweProblem, *, is_for_agent: bool = False) -> str:
    """Put the project's files into a started sandbox, run its set-up, and commit it; the id of its one commit.

    What the problem hides is taken out where `is_for_agent`.

    Raises:
        EnvironmentFault: A command failed; says which, with its last output.
    """
    if problem.files:
        _ended_well(await sandbox.run(["tar", "-xf", "-"], stdin=archive_of(problem)), "unpacking the project's files")
    for command in problem.setup_commands:
        _ended_well(await sandbox.run(["bash", "-c", command]), f"set-up command {command!r:.200}")
    if is_for_agent and problem.hidden_paths:
        _ended_well(await sandbox.run(["rm", "-rf", "--", *problem.hidden_paths]), "taking hidden tests out")
    ended = await sandbox.run(["bash", "-c", COMMIT_SCRIPT, "commit", *EXCLUDED], env=GIT_ENVIRONMENT)
    return _ended_well(ended, "committing the project").stdout.decode().strip()


async def take_patch(sandbox: Sandbox, base: str, limits: SandboxLimits, *, hidden_paths: Sequence[str] = ()) -> str:
    """What differs from the commit `base`, files that git does not know yet included; empty where git cannot say.

    `limits` are the run's; what lies at `hidden_paths`, which are not in the commit, is left out. A patch that touches text which is no
    UTF-8 is one of binary files, so that it applies as it was taken.
    """
    limits = replace(limits, wall_s=60.0, cpu_s=60.0, output_bytes=MAX_PATCH_BYTES + MAX_PATCH_BYTES // 2)
    excluded = (*EXCLUDED, *(f"/{re.sub(GLOB_LETTERS, BACKSLASHED, path)}" for path in hidden_paths))
    for attributes in ("", AS_BINARY):
        ended = await sandbox.run(["bash", "-c", DIFF_SCRIPT, "diff", base, attributes, *excluded], env=GIT_ENVIRONMENT, limits=limits)
        if ended.exit_code != 0:
            return ""
        try:
            return ended.stdout.decode()
        except UnicodeDecodeError:
            continue
    return ""


def archive_of(problem: SweProblem) -> bytes:
    """`problem.files` as a tar; the same problem gives the same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, text in sorted(problem.files.items()):
            content = text.encode()
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _ended_well(ended: CommandResult, what: str) -> CommandResult:
    if ended.exit_code == 0:
        return ended
    why = ended.killed_by or f"exit code {ended.exit_code}"
    output = (ended.stdout + ended.stderr).decode("utf-8", "replace").strip()[-1000:]
    raise EnvironmentFault(f"{what} failed ({why}): {output or 'no output'}")
