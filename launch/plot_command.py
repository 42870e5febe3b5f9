"""`plot`, of a run or of a sweep."""

from pathlib import Path

from kvm_dist.evaluate.results import draw_again
from kvm_dist.exit_codes import StorageError
from kvm_dist.plots import plot_run
from kvm_dist.tracking.sweep import read_sweep


def plot(run: Path) -> None:
    """Draw the pictures of a run and say where they are; exit code 74 if there is nothing to draw."""
    if not run.is_dir():
        raise StorageError(f"{run}: no such run directory; give a folder such as runs/quickstart")
    if read_sweep(run) is not None:
        from launch.submit_comparison import compare

        compare(run)
        return
    pictures = [*plot_run(run), *draw_again(run)]
    if not pictures:
        raise StorageError(
            f"{run}: no metrics to draw; wait for the first logged step, or give a run directory"
        )
    for path in pictures:
        print(path)
