"""`data prepare` and `data check`."""

from pathlib import Path
from typing import get_args

from kvm_dist.data.check import check as check_dataset
from kvm_dist.data.index import DatasetIndex, Split
from kvm_dist.data.prepare import prepare as prepare_dataset


def prepare(source: str, out: Path, tokenizer: str, validation_fraction: float) -> None:
    """Prepare `source` into `out` and say what came of it."""
    index = prepare_dataset(source, out, tokenizer, validation_fraction=validation_fraction)
    print(f"{out}: prepared with tokenizer {index.tokenizer.name} ({index.tokenizer.vocab_size:,} ids)")
    _print_splits(index)


def check(folder: Path) -> None:
    """Verify every shard; ends with exit code 65 naming the damaged ones."""
    index = check_dataset(folder)
    print(f"{folder}: {len(index.shards)} shards are whole; tokenizer {index.tokenizer.name}")
    _print_splits(index)


def _print_splits(index: DatasetIndex) -> None:
    for name in get_args(Split):
        shards = index.split(name)
        documents = sum(shard.documents for shard in shards)
        print(f"  {name}: {len(shards)} shards, {documents:,} documents, {index.tokens(name):,} tokens")
