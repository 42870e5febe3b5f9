"""`import` and `export`."""

import signal
from pathlib import Path
from shlex import quote
from typing import Literal

from kvm_dist.convert.exporting import export_model
from kvm_dist.convert.importing import import_published
from models.config import ModelConfig

GIGABYTE = 1_000_000_000


def import_folder(
    folder: Path, out: Path, tokenizer: str | None, dtype: str | None, shard_gigabytes: float
) -> None:
    """Import and say what was found; exit codes 64, 65 and 74 name what is wrong."""
    _clean_up_when_stopped()
    content = import_published(folder, out, dtype, tokenizer, _bytes(shard_gigabytes))
    print(f"{out}: imported {_described(content.model)}")
    _print_notes(content.notes)
    if content.tokenizer is None:
        print("next: import it once more with --tokenizer NAME if it is to read and write text")
    else:
        print(f"next: kvm-dist sample {quote(str(out))} --prompt TEXT")


def export(
    checkpoint: Path,
    out: Path,
    layout: Literal["huggingface", "authors"],
    dtype: str | None,
    shard_gigabytes: float,
) -> None:
    """Export and say what was written; exit codes 64, 65 and 74 name what is wrong."""
    _clean_up_when_stopped()
    content = export_model(checkpoint, out, layout, dtype, _bytes(shard_gigabytes))
    print(f"{out}: exported {_described(content.model)} from {content.facts.origin}")
    _print_notes(content.notes)
    if layout == "huggingface":
        print(
            f"next: state a licence in {out / 'README.md'}; kvm-dist sample {quote(str(out))} --prompt TEXT"
        )


def _clean_up_when_stopped() -> None:
    """SIGTERM ends the command as Ctrl-C does, so that the unfinished folder is removed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _described(model: ModelConfig) -> str:
    kinds = ", ".join(f"{model.layer_kinds.count(kind)} {kind}" for kind in model.used_layer_configs)
    return f"a model of {model.num_layers} layers ({kinds}), hidden size {model.hidden_size}"


def _print_notes(notes: tuple[str, ...]) -> None:
    for note in notes:
        print(f"note: {note}")


def _bytes(gigabytes: float) -> int:
    return max(1, int(gigabytes * GIGABYTE))
