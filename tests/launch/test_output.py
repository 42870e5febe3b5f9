"""What reaches a log: finished lines, however a terminal was redrawn on the way."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from launch.output import FinishedLines


def logged(*blocks: bytes) -> bytes:
    file = io.BytesIO()
    lines = FinishedLines(file)
    for block in blocks:
        lines.write(block)
    lines.close()
    return file.getvalue()


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ([b"one\ntwo\n"], b"one\ntwo\n"),
        ([b"on", b"e\ntw", b"o"], b"one\ntwo\n"),
        ([b"\r\x1b[2Kstep 1", b"\r\x1b[2Kstep 2", b"\n", b"end\n"], b"step 2\nend\n"),
        ([b"line\r\n", b"line\r", b"\n"], b"line\nline\n"),
        ([b"\x1b[1;31mred\x1b[0m\n"], b"red\n"),
        ([b"\n\n"], b"\n\n"),
        ([], b""),
    ],
)
def test_only_what_a_terminal_leaves_behind_is_logged(blocks: list[bytes], text: bytes) -> None:
    assert logged(*blocks) == text


def test_a_line_that_is_redrawn_for_days_takes_no_memory() -> None:
    lines = FinishedLines(io.BytesIO())
    for step in range(1000):
        lines.write(b"\r\x1b[2Kstep %d" % step)
    assert len(vars(lines)["_open"]) < 40


PROGRAM = """
import subprocess, sys
from pathlib import Path
from launch.output import CopiedOutput
output = CopiedOutput(Path(sys.argv[1]))
rank = "import sys; print(sys.stdout.isatty(), sys.stderr.isatty()); print('complaint', file=sys.stderr)"
process = subprocess.Popen([sys.executable, "-c", rank], stdout=output.stdout, stderr=output.stderr)
output.started()
process.wait()
output.join(20)
"""


def test_a_process_sees_a_terminal_only_where_we_have_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, str(log)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60)
    os.close(theirs)
    assert ended.stdout == "False True\n"
    assert os.read(ours, 100) == b"complaint\r\n"
    os.close(ours)
    assert sorted(log.read_text().splitlines()) == ["False True", "complaint"]
