"""verl's released arithmetic, imported as it is from where `scripts/setup.sh` put it."""

import importlib
import sys
import types
from pathlib import Path

REFERENCES = Path(sys.prefix) / "references"


def verl_module(name):
    """A module of the release. The package's own `__init__` is left out: it imports Ray and changes the process's logging."""
    if "verl" not in sys.modules:
        package = types.ModuleType("verl")
        package.__path__ = [str(REFERENCES / "verl")]
        sys.modules["verl"] = package
        sys.path.append(str(REFERENCES))  # for its one dependency that psrl does not have
    module = importlib.import_module(name)
    assert Path(module.__file__).is_relative_to(REFERENCES), module.__file__
    return module
