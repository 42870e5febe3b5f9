"""`miniature`: data, training runs, evaluations and the report, from nothing or from where it was stopped."""

import os
from dataclasses import replace
from pathlib import Path

from kvm_dist.miniature.grid import CampaignSize, Grid, Trial, full_grid, quick_grid
from kvm_dist.miniature.recall import write_training_documents
from launch.bench_commands import Shown
from launch.miniature_runs import train_all, training_runs


def run_miniature(
    only: list[str], quick: bool, out: Path | None, jobs: int, size: CampaignSize | None = None
) -> None:
    """Run what is missing of the campaign in `out`, then write its report and say where it is."""
    folder = out or Path("runs/miniature-quick" if quick else "runs/miniature")
    grid = quick_grid(folder, only) if quick else full_grid(folder, only, size)
    runs = training_runs(grid)
    write_data(grid, runs[0].config.data.sequence_length)
    with Shown("training") as shown:
        diverged = {run.trial for run in train_all(runs, jobs, shown.update)}
    grid = replace(grid, trials=tuple(trial for trial in grid.trials if trial not in diverged))
    _measure(grid, jobs)
    from kvm_dist.miniature.report import write_report

    for path in write_report(grid, sorted(trial.name for trial in diverged)):
        print(path)


def write_data(grid: Grid, tokens: int) -> None:
    finished = grid.recall_documents.with_suffix(".finished")
    if not finished.exists():
        write_training_documents(
            grid.recall_documents,
            grid.training_sequences,
            tokens,
            grid.training_loads,
        )
        finished.touch()


def _measure(grid: Grid, jobs: int) -> None:
    from kvm_dist.miniature.measure import measure_all

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with Shown("evaluating") as shown:
        measured: list[Trial] = []

        def done(trial: Trial, share: float) -> None:
            measured.append(trial)
            shown.update(f"{trial.name} is evaluated", share)

        measure_all(grid, jobs, done)
