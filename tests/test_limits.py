"""STYLE.md's limits, held by machine."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "psrl"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
FORBIDDEN_FOLDERS = {"utils", "common", "misc", "helpers", "experimental", "deprecated"}
FORBIDDEN_CLASS_NAMES = re.compile(r"(Manager|Handler|Helper|Util|Utils)$")
MIN_FUNCTION_DOCSTRINGS = 0.9

# Boundaries where everything must be caught, each with its reason.
BROAD_EXCEPT_ALLOWED: dict[str, str] = {
    "psrl/agent_loops/base.py": "an episode ends in an outcome whatever the environment or loop raised",
    "psrl/agent_loops/agent_thread.py": "whatever an agent raises in its thread ends its episode, also sys.exit",
    "psrl/agent_loops/mini_swe_process.py": "a program of its own: whatever mini-swe-agent raises is how its episode ended",
    "psrl/data_plane/transfer_queue.py": "whatever a call raised in its thread is raised where it is waited for",
    "psrl/engines/vllm/worker_extension.py": "whatever vLLM's loaders raise, the old weights must be put back",
    "psrl/environments/check.py": "whatever an author's environment raises is a finding",
    "psrl/gateway/turns.py": "a turn that failed for any reason of psrl's own must not be judged as the agent's",
    "psrl/rewards/grading_worker.py": "runs the user's checker in its own process: whatever it raises is the answer",
    "psrl/runtime/doctor.py": "a check reports whatever its part raised, and the next one runs",
    "psrl/runtime/cluster.py": "Ray raises plain Exception when one of its processes does not come up",
    "psrl/sandbox/engine_threads.py": "whatever a call raised in its thread is raised where it is waited for",
    "psrl/swe/guest_compare.py": "whatever a patch's own equality raises when it is asked is no yes",
    "psrl/sandbox/guest_interpreter.py": "runs the model's program: whatever it raises is its output",
}
ENVIRONMENT_READ_ALLOWED: dict[str, str] = {}
FILES = sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent))


def functions_of(tree: ast.AST):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_and_functions_are_short(path):
    source = path.read_text()
    assert source.count("\n") <= MAX_FILE_LINES, f"{relative(path)} is longer than {MAX_FILE_LINES} lines"
    long = [
        f"{n.name}: {n.end_lineno - n.lineno + 1}"
        for n in functions_of(ast.parse(source))
        if n.end_lineno - n.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_names_and_folders_are_of_the_domain(path):
    assert not FORBIDDEN_FOLDERS & set(path.with_suffix("").parts)
    classes = [n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)]
    assert [name for name in classes if FORBIDDEN_CLASS_NAMES.search(name)] == []


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_broad_except_only_at_named_boundaries(path):
    if relative(path) in BROAD_EXCEPT_ALLOWED:
        return
    broad = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")))
    ]
    assert broad == [], f"{relative(path)}: broad except at lines {broad}; name the boundary in BROAD_EXCEPT_ALLOWED with its reason"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_environment_variables_are_read_in_config_only(path):
    if path.is_relative_to(PACKAGE / "config") or relative(path) in ENVIRONMENT_READ_ALLOWED:
        return
    reads = [
        f"line {node.lineno}"
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.getenv", "os.environ.get"))
        or (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == "os.environ")
    ]
    assert reads == []


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_docstrings_and_types_are_there(path):
    tree = ast.parse(path.read_text())
    if not tree.body:
        return
    assert ast.get_docstring(tree), f"{relative(path)} has no module docstring"
    public = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]
    assert [n.name for n in public if not ast.get_docstring(n)] == []
    untyped = [
        f"{fn.name}({arg.arg})"
        for fn in functions_of(tree)
        for arg in (*fn.args.posonlyargs, *fn.args.args, *fn.args.kwonlyargs)
        if arg.annotation is None and arg.arg not in ("self", "cls")
    ]
    assert untyped == []


def test_nine_public_functions_of_ten_have_docstrings():
    public = [
        (relative(path), fn)
        for path in FILES
        for owner in [ast.parse(path.read_text())]
        for body in [owner.body, *[c.body for c in owner.body if isinstance(c, ast.ClassDef) and not c.name.startswith("_")]]
        for fn in body
        if isinstance(fn, ast.FunctionDef | ast.AsyncFunctionDef) and not fn.name.startswith("_")
    ]
    missing = [f"{where}:{fn.name}" for where, fn in public if not ast.get_docstring(fn)]
    assert len(missing) <= (1 - MIN_FUNCTION_DOCSTRINGS) * len(public), missing


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_settings_are_never_read_with_a_default(path):
    """`.get(key, default)` and string `getattr` on settings hide typos."""
    settings = re.compile(r"\b(config|cfg|settings|section)\b")

    def hides_typos(call: ast.Call) -> bool:
        if isinstance(call.func, ast.Name) and call.func.id == "getattr":
            return bool(settings.search(ast.unparse(call.args[0])))
        is_get = isinstance(call.func, ast.Attribute) and call.func.attr == "get" and len(call.args) == 2
        return is_get and bool(settings.search(ast.unparse(call.func.value)))

    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    wrong = [f"line {call.lineno}: {ast.unparse(call)}" for call in calls if hides_typos(call)]
    assert wrong == []
