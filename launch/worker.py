"""One rank of a local run: `python -P -m launch.worker CONFIG [key=value ...]`, for launch/local.py."""

import ctypes
import os
import signal
import sys
from types import FrameType

from launch.ending import exit_code_of, leave

LAUNCHER_PID = "KVM_DIST_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1


def main() -> None:
    end_with_the_launcher()
    leave_quietly_until_training()
    config, *overrides = sys.argv[1:]
    leave(exit_code_of(lambda: _train(config, overrides)))


def end_with_the_launcher() -> None:
    """Ask Linux to kill this process when its parent dies, even by SIGKILL."""
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None or sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(launcher):  # it died before the request reached the kernel
        os._exit(1)


def leave_quietly_until_training() -> None:
    """A request to stop that comes while modules are imported has nothing to save."""
    from kvm_dist.exit_codes import ExitCode

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, f"kvm-dist: {signal.Signals(number).name} before training began\n".encode())
        os._exit(ExitCode.PREEMPTED)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, leave)


def _train(config: str, overrides: list[str]) -> None:
    from kvm_dist.load import load_config

    loaded = load_config(config, overrides)
    from kvm_dist.train import train

    train(loaded)


if __name__ == "__main__":
    main()
