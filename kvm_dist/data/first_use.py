"""A run's data, prepared when it is used for the first time. Imports no torch."""

from pathlib import Path

from kvm_dist.config import DataConfig
from kvm_dist.data.index import (
    INDEX_NAME,
    DatasetIndex,
    load_index,
    require_tokenizer,
    require_vocabulary,
)
from kvm_dist.data.prepare import prepare
from kvm_dist.data.tokenizer import build_tokenizer
from kvm_dist.exit_codes import DataError


def ensure_prepared(
    config: DataConfig, vocab_size: int | None = None, *, progress: bool = True
) -> DatasetIndex:
    """The index at `data.path`; prepared from `data.source` first if it is not there.

    Several processes may call this at once: one prepares, the others wait. Raises DataError if there is
    nothing to prepare from, if another tokenizer made the data, or if a model of `vocab_size` lacks some ids.
    """
    if not (Path(config.path) / INDEX_NAME).is_file():
        if config.source is None:
            raise DataError(
                f"no dataset at data.path={config.path} and data.source is not set; run `kvm-dist data "
                f"prepare SOURCE {config.path} --tokenizer {config.tokenizer}`, or set data.source"
            )
        prepare(
            config.source,
            config.path,
            config.tokenizer,
            validation_fraction=config.validation_fraction,
            progress=progress,
            wait=True,
        )
    index = load_index(config.path)
    require_tokenizer(index, build_tokenizer(config.tokenizer))
    if vocab_size is not None:
        require_vocabulary(index, vocab_size)
    return index
