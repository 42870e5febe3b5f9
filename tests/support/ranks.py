"""Real gloo ranks on this machine, for tests."""

import gc
import io
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from parallel import mesh as meshes
from parallel.config import ParallelConfig
from parallel.world import join_world, leave_world

START_SECONDS = 180.0  # of ranks that import on a busy machine
RUN_SECONDS = 300.0  # of a function there: each message waits for a core


class RankFailure(AssertionError):
    """A rank raised, ended or did not answer; the message holds its traceback."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def run_ranks(
    function: Callable[..., Any], size: int, *args: Any, timeout_seconds: float = RUN_SECONDS
) -> list[Any]:
    """`function(world, *args)` on `size` fresh ranks; their results in rank order. See `Ranks`."""
    with Ranks(size) as ranks:
        return ranks.run(function, *args, timeout_seconds=timeout_seconds)


class Ranks:
    """`size` processes that have joined one gloo world and run functions until closed.

    Functions and arguments are pickled, so functions live at the top of a module. The processes are forked
    from a server that has imported torch and deepspeed once; they share nothing with the tests' process.
    After a failure the set is dead; `run` starts a new one.
    """

    def __init__(self, size: int, *, group_timeout_seconds: float = 180) -> None:
        self.size = size
        self.group_timeout_seconds = group_timeout_seconds
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_seconds: float = RUN_SECONDS
    ) -> list[Any]:
        """Each rank's `function(world, *args)`, in rank order.

        Raises RankFailure with the ranks and their tracebacks at the first failure, or when a rank has not
        answered in time; either kills all.
        """
        if not self._processes:
            self._start()
            timeout_seconds += START_SECONDS
        try:
            self._send((function, args))
            return self._collect(time.monotonic() + timeout_seconds, timeout_seconds)
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """End the ranks in order; raises RankFailure if one does not exit with 0."""
        try:
            self._send(None)
        except RankFailure:
            self._kill()
            raise
        for process in self._processes:
            process.join(30)
        codes = [process.exitcode for process in self._processes]
        self._kill()
        if any(codes):
            raise RankFailure(f"exit codes of the ranks: {codes}, wanted 0")

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.rank_imports"])
        port = free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, port, self.group_timeout_seconds, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _send(self, task: tuple[Callable[..., Any], tuple[Any, ...]] | None) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(task)
            except BrokenPipeError:
                raise self._ended(rank) from None

    def _collect(self, deadline: float, timeout_seconds: float) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < self.size:
            waiting = {self._pipes[rank]: rank for rank in range(self.size) if rank not in results}
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailure(f"no answer from rank {sorted(waiting.values())} in {timeout_seconds:g} s")
            failures: list[str] = []  # a rank that fails makes others fail: any of them may be heard first
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    results[waiting[pipe]] = self._answer(waiting[pipe], pipe)
                except RankFailure as failure:
                    failures.append(str(failure))
            if failures:
                raise RankFailure("\n".join(failures))
        return [results[rank] for rank in range(self.size)]

    def _answer(self, rank: int, pipe: Connection) -> Any:
        try:
            succeeded, payload = pipe.recv()
        except EOFError:
            raise self._ended(rank) from None
        if not succeeded:
            raise RankFailure(f"rank {rank} failed:\n{payload}")
        return torch.load(io.BytesIO(payload), weights_only=False)

    def _ended(self, rank: int) -> RankFailure:
        self._processes[rank].join(5)
        return RankFailure(f"rank {rank} ended with code {self._processes[rank].exitcode}")

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _serve(rank: int, size: int, port: int, group_timeout_seconds: float, pipe: Connection) -> None:
    """The body of one rank: join, run what comes through the pipe, leave."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        config = ParallelConfig(
            data=size,
            threads_per_rank=1,
            timeout_seconds=group_timeout_seconds,
            start_timeout_seconds=START_SECONDS,
        )
        world, made = join_world(config, "cpu"), _remembered_groups()
        while (task := pipe.recv()) is not None:
            function, args = task
            _destroy(made)  # of the task before, which all ranks have ended
            buffer = io.BytesIO()  # tensors as bytes: torch's own sharing ties them to this process's life
            torch.save(function(world, *args), buffer)
            pipe.send((True, buffer.getvalue()))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    leave_world()


def _remembered_groups() -> list[str]:
    """Filled with the names of the groups of every mesh from now on: whoever held the groups themselves would
    keep their connections."""
    made: list[str] = []
    make: Callable[..., dist.ProcessGroup] = meshes._own_group

    def remember(*args: Any) -> dist.ProcessGroup:
        group = make(*args)
        made.append(group.group_name)
        return group

    setattr(meshes, "_own_group", remember)  # noqa: B010  # a name that types know
    return made


def _destroy(names: list[str]) -> None:
    """Each has threads that look for messages a hundred times a second, whoever waits for some."""
    while names:
        dist.destroy_process_group(dist.distributed_c10d._resolve_process_group(names.pop()))
    gc.collect()
