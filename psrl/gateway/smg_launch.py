"""`python -m psrl.gateway.smg_launch ...`: the released SMG in a process that ends with its parent.

SMG binds its port itself and knows no parent. This launcher keeps the parent's socket until SMG is imported and its arguments are read,
and watches the parent from a thread, which runs because SMG serves outside of Python's lock.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from psrl.processes.serving import add_serving_arguments, bound_socket, die_with_parent


def main() -> int:
    """Serve until told to stop; what is not known here is SMG's own."""
    parser = argparse.ArgumentParser(prog="psrl.gateway.smg_launch", allow_abbrev=False)
    parser.add_argument(
        "--control-key-file", type=Path, required=True, help="its content guards SMG's control routes; no argument shows it"
    )
    add_serving_arguments(parser)
    arguments, smg_arguments = parser.parse_known_args()
    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    try:
        from smg.launch_router import launch_router, parse_router_args
    except ImportError as error:
        print(f"smg cannot be imported ({error}): pip install smg", file=sys.stderr, flush=True)
        return 1
    key = f"psrl:psrl:admin:{arguments.control_key_file.read_text()}"
    arguments.control_key_file.unlink()
    with bound_socket(arguments) as bound:
        host, port = bound.getsockname()[:2]
        settings = parse_router_args([*smg_arguments, "--host", host, "--port", str(port), "--control-plane-api-keys", key])
    launch_router(settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
