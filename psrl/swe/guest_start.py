"""What the runner's environment is, said before it starts: a program sent into a sandbox with it.

Folders of the project that the image's PYTHONPATH names are taken out of it, since pytest is imported from there before the runner is
ready, and given to pytest itself as its `pythonpath`, which it uses after that. Standard library alone, Python 3.8 or newer.
"""

from __future__ import annotations

import os
import shlex
from typing import Any


def settle(settings: dict[str, Any], workdir: str) -> tuple[str, ...]:
    """Set the variables; the names of those that the tests need beyond what the runner keeps.

    Args:
        settings: `options` of pytest, and the project's own `pythonpath`.
        workdir: Where the project lies.
    """
    env = dict(os.environ)
    entries = [entry for entry in env.pop("PYTHONPATH", "").split(":") if entry]
    inside = [entry for entry in entries if is_below(entry, workdir)]
    outside = [entry for entry in entries if entry not in inside]
    options = list(settings["options"])
    if inside:
        late = [*settings["pythonpath"], *(os.path.join(workdir, entry) for entry in inside)]
        options += ["-o", "pythonpath=" + " ".join(shlex.quote(entry) for entry in late)]
    os.environ["PYTHONPATH"] = ":".join(outside)
    os.environ["PYTEST_ADDOPTS"] = " ".join(shlex.quote(option) for option in options)
    return ("PYTEST_ADDOPTS",)


def is_below(entry: str, workdir: str) -> bool:
    """Whether an entry of a search path lies in the project, links followed."""
    root = os.path.realpath(workdir)
    return (os.path.realpath(os.path.join(workdir, entry)) + "/").startswith(root + "/")
