"""Python's garbage collector in a process that has loaded what it needs and now serves until its end."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 5_000
"""How many are made before the collector looks at them. Python's default of 700 is one episode's, and nearly all end without it."""


def leave_out_what_is_there() -> None:
    """Have no collection go through what was loaded: half a million objects of torch and transformers, which stay until the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
