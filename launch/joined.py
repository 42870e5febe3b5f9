"""One rank of a world that torchrun, srun or submitit set up: lock, log, then training in this process."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

from kvm_dist.attempts import begin_attempt
from kvm_dist.exit_codes import ConfigError, ExitCode, RunError
from kvm_dist.load import LoadedConfig
from kvm_dist.postmortem import record_end
from kvm_dist.run_directory import RunDirectory, locked_run_directory, open_run_directory
from launch.slurm_rank import own_local_folder
from parallel.placement import Placement, devices_counted_once


def train_joined(loaded: LoadedConfig, placement: Placement) -> None:
    """Rank 0 holds the run directory's lock; every rank writes its own log."""
    parallel = loaded.config.parallel
    if placement.size != parallel.world_size:
        raise ConfigError(
            f"parallel.data={parallel.data} x parallel.sequence={parallel.sequence} wants "
            f"{parallel.world_size} ranks but {placement.launcher} started {placement.size}; change the "
            "degrees or start as many"
        )
    for name in devices_counted_once(os.environ):
        del os.environ[name]
    os.environ.setdefault("TRITON_CACHE_DIR", str(own_local_folder("kvm-dist-triton")))
    with ExitStack() as stack:
        if placement.rank == 0:
            directory = stack.enter_context(locked_run_directory(loaded))
        else:
            directory = open_run_directory(loaded)
        write_log(directory, placement.rank)
        if placement.rank == 0:
            directory.postmortem_path.unlink(missing_ok=True)  # of an earlier attempt
            begin_attempt(directory.path, steps=loaded.config.train.steps, job=os.environ.get("SLURM_JOB_ID"))
        with _end_recorded(directory, placement):
            from kvm_dist.train import train

            train(loaded)


@contextmanager
def _end_recorded(directory: RunDirectory, placement: Placement) -> Iterator[None]:
    """Rank 0 writes down how the attempt ended, whoever fails why: there may be no launcher to do it."""
    code, cause = int(ExitCode.CRASH), ""
    try:
        yield
        code = int(ExitCode.DONE)
    except RunError as error:
        code, cause = int(error.code), str(error)
        raise
    except BaseException as error:
        cause = f"{type(error).__name__}: {error}"
        raise
    finally:
        if code != ExitCode.DONE or placement.rank == 0:
            record_end(directory, code, cause, rank=placement.rank, ranks=placement.size)


def write_log(directory: RunDirectory, rank: int) -> None:
    """Rank 0's output goes to its log as well, everybody else's goes there instead."""
    path = directory.log_path(rank)
    if rank == 0:
        log = path.open("a", encoding="utf-8", buffering=1)
        sys.stdout = Tee(sys.stdout, log)
        sys.stderr = Tee(sys.stderr, log)
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


class Tee:
    """A text stream that also writes into a log; everything else is the stream's own."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream = stream
        self._log = log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._log.flush()
        self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
