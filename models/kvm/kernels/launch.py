"""Starting kernels: on a GPU, in Triton's interpreter, or only noting what would be started."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from models.kvm.kernels.tuning import OTHER_CUDA, OTHER_HIP, TARGETS, Kernel, Target, Tile, kernel_of


@dataclass(frozen=True)
class Launch:
    """One start of a kernel, as it would be on `target`."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    tile: Tile
    target: Target


_one_at_a_time = threading.Lock()  # the interpreter keeps its place in globals
Observer = Callable[[Kernel, Callable[[], None]], None]  # is given whose launch it is, and starts it
_observers: list[Observer] = []  # of all threads: on a GPU autograd has a backward's launches from its own
_recording: ContextVar[tuple[Target, list[Launch]] | None] = ContextVar("recording", default=None)


@contextmanager
def recorded_launches(target: Target) -> Iterator[list[Launch]]:
    """Launches inside are noted for `target` instead of run; tensors may be on the meta device."""
    launches: list[Launch] = []
    token = _recording.set((target, launches))
    try:
        yield launches
    finally:
        _recording.reset(token)


@contextmanager
def observed_launches(observer: Observer) -> Iterator[None]:
    """Launches inside, of any thread, go through `observer`, which may clock them."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.pop()


def interpreted() -> bool:
    """Whether Triton was told to run kernels on the CPU, in Python."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def current_target(device: torch.device) -> Target:
    recording = _recording.get()
    if recording is not None:
        return recording[0]
    if device.type == "cpu" and interpreted():
        return TARGETS["interpreter"]
    if device.type != "cuda":
        raise ValueError(
            f"backend='triton' on {device.type}: want tensors on a GPU, or set TRITON_INTERPRET=1 before "
            "Python starts to run kernels slowly on the CPU; else use backend='torch'"
        )
    return _gpu_target(device.index if device.index is not None else torch.cuda.current_device())


def refused_by_compiler(error: Exception) -> bool:
    """Whether a launch failed because its tile does not compile or fit, which harms nothing."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    if isinstance(error, (CompilationError, OutOfResources, PTXASError)):
        return True
    return type(error) is RuntimeError and "PassManager" in str(error)


@lru_cache(maxsize=64)
def _gpu_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return TARGETS.get(properties.gcnArchName.split(":")[0], OTHER_HIP)
    return TARGETS.get(f"sm_{properties.major}{properties.minor}", OTHER_CUDA)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    tile: Tile,
    target: Target,
    **constants: Any,
) -> None:
    """Start `grid` programs of a kernel; none for an empty grid."""
    if 0 in grid:
        return
    recording = _recording.get()
    if recording is not None:
        recording[1].append(Launch(kernel, grid, arguments, constants, tile, target))
        return

    def start() -> None:
        with _one_at_a_time if target.backend == "interpreter" else nullcontext():
            kernel[grid](*arguments, **constants, **tile.options(target))

    if _observers:
        _observers[-1](kernel_of(kernel.__name__), start)
    else:
        start()
