"""How many CPU threads a rank may use."""

import os


def share_of_cores(world_size: int) -> int:
    """This machine's cores, as far as this process may use them, divided among the ranks; at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // world_size)
