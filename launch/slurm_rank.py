"""One rank of a Slurm job: `python -m launch.slurm_rank CONFIG ENDS`, started by launch/slurm_step.py."""

import os
import signal
import stat
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from kvm_dist.exit_codes import ExitCode
from launch.ending import exit_code_of
from launch.slurm_step import write_end
from parallel.placement import Placement, devices_counted_once, world_from_environment

GRACE_SECONDS = 2.0  # srun kills the others as soon as one rank fails: let them say what they know


def main() -> None:
    config, ends = sys.argv[1], Path(sys.argv[2])
    placement = world_from_environment(os.environ)
    for name in devices_counted_once(os.environ):
        del os.environ[name]
    os.environ.setdefault("TRITON_CACHE_DIR", str(own_local_folder("kvm-dist-triton")))
    _leave_quietly_until_training(ends, placement.rank)
    code = exit_code_of(lambda: _train(config, placement))
    write_end(ends, placement.rank, code)
    sys.stdout.flush()
    sys.stderr.flush()
    if code == ExitCode.PREEMPTED:
        os._exit(0)  # all ranks leave by themselves; a failure would make srun kill the ones that still write
    if code and placement.rank != 0:
        time.sleep(GRACE_SECONDS)
    os._exit(code)


def own_local_folder(name: str) -> Path:
    """A folder on this node's own disk that nobody else may write: compiled kernels are code.

    Home folders of a cluster are slow for many small files, and their locks may fail.
    """
    folder = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix=f"{name}-"))


def _train(config: str, placement: Placement) -> None:
    from kvm_dist.load import load_config
    from kvm_dist.run_directory import open_run_directory
    from launch.joined import write_log

    loaded = load_config(config)
    write_log(open_run_directory(loaded), placement.rank)
    from kvm_dist.train import train

    train(loaded)


def _leave_quietly_until_training(ends: Path, rank: int) -> None:
    """A request to stop that comes while modules are imported has nothing to save.

    The exit code makes srun end the ranks that would wait for this one.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, f"kvm-dist: {signal.Signals(number).name} before training began\n".encode())
        write_end(ends, rank, ExitCode.PREEMPTED)
        os._exit(ExitCode.PREEMPTED)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, leave)


if __name__ == "__main__":
    main()
