"""Imports point down the layers only: never up, never to a sibling folder of the same layer (docs/architecture.md)."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "psrl"
LAYERS = (
    ("types", "protocols", "errors", "registry", "telemetry"),
    ("config",),
    ("kernels",),
    ("chat", "staleness", "algorithms", "swe"),
    (
        "sandbox",
        "tools",
        "environments",
        "agent_data",
        "rewards",
        "datasets",
        "engine_client",
        "session_client",
        "data_plane",
        "parameter_server",
        "processes",
        "simulation",
    ),
    ("engines", "gateway", "agent_loops", "sandbox_server", "training"),
    ("runtime",),
    ("cli", "recipes"),
    ("__main__",),
)
LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names}
# Layer 0 is ordered inside: errors <- types <- protocols, telemetry.
SIBLINGS_ALLOWED = {
    ("types", "errors"),
    ("registry", "errors"),
    ("telemetry", "registry"),
    ("protocols", "types"),
    ("protocols", "errors"),
    ("telemetry", "types"),
    ("telemetry", "errors"),
    ("telemetry", "protocols"),
}
RAY_ALLOWED = {"runtime"}
TRANSFER_QUEUE_ALLOWED = {"data_plane", "runtime"}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def violations_of(path: Path) -> list[str]:
    part = part_of(path)
    wrong = []
    for line, name in imports_of(path):
        words = name.split(".")
        where = f"{path.relative_to(PACKAGE.parent)}:{line}: {part} imports {name}"
        if words[0] == "ray" and part not in RAY_ALLOWED:
            wrong.append(f"{where}: only runtime imports ray")
        if words[0] == "transfer_queue" and part not in TRANSFER_QUEUE_ALLOWED:
            wrong.append(f"{where}: only data_plane and runtime import transfer_queue")
        if words[0] in ("torch", "ray") and part == "config":
            wrong.append(f"{where}: config imports neither torch nor ray")
        if words[0] == "hydra" and path != PACKAGE / "config" / "load.py":
            wrong.append(f"{where}: only config/load.py imports hydra")
        if words[0] != "psrl" or words[1:2] in ([], ["__version__"]):
            continue
        other = words[1]
        if other == part or part == "__init__":
            continue
        if other not in LAYER_OF:
            wrong.append(f"{where}: {other} is in no layer")
        elif LAYER_OF[other] > LAYER_OF[part]:
            wrong.append(f"{where}: points up")
        elif LAYER_OF[other] == LAYER_OF[part] and (part, other) not in SIBLINGS_ALLOWED:
            wrong.append(f"{where}: sibling of the same layer")
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_only(path):
    assert violations_of(path) == []


def test_every_folder_belongs_to_a_layer():
    parts = {part_of(path) for path in FILES} - {"__init__"}
    assert parts <= set(LAYER_OF), f"in no layer: {sorted(parts - set(LAYER_OF))}"


def test_an_import_inside_a_function_that_points_up_is_found(tmp_path, monkeypatch):
    bad = tmp_path / "psrl" / "chat" / "bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text("def f():\n    from psrl.runtime import build\n    import ray\n    from psrl.algorithms import kl\n")
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "psrl")
    found = violations_of(bad)
    assert [line.rsplit(": ", 1)[1] for line in found] == ["points up", "only runtime imports ray", "sibling of the same layer"]
