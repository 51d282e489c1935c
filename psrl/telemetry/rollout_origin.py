"""What a rollout plays and at which model, written beside its episodes: a resume must be of the same."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from psrl.errors import ConfigError
from psrl.telemetry.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutOrigin:
    """`rollout.json`."""

    model: str
    """A folder, or its name at the endpoint."""
    url: str | None
    """Of the endpoint; None: psrl's own engines."""
    key_variable: str | None
    """Environment variable that the endpoint's key is of."""
    tasks: str
    """Fingerprint of all tasks in their order."""
    num_tasks: int

    def write(self, folder: RunFolder) -> None:
        """Into the run folder."""
        folder.rollout.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> RolloutOrigin:
        """Of the run folder at `path`.

        Raises:
            ConfigError: It is none of a rollout.
        """
        folder = RunFolder.open(path)
        try:
            return cls(**json.loads(folder.rollout.read_text()))
        except (OSError, ValueError, TypeError) as error:
            rule, fix = f"is no run folder of a rollout ({error})", "name a folder that psrl rollout made"
            raise ConfigError(key="--resume-from", value=str(path), rule=rule, fix=fix) from error
