"""A run that is gone on with: where its own settings stand."""

from pathlib import Path

from psrl.errors import ConfigError


def settings_of(run: Path, *, key: str = "--resume-from") -> Path:
    """The run's own settings: what it was started with holds unless an override says otherwise now.

    Raises:
        ConfigError: It is no run folder; `key` names what was given.
    """
    if not (run / "config.yaml").is_file():
        rule = "is no run folder (it has no config.yaml)"
        raise ConfigError(key=key, value=str(run), rule=rule, fix="name a folder runs/<recipe>/<start time>")
    return run / "config.yaml"
