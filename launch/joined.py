"""One rank of a world that torchrun, srun or submitit set up: lock, log, then training in this process."""

import os
import sys
from contextlib import ExitStack
from typing import TextIO

from kvm_dist.exit_codes import ConfigError
from kvm_dist.load import LoadedConfig
from kvm_dist.run_directory import RunDirectory, locked_run_directory, open_run_directory
from parallel.placement import Placement


def train_joined(loaded: LoadedConfig, placement: Placement) -> None:
    """Rank 0 holds the run directory's lock; every rank writes its own log."""
    parallel = loaded.config.parallel
    if placement.size != parallel.world_size:
        raise ConfigError(
            f"parallel.data={parallel.data} x parallel.sequence={parallel.sequence} wants "
            f"{parallel.world_size} ranks but {placement.launcher} started {placement.size}; change the "
            "degrees or start as many"
        )
    with ExitStack() as stack:
        if placement.rank == 0:
            directory = stack.enter_context(locked_run_directory(loaded))
        else:
            directory = open_run_directory(loaded)
        write_log(directory, placement.rank)
        from kvm_dist.train import train

        train(loaded)


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
