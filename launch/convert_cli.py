"""The arguments of `kvm-dist import` and `export`, a room of the command line. Imports no torch."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Out = Annotated[Path, typer.Argument(help="a folder that does not exist yet, or is empty", metavar="OUT")]
Dtype = Annotated[
    Literal["float32", "bfloat16"] | None, typer.Option(help="of the weights; as they are if not given")
]
ShardGigabytes = Annotated[float, typer.Option(help="largest safetensors file", min=0.000001, max=1e6)]


def import_folder(
    folder: Annotated[
        Path, typer.Argument(help="a published checkpoint: config.json and safetensors", metavar="DIR")
    ],
    out: Out,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="bytes, rwkv-world, a Hugging Face one, or none; the folder's own if not given"),
    ] = None,
    dtype: Dtype = None,
    shard_gigabytes: ShardGigabytes = 5.0,
) -> None:
    """Turn a checkpoint in the authors' published layout into a Hugging Face folder of ours."""
    from launch.convert_commands import import_folder as imported

    imported(folder, out, tokenizer, dtype, shard_gigabytes)


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="folder of one checkpoint, a run directory, or an imported folder", metavar="CHECKPOINT"
        ),
    ],
    out: Out,
    layout: Annotated[
        Literal["huggingface", "authors"], typer.Option(help="authors: their names and settings")
    ] = "huggingface",
    dtype: Dtype = None,
    shard_gigabytes: ShardGigabytes = 5.0,
) -> None:
    """Turn a checkpoint of any training layout into a folder for Hugging Face, with a model card."""
    from launch.convert_commands import export as exported

    exported(checkpoint, out, layout, dtype, shard_gigabytes)
