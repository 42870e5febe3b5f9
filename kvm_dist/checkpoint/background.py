"""Work beside the training loop, one piece at a time."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvm_dist.exit_codes import StorageError

T = TypeVar("T")


class Background(Generic[T]):
    """Runs one function in a thread that never keeps the process alive."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._value: T | None = None
        self._error: BaseException | None = None

    def start(self, function: Callable[[], T]) -> None:
        assert self._thread is None, "collect the result of the work before first"

        def work() -> None:
            try:
                self._value = function()
            except BaseException as error:  # told to whoever collects
                self._error = error

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def finished(self) -> bool:
        """Whether there is a result to collect."""
        return self._thread is not None and not self._thread.is_alive()

    def collect(self) -> tuple[T | None, StorageError | None]:
        """Waits for the work and gives what it returned, or why it could not; any other error is raised."""
        if self._thread is None:
            return None, None
        self._thread.join()
        self._thread = None
        value, error = self._value, self._error
        self._value = self._error = None
        if error is None or isinstance(error, StorageError):
            return value, error
        raise error
