"""The arguments of `kvm-dist evaluate`, a room of the command line for their number. Imports no torch."""

from pathlib import Path
from typing import Annotated

import typer

Targets = Annotated[
    list[str],
    typer.Argument(
        help="run directories, checkpoints or exported folders; changes such as model.kvm.budget.factor=32",
        metavar="CHECKPOINT... [KEY=VALUE]...",
    ),
]


def evaluate(
    targets: Targets,
    task: Annotated[
        str,
        typer.Option(help="perplexity, position-loss, needle, memory[:LAYER.HEAD], or lm-eval:TASK[,TASK]"),
    ],
    data: Annotated[
        Path | None, typer.Option(help="prepared data whose held-out documents are read, not the run's")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="context; for the needle give it again for more lengths", min=1)
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="at most so many documents, sequences or questions; not of the needle", min=1),
    ] = None,
    block_tokens: Annotated[int, typer.Option(help="position-loss: tokens of a block", min=1)] = 1024,
    minimum_tokens: Annotated[
        int, typer.Option(help="position-loss: tokens of the shortest document", min=1)
    ] = 32_768,
    needle: Annotated[
        list[str] | None, typer.Option(help="needle: S1, S2 or S3; all if none is given")
    ] = None,
    depth: Annotated[
        list[float] | None, typer.Option(help="needle: from 0 (first) to 1 (last)", min=0, max=1)
    ] = None,
    samples: Annotated[int, typer.Option(help="needle: samples of a length and depth", min=1)] = 5,
    haystack: Annotated[
        Path | None, typer.Option(help="needle, memory: file or folder of text, not held-out documents")
    ] = None,
    tasks_dir: Annotated[Path | None, typer.Option(help="lm-eval: folder of own task files")] = None,
    shots: Annotated[int | None, typer.Option(help="lm-eval: examples before a question", min=0)] = None,
    seed: Annotated[int, typer.Option(help="same seed, same samples")] = 0,
    out: Annotated[Path | None, typer.Option(help="where results go, not into the run")] = None,
) -> None:
    """Measure checkpoints on one task, without network: JSON, a table, a picture, MLflow."""
    from kvm_dist.evaluate.tasks import Options
    from launch.evaluate_commands import evaluate as evaluated

    options = Options(
        data=data,
        tokens=tuple(tokens or ()),
        limit=limit,
        seed=seed,
        block_tokens=block_tokens,
        minimum_tokens=minimum_tokens,
        haystack=haystack,
        needles=tuple(needle or ()),
        depths=tuple(depth or ()),
        samples=samples,
        tasks_dir=tasks_dir,
        shots=shots,
    )
    evaluated(targets, task, out, options)
