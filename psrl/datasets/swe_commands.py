"""How the tests of a repository are run where its row does not say so: SWE-bench's eighteen Python repositories.

The facts (commands, parsers, what must be installed again after a patch) are those of the `swebench` package, version 4, the last one
that held them; since version 5 rows carry a script of their own, which `command_of_script` reads instead.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ACTIVATE = ("source /opt/miniconda3/bin/activate", "conda activate testbed", "cd /testbed")
"""Every image of SWE-bench, SWE-Gym and SWE-smith keeps the project's Python in this environment."""
PYTEST = "pytest -rA"
INSTALL = "python -m pip install -e ."
UTF8 = ("export LANG=en_US.UTF-8", "export LC_ALL=en_US.UTF-8", "export PYTHONIOENCODING=utf8", "export LANGUAGE=en_US:en")
GENERATED_UTF8 = (
    "sed -i '/en_US.UTF-8/s/^# //g' /etc/locale.gen && locale-gen",
    "export LANG=en_US.UTF-8",
    "export LANGUAGE=en_US:en",
    "export LC_ALL=en_US.UTF-8",
)
NO_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
"""Endings of files of a test patch that are no tests."""
START_MARKER, END_MARKER = ">>>>> Start Test Output", ">>>>> End Test Output"
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")


@dataclass(frozen=True, kw_only=True, slots=True)
class RepoTests:
    """How one version of a repository is tested in its image."""

    command: str = PYTEST
    parser: str
    install: str = INSTALL
    """Run before the tests: some of these projects are tested as installed, not as they lie there."""
    before: tuple[str, ...] = ()


def _django(version: str) -> RepoTests:
    settings = "" if version == "1.9" else " --settings=test_sqlite --parallel 1"
    number = _number(version)
    before: tuple[str, ...] = UTF8 if (1, 7) <= number <= (2, 2) else GENERATED_UTF8 if (3, 0) <= number <= (3, 2) else ()
    install = "python setup.py install" if number < (3, 0) else INSTALL
    return RepoTests(command=f"./tests/runtests.py --verbosity 2{settings}", parser="parse_log_django", install=install, before=before)


def _matplotlib(version: str) -> RepoTests:
    number = _number(version)
    if number < (3, 0):
        install = "python setup.py build; python setup.py install"
    else:
        install = INSTALL if number < (3, 8) else 'python -m pip install --no-build-isolation -e ".[dev]"'
    return RepoTests(parser="parse_log_matplotlib", install=install)


def _astropy(version: str) -> RepoTests:
    is_old = version.startswith(("0.", "1."))
    command = "pytest -rA -vv -o console_output_style=classic --tb=no" if is_old else PYTEST
    return RepoTests(command=command, parser="parse_log_astropy", install="python -m pip install -e .[test] --verbose")


def _seaborn(version: str) -> RepoTests:
    install = INSTALL if _number(version) < (0, 12) else "python -m pip install -e .[dev]"
    return RepoTests(command="pytest --no-header -rA", parser="parse_log_seaborn", install=install)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


_SKLEARN = RepoTests(parser="parse_log_scikit", install="python -m pip install -v --no-use-pep517 --no-build-isolation -e .")
_SPHINX = RepoTests(command="tox --current-env -epy39 -v --", parser="parse_log_sphinx", install="python -m pip install -e .[test]")
_SYMPY = RepoTests(
    command="PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
    parser="parse_log_sympy",
)
REPOS: dict[str, RepoTests | Callable[[str], RepoTests]] = {
    "astropy/astropy": _astropy,
    "django/django": _django,
    "marshmallow-code/marshmallow": RepoTests(parser="parse_log_marshmallow", install="python -m pip install -e '.[dev]'"),
    "matplotlib/matplotlib": _matplotlib,
    "mwaskom/seaborn": _seaborn,
    "pallets/flask": RepoTests(parser="parse_log_flask"),
    "psf/requests": RepoTests(parser="parse_log_requests", install="python -m pip install ."),
    "pvlib/pvlib-python": RepoTests(parser="parse_log_pvlib", install="python -m pip install -e .[all]"),
    "pydata/xarray": RepoTests(parser="parse_log_xarray"),
    "pydicom/pydicom": RepoTests(parser="parse_log_pydicom"),
    "pylint-dev/astroid": RepoTests(parser="parse_log_astroid"),
    "pylint-dev/pylint": RepoTests(parser="parse_log_pylint"),
    "pytest-dev/pytest": RepoTests(parser="parse_log_pytest"),
    "pyvista/pyvista": RepoTests(parser="parse_log_pyvista"),
    "scikit-learn/scikit-learn": _SKLEARN,
    "sphinx-doc/sphinx": _SPHINX,
    "sqlfluff/sqlfluff": RepoTests(parser="parse_log_sqlfluff"),
    "sympy/sympy": _SYMPY,
}


def repo_tests(repo: str, version: str) -> RepoTests | None:
    """How a repository of SWE-bench is tested; None where that is not known."""
    known = REPOS.get(repo)
    if known is None or not _number(version):
        return None
    return known(version) if callable(known) else known


def command_of_repo(tests: RepoTests, repo: str, test_files: Sequence[str]) -> str:
    """The shell command that tests `test_files` (of the test patch) as SWE-bench does."""
    named = [path for path in test_files if not path.endswith(NO_TESTS)]
    if repo == "django/django":
        named = [path.removesuffix(".py").removeprefix("tests/").replace("/", ".") for path in named]
    return shell_command([*ACTIVATE, *tests.before, tests.install], " ".join([tests.command, *map(shlex.quote, named)]))


def command_of_script(script: str) -> str | None:
    """The shell command inside a row's `eval_script`; None where it does not mark its tests.

    What it does with git is left out: tests are put back and patched by psrl, and there is no history to take them from.
    """
    before: list[str] = []
    tests: list[str] = []
    chosen = before
    lines = iter(script.splitlines())
    for line in lines:
        if START_MARKER in line:
            chosen = tests
        elif END_MARKER in line:
            break
        elif line.startswith(("#!", "set -")):
            continue
        else:
            whole = [line]
            if found := _HEREDOC.search(line):
                for inner in lines:
                    whole.append(inner)
                    if inner.strip() == found[2]:
                        break
            if not line.lstrip().startswith("git "):
                chosen += whole
    if not "".join(tests).strip():
        return None
    return shell_command(before, "\n".join(tests))


def shell_command(before: Sequence[str], tests: str) -> str:
    """`tests` after `before`, whose output is dropped; both streams of the tests are one, in the order in which they were written."""
    return "\n".join(["{", *before, "} > /dev/null 2>&1", "{", tests, "} 2>&1"])
