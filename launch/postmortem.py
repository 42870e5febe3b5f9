"""What is left of a run that ended abnormally: `postmortem.json`. Imports no torch."""

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvm_dist.exit_codes import ExitCode


def write_postmortem(
    path: Path, code: int, rank: int, ranks: int, cause: str, log: Path, said: Sequence[str]
) -> None:
    """Which rank ended the run and how; `said`: the end of its log. A full disk costs only this file."""
    record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": socket.gethostname(),
        "exit_code": code,
        "meaning": ExitCode(code).name.lower(),
        "rank": rank,
        "ranks": ranks,
        "cause": cause,
        "log": str(log),
        "last_lines": list(said),
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        print(f"kvm-dist: {path} was not written: {error}", file=sys.stderr)
