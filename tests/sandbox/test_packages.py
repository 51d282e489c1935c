"""`sandbox.packages`, and a project in a sandbox: git, Python and pytest inside."""

import asyncio
import secrets
import subprocess
import sys

import pytest

from psrl.config.sandbox import SandboxConfig
from psrl.errors import ConfigError
from psrl.sandbox import BackendSandboxes
from psrl.sandbox.packages import packages_of
from psrl.swe.project import prepare_project, take_patch
from psrl.types import SandboxLimits, SandboxSpec, SweProblem

RUN = f"packages_{secrets.token_hex(8)}"
LIMITS = SandboxLimits(wall_s=30.0, cpu_s=30.0, disk_bytes=32 * 2**20)
PROBLEM = SweProblem(
    instance_id="add-1",
    repo="add",
    task_kind="swe_tiny",
    statement="add subtracts",
    files={
        "conftest.py": "",
        "add.py": "def add(a, b):\n    return a - b\n",
        "tests/test_add.py": "from add import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n",
    },
    gold_patch="",
    test_paths=("tests",),
    fail_to_pass=("tests/test_add.py::test_add",),
)


@pytest.fixture(params=["bubblewrap", "docker"])
def backend(request):
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    return request.param


def with_sandbox(backend, use, **settings):
    async def play():
        sandboxes = BackendSandboxes(SandboxConfig(backend=backend, **settings), run=RUN)
        sandbox = sandboxes.make(SandboxSpec(workdir="/testbed", limits=LIMITS))
        try:
            await sandbox.start()
            return await use(sandbox)
        finally:
            await sandbox.stop()

    return asyncio.run(play())


def test_a_project_is_committed_tested_mended_and_its_patch_taken(backend):
    async def use(sandbox):
        async def shell(text, stdin=b""):
            return await sandbox.run(["bash", "-c", text], stdin=stdin)

        base = await prepare_project(sandbox, PROBLEM)
        before = await shell("python -m pytest -q 2>&1 | tail -1")
        await shell("sed -i 's/a - b/a + b/' add.py")
        after = await shell("pytest -q 2>&1 | tail -1")
        patch = await take_patch(sandbox, base, LIMITS)
        undone = await shell("git checkout -q HEAD add.py && git apply - && cat add.py; git status --porcelain", stdin=patch.encode())
        return base, before.stdout, after.stdout, patch, undone

    base, before, after, patch, undone = with_sandbox(backend, use, packages=["pytest"])
    assert len(base) == 40
    assert b"1 failed" in before
    assert b"1 passed" in after
    assert "-    return a - b\n+    return a + b\n" in patch
    assert "pycache" not in patch
    assert b"return a + b" in undone.stdout, undone


def test_git_works_without_any_settings_of_its_own(backend):
    script = (
        "git init -q . && echo one > a && git add a && git -c user.name=a -c user.email=a@b commit -q -m first && echo two >> a && "
        "git diff > /tmp/d && git checkout -q a && git apply /tmp/d && git log --oneline | wc -l && cat a"
    )
    result = with_sandbox(backend, lambda sandbox: sandbox.run(["bash", "-c", script]))
    assert result.stdout.split() == [b"1", b"one", b"two"], result.stderr


def test_python_is_one_interpreter_under_each_name(backend):
    show = "import sys; print(sys.version_info >= (3, 9), sys.version)"
    result = with_sandbox(backend, lambda sandbox: sandbox.run(["sh", "-c", f"python -c '{show}'; python3 -c '{show}'"]))
    first, second = result.stdout.splitlines()
    assert first == second
    assert first.startswith(b"True")


def test_programs_and_commands_import_a_package_and_cannot_change_it(backend):
    async def use(sandbox):
        program = await sandbox.run_program("import pluggy, iniconfig\nprint(pluggy.__file__)")
        return program, await sandbox.run(["sh", "-c", 'echo broken > "$(python -c "import pluggy; print(pluggy.__file__)")"'])

    program, change = with_sandbox(backend, use, packages=["pytest"])
    assert program.stdout == b"/opt/psrl/packages/pluggy/__init__.py\n"
    assert b"Read-only file system" in change.stderr or b"Permission denied" in change.stderr


def test_without_the_setting_nothing_of_this_environment_can_be_imported(backend):
    result = with_sandbox(backend, lambda sandbox: sandbox.run(["python", "-c", "import pluggy"]))
    assert result.exit_code == 1
    assert b"No module named 'pluggy'" in result.stderr


def test_a_process_has_the_packages_of_the_workers_own_python():
    async def use(sandbox):
        return await sandbox.run(["sh", "-c", "python -m pytest --version; python -c 'import sys; print(sys.prefix)'"])

    result = with_sandbox("process", use, packages=["pytest"])
    assert result.stdout.decode().split() == ["pytest", pytest.__version__, sys.prefix]


def test_a_distribution_comes_with_what_it_needs_as_pip_says():
    names = {name.split("-")[0].lower() for name, _ in packages_of(["pytest"]).entries if name.endswith(".dist-info")}
    shown = subprocess.run([sys.executable, "-m", "pip", "show", "pytest"], capture_output=True, text=True, check=True).stdout
    needed = next(line for line in shown.splitlines() if line.startswith("Requires:")).removeprefix("Requires:").split(",")
    assert names == {"pytest", *(name.strip() for name in needed)}
    assert "pytest" in dict(packages_of(["pytest"]).programs)


@pytest.mark.parametrize("backend", ["bubblewrap", "docker", "process"])
@pytest.mark.parametrize("name", ["no-such-distribution", "not a name", ""])
def test_what_is_not_installed_is_a_config_error_before_anything_starts(backend, name):
    with pytest.raises(ConfigError, match="is not installed here") as caught:
        BackendSandboxes(SandboxConfig(backend=backend, packages=[name]), run=RUN)
    assert caught.value.key == "sandbox.packages"
    assert caught.value.value == [name]


def test_an_editable_distribution_cannot_be_shown_elsewhere(tmp_path, monkeypatch):
    folder = tmp_path / "in_work-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: in-work\nVersion: 1\n")
    (folder / "RECORD").write_text("in_work.pth,,\nin_work-1.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="editable"):
        packages_of(["in-work"])
