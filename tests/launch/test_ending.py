"""How errors that nobody expected end: of the disk with 74 and a sentence, others with 70 and a traceback."""

import errno
import os
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
