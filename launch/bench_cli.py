"""The command line of `bench`. Bodies import what they need, so that `--help` stays instant."""

from pathlib import Path
from typing import Annotated

import typer

bench_app = typer.Typer(help="Measure what the parts of a run cost on this machine.", no_args_is_help=True)

Json = Annotated[Path | None, typer.Option("--json", help="write all numbers here")]
JsonAndPicture = Annotated[
    Path | None, typer.Option("--json", help="write all numbers here and a picture beside")
]
Config = Annotated[
    Path, typer.Argument(help="a YAML file, such as configs/quickstart.yaml", metavar="CONFIG")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="changes, such as train.steps=100", metavar="[KEY=VALUE]...")
]


@bench_app.command("kvm")
def bench_kvm(
    device: Annotated[str, typer.Option(help="cpu, or cuda (also for AMD GPUs)")] = "cpu",
    tokens: Annotated[list[int] | None, typer.Option(help="a length; give it again for more")] = None,
    quick: Annotated[bool, typer.Option(help="short lengths, one round; of a report, one shape")] = False,
    threads: Annotated[int, typer.Option(help="CPU threads, or processes that compile", min=1)] = 2,
    json_path: JsonAndPicture = None,
    compile_report: Annotated[
        bool, typer.Option("--compile-report", help="compile the GPU kernels instead; needs no GPU")
    ] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="search for faster tiles of the kernels on this GPU instead")
    ] = False,
    width: Annotated[list[int] | None, typer.Option(help="of --tune: a head width, 128 if none")] = None,
    rows: Annotated[Path | None, typer.Option(help="of --tune: where to write, not the package")] = None,
) -> None:
    """KVM against full attention: time, growth, memory, decoding, prefill in pieces."""
    from launch import bench_commands

    if tune:
        bench_commands.tune(device, width or [128], rows)
    elif compile_report:
        bench_commands.compile_report(quick, threads, json_path)
    else:
        bench_commands.bench_kvm(device, tokens or [], quick, threads, json_path)


@bench_app.command("scaling")
def bench_scaling(
    quick: Annotated[bool, typer.Option(help="a short sequence and few steps: a minute")] = False,
    model_only: Annotated[bool, typer.Option("--model-only", help="measure nothing on this machine")] = False,
    tokens: Annotated[int | None, typer.Option(help="tokens of the measured sequence", min=1)] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="write all numbers here and pictures beside")
    ] = None,
) -> None:
    """Two sequence ranks against one process, against their replay; then modelled on many GPUs."""
    from launch.scaling_bench import bench_scaling as bench

    bench(quick, model_only, tokens, json_path)


@bench_app.command("step")
def bench_step(
    config: Config,
    overrides: Overrides = None,
    tokens: Annotated[int | None, typer.Option(help="of a sequence, not the run's", min=1)] = None,
    steps: Annotated[int, typer.Option(help="timed, after one that warms up", min=1)] = 5,
    json_path: Json = None,
) -> None:
    """Steps of CONFIG's model on one rank: time by phase, memory, operators; beside its plan."""
    from launch.run_bench import bench_step as bench

    bench(config, overrides or [], tokens, steps, json_path)


@bench_app.command("data")
def bench_data(
    source: Annotated[str, typer.Option(help="as of `data prepare`")] = "python-stdlib",
    tokenizer: Annotated[str, typer.Option(help="as of `data prepare`")] = "bytes",
    tokens: Annotated[int, typer.Option(help="of a sequence", min=1)] = 2048,
    batches: Annotated[int, typer.Option(help="of eight sequences, to read", min=1)] = 200,
    json_path: Json = None,
) -> None:
    """Text to shards, shards to batches: tokens a second, and how long a resume takes to its first batch."""
    from launch.run_bench import bench_data as bench

    bench(source, tokenizer, tokens, batches, json_path)


@bench_app.command("checkpoint")
def bench_checkpoint(
    config: Config,
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(help="of saves and loads", min=1)] = 3,
    json_path: Json = None,
) -> None:
    """Saves and loads of CONFIG's model below its run root, beside what the disk does with plain files."""
    from launch.run_bench import bench_checkpoint as bench

    bench(config, overrides or [], rounds, json_path)
