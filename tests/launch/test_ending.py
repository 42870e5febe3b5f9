"""How errors that nobody expected end: of the disk with 74 and a sentence, others with 70 and a traceback;
commands that nobody reads in silence."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvm_dist.exit_codes import StorageError
from launch.checkpoint_commands import verify
from launch.ending import exit_code_of
from launch.streams import CUT_SHORT
from tests.launch.run_samples import write_run


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


def test_a_command_without_an_output_ends_in_silence() -> None:
    assert kvm_dist("kvm-dist >&-").returncode == 0


def without_reader(folder: Path, *arguments: str, stderr_too: bool = False) -> tuple[int, str]:
    """The exit code, and what was said on stderr, of a command whose stdout nobody reads from the start."""
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "launch.cli", *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=writing,
        stderr=writing if stderr_too else subprocess.PIPE,
    )
    os.close(writing)
    return ended.returncode, (ended.stderr or b"").decode()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["config", "schema"], CUT_SHORT),
        (["--help"], CUT_SHORT),
        (["plan", "run.yaml"], CUT_SHORT),
        (["status", "--run-root", "empty"], 0),  # a last line that nobody read
        (["logs", "run", "--run-root", "."], CUT_SHORT),
        (["plan", "absent.yaml"], 64),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_command_that_nobody_reads_ends_in_silence(arguments: list[str], code: int, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: run\n")
    run = write_run(tmp_path, "run")
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs/rank-00000.log").write_text("a line\n" * 10_000)
    (tmp_path / "empty").mkdir()
    found, said = without_reader(tmp_path, *arguments)
    assert found == code, said
    assert said == "" or (code == 64 and said.startswith("kvm-dist: "))
    assert without_reader(tmp_path, *arguments, stderr_too=True)[0] == code


def test_a_command_goes_on_without_readers_of_its_complaints(tmp_path: Path) -> None:
    """As in `kvm-dist train run.yaml 2>&1 | head`."""
    program = """
import sys
from launch import cli

def complain():
    for number in range(9):
        print(number, file=sys.stderr, flush=True)
    open("done", "w")

cli.app = complain
cli.main()
"""
    reading, writing = os.pipe()
    os.close(reading)
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path, stderr=writing).returncode == 0
    assert (tmp_path / "done").exists()


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
