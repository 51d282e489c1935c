"""Where a user's own classes are found: the folder of their YAML file."""

import sys


def make_importable(import_folder: str) -> None:
    """Let dotted paths such as `my_file.MyEnvironment` be resolved in this process."""
    if import_folder not in sys.path:
        sys.path.insert(0, import_folder)
