"""`python -m psrl.engines.scripted --script FILE`: the scripted engine as a process."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from psrl.engines.scripted.core import ScriptedCore
from psrl.engines.scripted.script import read_script
from psrl.engines.serving import add_engine_arguments, serve
from psrl.errors import EngineError
from psrl.processes.serving import die_with_parent


def main() -> int:
    """Serve the script until told to stop."""
    parser = argparse.ArgumentParser(prog="psrl.engines.scripted")
    parser.add_argument("--script", type=Path, required=True, help="JSON file; psrl/engines/scripted/script.py has an example")
    add_engine_arguments(parser)
    arguments = parser.parse_args()
    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    try:
        script = read_script(arguments.script)
    except EngineError as error:
        print(f"scripted engine: {error}", file=sys.stderr, flush=True)
        return 1
    serve(ScriptedCore(script, max_num_seqs=arguments.max_num_seqs), arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
