"""The arguments of `kvm-dist miniature`. Imports no torch."""

from pathlib import Path
from typing import Annotated

import typer


def miniature(
    only: Annotated[
        list[str] | None, typer.Option(help="a family or an ablation; again for more; all if none is given")
    ] = None,
    quick: Annotated[bool, typer.Option(help="a few steps of one family: shows that all parts work")] = False,
    out: Annotated[
        Path | None, typer.Option(help="runs, data and the report; runs/miniature[-quick] if none is given")
    ] = None,
    jobs: Annotated[int, typer.Option(help="runs at a time, of one CPU thread each", min=1)] = 2,
    recall_steps: Annotated[int | None, typer.Option(help="steps of every recall run", min=1)] = None,
    text_steps: Annotated[int | None, typer.Option(help="steps of every text run", min=1)] = None,
    seeds: Annotated[int, typer.Option(help="recall runs of a family", min=1)] = 3,
    ablation_seeds: Annotated[int, typer.Option(help="recall runs of an ablation", min=1)] = 1,
) -> None:
    """The paper in miniature: train every family on recall and text, compare them, write a report.

    About 12 minutes on two free cores. The same command goes on where it was stopped.
    """
    from kvm_dist.miniature.grid import CampaignSize
    from launch.miniature_command import run_miniature

    size = CampaignSize(recall_steps, text_steps, seeds, ablation_seeds)
    run_miniature(only or [], quick, out, jobs, size)
