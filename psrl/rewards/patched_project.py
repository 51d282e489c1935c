"""A patch put on the project of a sandbox, and what it may not change of the tests put back.

Invariant: no line that the patch brought has run when these end. What git says of the applied patch is held to the rules of the patch's
text; which file is put back is said by `psrl.swe.hygiene`, and by what is installed in the sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from psrl.errors import EnvironmentFault, RewardError
from psrl.protocols import Sandbox
from psrl.swe.hygiene import (
    SHADOWS,
    configures,
    folders_of_tests,
    is_mixed,
    is_named_as_test,
    is_same_test_configuration,
    is_test_path,
    module_at,
)
from psrl.swe.patch import Change, CheckedPatch, PatchRefusedError, changes_of, encoded
from psrl.swe.project import GIT_ENVIRONMENT
from psrl.swe.pytest_settings import READ_SCRIPT, PytestSettings, files_to_read, read_files, settings_of
from psrl.swe.suite_run import files_of_tests, targets_of
from psrl.swe.verdict import GradeCause
from psrl.types import CommandResult, SandboxLimits, SweProblem

COMMAND_WALL_S = 60.0
"""Of one command of git; a row's own limit is of its tests."""
MAX_LISTING_BYTES = 4 * 2**20
GIT = "git -c core.hooksPath=/dev/null -c core.attributesFile=/dev/null -c core.quotePath=true"
APPLY_SCRIPT = f"""
{GIT} apply --index --whitespace=nowarn - || exit 3
exec {GIT} diff --cached --raw -z --no-renames --no-ext-diff --abbrev=40 "$1"
"""
RESTORE_SCRIPT = f"""
set -e
export GIT_LITERAL_PATHSPECS=1
base=$1; count=$2; shift 2
if [ "$count" -gt 0 ]; then
  {GIT} rm -r -q -f -- "${{@:1:$count}}"
fi
shift "$count"
if [ "$#" -gt 0 ]; then
  {GIT} checkout -q "$base" -- "$@"
fi
"""
INSTALLED_SCRIPT = """
program=$1; shift
cd /
for python in "$(command -v python3)" "$(command -v python)" /opt/miniconda3/envs/testbed/bin/python; do
  if [ -x "$python" ]; then "$python" -I -B -c "$program" "$@" || exit 4; fi
done
"""
"""Each Python that the tests may run in, SWE-bench's conda environment among them, is asked outside of the project."""
INSTALLED = """
import importlib.util, json, os, sys
root = os.path.realpath(sys.argv[1])
inside = lambda path: (os.path.realpath(os.path.join(root, path)) + "/").startswith(root + "/")
path = [entry for entry in dict(os.environ).get("PYTHONPATH", "").split(":") if entry]
sys.path[:] = [entry for entry in path + sys.path if not inside(entry)]
def is_installed(name):
    try:
        spec = importlib.util.find_spec(name)
    except (ValueError, ImportError):
        return True
    if spec is None:
        return False
    places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    return any(not os.path.isabs(place) or not inside(place) for place in places)
print(json.dumps([name for name in sys.argv[2:] if is_installed(name)]))
"""
LIMITS_MET = (
    ": No space left on device", "] No space left on device", ": Disk quota exceeded", ": Cannot allocate memory",
    "unable to write new index file",
)  # fmt: skip
"""How lines end where the place is at fault, and not the patch if it does not swell; no name in a patch stands at an end."""
OUT_OF_MEMORY = "fatal: Out of memory"
SWELLING = ("GIT binary patch", "copy from ")
"""Parts of a diff that make more than they hold."""


class PlaceFullError(EnvironmentFault):
    """A command of the grading had no room left; the row's fault, or that of a patch that swells."""


async def apply_patch(sandbox: Sandbox, patch: CheckedPatch, base: str, limits: SandboxLimits) -> tuple[Change, ...]:
    """What the patch changed, as git says it.

    Raises:
        PatchRefusedError: It does not apply, changes nothing, makes what no patch may make, or swells beyond the sandbox's limits.
        RewardError: The limits of the sandbox ended it, which says nothing of a patch that does not swell.
    """
    limits = command_limits(limits, MAX_LISTING_BYTES)
    ended = await sandbox.run(["bash", "-c", APPLY_SCRIPT, "apply", base], stdin=patch.content, env=GIT_ENVIRONMENT, limits=limits)
    said = words_of(ended.stderr)
    if ended.killed_by is not None or _meets_limits(said):
        why = ended.killed_by or said
        if swells(patch) and ended.killed_by not in ("wall_time", "cpu_time"):
            raise PatchRefusedError(GradeCause.TOO_LARGE, f"it cannot be applied within the limits ({why})")
        fix = "raise reward.execution.disk_mb or memory_mb, or give the machine less to do"
        raise RewardError(f"the patch could not be applied within the limits of the sandbox ({why}). Fix: {fix}")
    if ended.exit_code == 3:
        raise PatchRefusedError(GradeCause.INVALID_PATCH, f"git apply: {said}")
    if ended.dropped_output_bytes:
        raise PatchRefusedError(GradeCause.TOO_LARGE, "the list of what it changes is too long")
    changes = changes_of(needed(ended, "asking git what the patch changed").stdout)
    if not changes:
        raise PatchRefusedError(GradeCause.EMPTY_PATCH, "it changes nothing")
    return changes


async def put_back(sandbox: Sandbox, problem: SweProblem, base: str, changes: Sequence[Change], limits: SandboxLimits) -> frozenset[str]:
    """Put back what says how tests are found, run and told; the paths that were."""
    required = [path for name in (*problem.fail_to_pass, *problem.pass_to_pass) if is_named_as_test(path := name.partition("::")[0])]
    tests = files_of_tests(problem)
    tests = (*tests, *required, *folders_of_tests((*tests, *required)))
    chosen = [change for change in changes if is_test_path(change.path, tests) or configures(change.path)]
    for change in changes:
        if change not in chosen and is_mixed(change.path) and not await _says_the_same(sandbox, base, change, limits):
            chosen.append(change)
    await _restore(sandbox, base, chosen, limits)
    shadows = await _shadows(sandbox, problem, base, [change for change in changes if change not in chosen and change.is_new], limits)
    await _restore(sandbox, base, shadows, limits)
    return frozenset(change.path for change in (*chosen, *shadows))


async def apply_test_patch(sandbox: Sandbox, problem: SweProblem, limits: SandboxLimits) -> None:
    """The row's own patch of its tests.

    Raises:
        EnvironmentFault: It does not apply, or is no text.
    """
    if not problem.test_patch.strip():
        return
    what = f"applying the test patch of {problem.instance_id}"
    try:
        content = encoded(problem.test_patch)
    except PatchRefusedError as error:
        raise EnvironmentFault(f"{what} failed: {error}") from error
    argv = ["bash", "-c", f"{GIT} apply --whitespace=nowarn -"]
    needed(await sandbox.run(argv, stdin=content, env=GIT_ENVIRONMENT, limits=command_limits(limits)), what)


async def pytest_settings(
    sandbox: Sandbox, problem: SweProblem, targets: Sequence[str], limits: SandboxLimits
) -> tuple[PytestSettings, tuple[str, ...]]:
    """(what pytest is told beside the project's own settings, folders of PYTHONPATH below the project)."""
    order = files_to_read(problem.workdir, targets)
    ended = await sandbox.run(["bash", "-c", READ_SCRIPT, "read", *order], limits=command_limits(limits, MAX_LISTING_BYTES))
    python_path, files = read_files(needed(ended, "reading pytest's settings").stdout)
    entries = [entry if entry.startswith("/") else f"{problem.workdir}/{entry}" for entry in python_path.split(":") if entry]
    return settings_of(order, files), tuple(entry for entry in entries if entry.startswith(problem.workdir + "/"))


async def _restore(sandbox: Sandbox, base: str, chosen: Sequence[Change], limits: SandboxLimits) -> None:
    if chosen:
        made = [change.path for change in chosen if change.is_new]
        changed = [change.path for change in chosen if not change.is_new]
        argv = ["bash", "-c", RESTORE_SCRIPT, "restore", base, str(len(made)), *made, *changed]
        needed(await sandbox.run(argv, env=GIT_ENVIRONMENT, limits=command_limits(limits)), "putting the tests back")


async def _shadows(sandbox: Sandbox, problem: SweProblem, base: str, made: Sequence[Change], limits: SandboxLimits) -> list[Change]:
    """New modules that would be imported in place of Python's, pytest's or an installed one; not where the project has one of the name."""
    made = [change for change in made if change.path.endswith((".py", ".so", ".pyd"))]
    if not made:
        return []
    required = (*problem.fail_to_pass, *problem.pass_to_pass)
    settings, entries = await pytest_settings(sandbox, problem, targets_of(problem, required), limits)
    below = [entry.removeprefix(problem.workdir + "/").strip("/") for entry in (*settings.pythonpath, *entries)]
    roots = ("", *dict.fromkeys(root for root in below if root and not root.startswith("/")))
    found = [(change, *module, root) for root in roots for change in made if (module := module_at(change.path, root)) is not None]
    names = sorted({name for _, name, _, _ in found} - SHADOWS)
    installed = SHADOWS | (await _installed(sandbox, problem, names, limits) if names else set())
    present = await _modules_of_base(sandbox, base, sorted({root for *_, root in found}), limits)
    shadows = {change.path: change for change, name, _, root in found if name in installed and (root, name) not in present}
    return list(shadows.values())


async def _installed(sandbox: Sandbox, problem: SweProblem, names: Sequence[str], limits: SandboxLimits) -> set[str]:
    argv = ["bash", "-c", INSTALLED_SCRIPT, "installed", INSTALLED, problem.workdir, *names]
    ended = needed(await sandbox.run(argv, limits=command_limits(limits, MAX_LISTING_BYTES)), "asking what is installed")
    return {name for line in ended.stdout.decode().splitlines() for name in json.loads(line)}


async def _modules_of_base(sandbox: Sandbox, base: str, roots: Sequence[str], limits: SandboxLimits) -> set[tuple[str, str]]:
    """(folder, name) of each module that the project has itself in one of the folders."""
    present = set()
    for root in roots:
        argv = ["git", "ls-tree", "-z", base, *([f"{root}/"] if root else [])]
        ended = await sandbox.run(argv, env=GIT_ENVIRONMENT, limits=command_limits(limits, MAX_LISTING_BYTES))
        for line in needed(ended, "listing the project").stdout.decode("utf-8", "replace").split("\0"):
            meta, _, path = line.partition("\t")
            module = module_at(path + "/" if " tree " in meta else path, root) if path else None
            present |= {(root, module[0])} if module is not None else set()
    return present


async def _says_the_same(sandbox: Sandbox, base: str, change: Change, limits: SandboxLimits) -> bool:
    limits = command_limits(limits, MAX_LISTING_BYTES)
    argv = ["git", "cat-file", "blob", f"{base}:{change.path}"]
    before = b"" if change.is_new else (await sandbox.run(argv, env=GIT_ENVIRONMENT, limits=limits)).stdout
    argv = ["git", "cat-file", "blob", f":{change.path}"]
    after = b"" if change.mode == "000000" else (await sandbox.run(argv, env=GIT_ENVIRONMENT, limits=limits)).stdout
    return is_same_test_configuration(change.path, before, after)


def command_limits(limits: SandboxLimits, output_bytes: int = 64 * 1024) -> SandboxLimits:
    """Of one short command in the grading sandbox."""
    return replace(limits, wall_s=COMMAND_WALL_S, cpu_s=COMMAND_WALL_S, output_bytes=output_bytes)


def needed(ended: CommandResult, what: str) -> CommandResult:
    """A command that cannot fail for the patch's sake.

    Raises:
        EnvironmentFault: It did. PlaceFullError: for want of room.
    """
    if ended.exit_code != 0:
        said = words_of(ended.stderr + ended.stdout)
        fault = PlaceFullError if ended.killed_by == "disk" or _meets_limits(said) else EnvironmentFault
        raise fault(f"{what} failed ({ended.killed_by or f'exit code {ended.exit_code}'}): {said or 'no output'}")
    return ended


def swells(patch: CheckedPatch) -> bool:
    """Whether a patch may make more than it holds, as binary data and copies do."""
    return any(part.encode() in patch.content for part in SWELLING)


def _meets_limits(said: str) -> bool:
    return any(line.endswith(LIMITS_MET) or line.startswith(OUT_OF_MEMORY) for line in said.splitlines())


def words_of(output: bytes) -> str:
    """The end of an output, for people."""
    return output.decode("utf-8", "replace").strip()[-500:]
