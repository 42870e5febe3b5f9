"""How errors that nobody expected end: of the disk with 74 and a sentence, others with 70 and a traceback."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvm_dist.exit_codes import StorageError
from launch.checkpoint_commands import verify
from launch.ending import exit_code_of


def raised(error: OSError) -> int:
    def action() -> None:
        raise error

    return exit_code_of(action)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.ENAMETOOLONG])
def test_a_file_that_the_disk_refuses_is_named_under_74(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert raised(OSError(number, os.strerror(number), "runs/a/index.json")) == 74
    said = capsys.readouterr().err
    assert said == f"kvm-dist: runs/a/index.json: {os.strerror(number)}; make room or permissions\n"


def kvm_dist(command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """`kvm-dist config schema`, which prints much, within `command`, a line of the shell."""
    program = f"{sys.executable} -m launch.cli config schema"
    return subprocess.run(
        ["bash", "-c", command.replace("kvm-dist", program)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_does_not_fit_on_the_disk_ends_with_74() -> None:
    ended = kvm_dist("kvm-dist > /dev/full")
    assert (ended.returncode, "Traceback" in ended.stderr) == (74, False)
    assert "No space left on device; make room" in ended.stderr


def test_a_command_without_an_output_or_with_one_that_nobody_reads_ends_in_silence() -> None:
    assert kvm_dist("kvm-dist >&-").returncode == 0
    ended = kvm_dist("kvm-dist | true")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_encoding_without_some_letters_gets_signs_in_their_place() -> None:
    printed = "from launch import cli; cli.app = lambda: print('a ☃ é'); cli.main()"
    ended = subprocess.run(
        [sys.executable, "-c", printed],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (0, "a ? ?\n")


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "gone", "x"), PermissionError(errno.EPERM, "kill")])
def test_other_errors_of_the_system_keep_their_traceback(
    error: OSError, capsys: pytest.CaptureFixture[str]
) -> None:
    assert raised(error) == 70
    assert "Traceback" in capsys.readouterr().err


def test_a_run_given_for_one_of_its_checkpoints_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(
        StorageError, match="run is a run; give one of its checkpoints: kvm-dist checkpoint list"
    ):
        verify(tmp_path / "run")
