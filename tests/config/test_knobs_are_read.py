"""No dead knob: every setting is read somewhere outside of config/."""

import ast
from pathlib import Path

from psrl.config.fields import leaves_of
from psrl.config.tree import Config

PACKAGE = Path(__file__).parent.parent.parent / "psrl"
REFUSED_UNLESS_DEFAULT = {
    "data.return_raw_chat": "verl's switch, kept for its users' files: false is refused",
    "psrl.ps_mode": "has one choice in this version",
}
"""Settings of which only one value passes the checks, so that nothing can depend on them."""


def attributes_read() -> set[str]:
    """Names read as `something.name` in the package outside of config/."""
    files = [path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(PACKAGE / "config")]
    return {
        node.attr
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def test_every_setting_is_read_by_a_part():
    read = attributes_read()
    dead = [leaf.key for leaf in leaves_of(Config) if leaf.key.rsplit(".", 1)[-1] not in read and leaf.key not in REFUSED_UNLESS_DEFAULT]
    assert dead == []


def test_a_name_that_nobody_reads_is_noticed():
    assert "no_such_setting" not in attributes_read()
