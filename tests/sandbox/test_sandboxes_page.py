"""docs/sandboxes.md says what the settings are."""

import re
from dataclasses import fields
from pathlib import Path

from psrl.config.ranges import CHOICES
from psrl.config.sandbox import SandboxConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sandboxes.md").read_text()


def settings_on_the_page():
    """Default as written, by name of the setting; a row may hold several."""
    found = {}
    for names, defaults in re.findall(r"^\| (`sandbox\.[^|]*) \| ([^|]*) \|", PAGE, re.MULTILINE):
        keys = [name.removeprefix("sandbox.") for name in re.findall(r"`([\w.]+)`", names)]
        values = [value.strip() for value in defaults.split(",")]
        found |= dict(zip(keys, values, strict=True)) if len(keys) == len(values) else {}
    return found


def as_written(value):
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"
    return {None: "null", False: "false"}.get(value, str(value)) if not isinstance(value, list) else str(value)


def test_every_setting_is_on_the_page_with_its_default():
    defaults = SandboxConfig()
    expected = {field.name: as_written(getattr(defaults, field.name)) for field in fields(SandboxConfig) if field.name != "backend"}
    found = settings_on_the_page()
    found.pop("backend", None)
    assert found == expected


def test_every_backend_is_on_the_page():
    for backend in CHOICES["sandbox.backend"]:
        assert re.search(rf"^\| `{backend}`", PAGE, re.MULTILINE), backend


def test_every_limit_that_ends_a_program_is_named():
    source = "".join((ROOT / "psrl" / "sandbox" / name).read_text() for name in ("guest.py", "docker_sandbox.py"))
    named = set(re.findall(r'return "(\w+)"', source)) | set(re.findall(r'"why": "(\w+)"', source)) | {"cpu_time"}
    assert named >= {"wall_time", "output", "processes", "memory", "disk"}
    assert [name for name in sorted(named) if f"`{name}`" not in PAGE] == []
