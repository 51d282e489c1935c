"""`sandbox.packages`: installed distributions that programs in a sandbox can import, with all that they depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from psrl.errors import ConfigError

PSRL_FOLDER = "/opt/psrl"
"""Inside of sandboxes; all that psrl puts there lies below it."""
PACKAGES_FOLDER = f"{PSRL_FOLDER}/packages"
PROGRAMS_FOLDER = f"{PSRL_FOLDER}/bin"
"""First in PATH: `python`, `python3`, and the commands of the packages."""
KEY = "sandbox.packages"


@dataclass(frozen=True, kw_only=True, slots=True)
class Packages:
    """What to show inside."""

    entries: tuple[tuple[str, Path], ...]
    """Name below PACKAGES_FOLDER, and the file or folder of this machine; sorted."""
    programs: tuple[tuple[str, str], ...]
    """Name below PROGRAMS_FOLDER, and the text of the script; sorted."""


def packages_of(names: Sequence[str]) -> Packages:
    """Find the distributions and all that they need.

    Raises:
        ConfigError: One is not installed here, or not in a way that can be shown elsewhere.
    """
    entries: dict[str, Path] = {}
    programs: dict[str, str] = {}
    for distribution in _with_dependencies(names):
        root = Path(str(distribution.locate_file("")))
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        if not any(not top.endswith((".dist-info", ".egg-info", ".pth")) for top in tops):
            rule = f"{distribution.name} is installed here without files of its own (editable, or a bundle)"
            raise ConfigError(key=KEY, value=distribution.name, rule=rule, fix=f"pip install {distribution.name} as an ordinary package")
        entries |= {top: root / top for top in tops if not top.endswith(".pth") and (root / top).exists()}
        for entry in distribution.entry_points:
            if entry.group == "console_scripts":
                call = f"import sys\nfrom {entry.module} import {entry.attr.split('.')[0]}\nsys.exit({entry.attr}())\n"
                programs[entry.name] = f"#!{PROGRAMS_FOLDER}/python\n{call}"
    return Packages(entries=tuple(sorted(entries.items())), programs=tuple(sorted(programs.items())))


def _with_dependencies(names: Sequence[str]) -> list[metadata.Distribution]:
    found: dict[str, metadata.Distribution] = {}
    pending = [(name, "") for name in names]
    while pending:
        name, asked_by = pending.pop()
        try:
            requirement = Requirement(name)
            distribution = metadata.distribution(requirement.name)
        except (InvalidRequirement, metadata.PackageNotFoundError) as error:
            why = f", which {asked_by} needs," if asked_by else ""
            rule = f"{name}{why} is not installed here"
            raise ConfigError(key=KEY, value=list(names), rule=rule, fix=f"pip install {name}, or leave it out") from error
        key = canonicalize_name(requirement.name)
        if key in found:
            continue
        found[key] = distribution
        for line in distribution.requires or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
                pending.append((f"{needed.name}[{','.join(needed.extras)}]" if needed.extras else needed.name, distribution.name))
    return [found[key] for key in sorted(found)]
