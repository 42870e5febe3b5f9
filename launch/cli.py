"""The command line: a table of contents. Bodies import what they need, so that `--help` stays instant."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from launch.bench_cli import bench_app
from launch.convert_cli import export, import_folder
from launch.ending import exit_code_of, leave
from launch.evaluate_cli import evaluate
from launch.miniature_cli import miniature
from launch.streams import guard_streams

app = typer.Typer(
    name="kvm-dist",
    help="Pretrain hybrid Key-Value-Means / RWKV-7 language models with exact sequence parallelism.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Prepare and check training data.", no_args_is_help=True)
checkpoint_app = typer.Typer(help="Look at and verify checkpoints.", no_args_is_help=True)
config_app = typer.Typer(help="Look at configurations.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")

Config = Annotated[
    Path, typer.Argument(help="a YAML file, such as configs/quickstart.yaml", metavar="CONFIG")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="changes, such as train.steps=100", metavar="[KEY=VALUE]...")
]


@app.command()
def train(config: Config, overrides: Overrides = None) -> None:
    """Train the run of CONFIG, or go on with it: here, or as a rank of torchrun, srun or submitit."""
    from kvm_dist.load import load_config
    from parallel.placement import world_from_environment

    placement = world_from_environment(os.environ)
    if placement.launcher == "none":
        from launch.local import train_locally

        raise typer.Exit(train_locally(config, overrides or []))
    from launch.joined import train_joined

    train_joined(load_config(config, overrides or []), placement)


@app.command()
def submit(
    config: Config,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the batch script and the plan")] = False,
) -> None:
    """Queue the run of CONFIG in Slurm. Values with commas (seed=1,2) queue one run for every combination."""
    from launch.submit import submit_run

    submit_run(config, overrides or [], dry_run)


RunRoot = Annotated[Path, typer.Option(help="where the runs are")]
Run = Annotated[Path, typer.Argument(help="a run directory, or a name under --run-root", metavar="RUN")]


@app.command()
def status(
    run: Annotated[Path | None, typer.Argument(help="one run in detail", metavar="[RUN]")] = None,
    run_root: RunRoot = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """All runs: state, step, loss, speed, time left, node, attempt, last error; local ones and Slurm's."""
    from launch.status import show_status

    show_status(run, run_root, as_json)


@app.command()
def logs(
    run: Run,
    run_root: RunRoot = Path("runs"),
    follow: Annotated[bool, typer.Option("--follow", "-f", help="until the run has ended")] = False,
    rank: Annotated[int | None, typer.Option(help="only this rank", min=0)] = None,
) -> None:
    """What the ranks of a run said, or say; through restarts."""
    from launch.follow import show_logs

    show_logs(run, run_root, rank, follow)


@app.command()
def stop(
    run: Run,
    run_root: RunRoot = Path("runs"),
    wait: Annotated[float, typer.Option(help="seconds to wait for its end", min=0)] = 600.0,
) -> None:
    """Ask a run to save and end, here or in Slurm, and wait until it has."""
    from launch.stop import stop_run

    stop_run(run, run_root, wait)


@app.command()
def resume(
    run: Run,
    overrides: Overrides = None,
    run_root: RunRoot = Path("runs"),
    here: Annotated[bool, typer.Option("--here", help="do not submit, though it was submitted")] = False,
) -> None:
    """Start the run of a directory again where it was saved: here, or through Slurm if it was submitted."""
    from launch.resume import resume_run

    raise typer.Exit(resume_run(run, run_root, overrides or [], here))


@app.command()
def plan(
    config: Config,
    overrides: Overrides = None,
    tokens_per_second: Annotated[float | None, typer.Option(help="throughput, for the ETA", min=0)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """Parameters, memory, FLOPs, traffic, checkpoint size and duration, before anything runs."""
    from kvm_dist.load import load_config
    from launch.plan_table import print_plan

    print_plan(load_config(config, overrides or []).config, tokens_per_second, as_json)


@data_app.command("prepare")
def data_prepare(
    source: Annotated[
        str, typer.Argument(help="file, folder, .jsonl[.gz|.zst], or python-stdlib", metavar="SOURCE")
    ],
    out: Annotated[Path, typer.Argument(help="folder for the shards", metavar="OUT")],
    tokenizer: Annotated[str, typer.Option(help="bytes, rwkv-world, or a Hugging Face one")] = "bytes",
    validation_fraction: Annotated[float, typer.Option(help="share of documents held out")] = 0.05,
) -> None:
    """Turn text or token files into WebDataset shards with an index; goes on where it was stopped."""
    from launch.data_commands import prepare

    prepare(source, out, tokenizer, validation_fraction)


@data_app.command("check")
def data_check(
    folder: Annotated[Path, typer.Argument(help="folder of prepared shards", metavar="DIR")],
) -> None:
    """Verify every shard against the index."""
    from launch.data_commands import check

    check(folder)


@checkpoint_app.command("list")
def checkpoint_list(run: Annotated[Path, typer.Argument(help="run directory", metavar="RUN")]) -> None:
    """The checkpoints of a run, oldest first, and whether each is complete; `verify` reads their content."""
    from launch.checkpoint_commands import print_checkpoints

    print_checkpoints(run)


@checkpoint_app.command("verify")
def checkpoint_verify(
    path: Annotated[Path, typer.Argument(help="folder of one checkpoint", metavar="CHECKPOINT")],
) -> None:
    """Check the size and hash of every file of a checkpoint."""
    from launch.checkpoint_commands import verify

    verify(path)


@app.command()
def sample(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="folder of one checkpoint, a run directory, or an exported folder", metavar="CHECKPOINT"
        ),
    ],
    prompt: Annotated[str, typer.Option(help="text to go on from")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="changes, such as model.kvm.budget.factor=32", metavar="[KEY=VALUE]..."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="tokens to add", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0: greedy", min=0)] = 0.8,
    seed: Annotated[int, typer.Option(help="same seed, same text")] = 0,
) -> None:
    """Let a checkpoint write."""
    from kvm_dist.sampling import readable
    from kvm_dist.sampling import sample as sampled

    text = sampled(checkpoint, prompt, tokens, temperature, seed, overrides or [])
    print(readable(text) if sys.stdout.isatty() else text)


app.command()(evaluate)
app.command("import")(import_folder)
app.command()(export)
app.command()(miniature)


@config_app.command("show")
def config_show(config: Config, overrides: Overrides = None) -> None:
    """Every value and where it came from: file and line, command line, or default."""
    from kvm_dist.load import load_config
    from launch.config_commands import print_config

    print_config(load_config(config, overrides or []))


@config_app.command("schema")
def config_schema() -> None:
    """The JSON schema of a configuration file."""
    from launch.config_commands import print_schema

    print_schema()


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="check for this run", metavar="[CONFIG]")] = None,
    overrides: Overrides = None,
) -> None:
    """Check versions, devices, threads, disk, run root and tracking server, with a fix for each."""
    from launch.doctor import run_doctor

    raise typer.Exit(run_doctor(config, overrides or []))


@app.command()
def ui(
    run_root: Annotated[Path, typer.Option(help="where the runs are")] = Path("runs"),
    port: Annotated[int, typer.Option(help="port on 127.0.0.1", min=1, max=65535)] = 5000,
) -> None:
    """Open MLflow's user interface over the runs, on this machine only."""
    from launch.ui import serve

    serve(run_root, port)


@app.command()
def plot(run: Annotated[Path, typer.Argument(help="run directory", metavar="RUN")]) -> None:
    """Draw a run's pictures again from its metrics."""
    from launch.plot_command import plot

    plot(run)


def main() -> None:
    """Entry point of `kvm-dist`: documented exit codes, messages on stderr."""
    guard_streams()
    leave(exit_code_of(app))


if __name__ == "__main__":
    main()
