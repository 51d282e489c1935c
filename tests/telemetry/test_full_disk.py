"""A file of lines on a disk that fills up holds whole lines only."""

import json
import subprocess
import sys

PROGRAM = """
import resource, signal, sys
from pathlib import Path
from psrl.telemetry.json_lines import JsonLinesFile

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (250, 250))
lines = JsonLinesFile(Path(sys.argv[1]))
try:
    for number in range(100):
        lines.append({"number": number, "filling": "x" * 60})
except OSError as error:
    print(number)
"""


def test_a_line_that_does_not_fit_any_more_leaves_no_part_of_itself(tmp_path):
    path = tmp_path / "lines.jsonl"
    program = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=True, timeout=60)
    # A line has 86 bytes: {"number":0,"filling":"..."} and its newline. Two of them fit into 250 bytes, and 78 bytes of the third.
    assert program.stdout == "2\n"
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [0, 1]
