"""Texts to evaluate on: held-out documents of prepared data, or any other text. No model is read here."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvm_dist.data.documents import PYTHON_STDLIB, find_pieces, read_documents
from kvm_dist.data.index import INDEX_NAME, DatasetIndex, load_index, require_tokenizer, require_vocabulary
from kvm_dist.data.loader import MicroBatch, SequenceReader
from kvm_dist.data.order import SequenceOrder
from kvm_dist.data.shards import split_documents
from kvm_dist.data.tokenizer import Tokenizer
from kvm_dist.exit_codes import DataError

if TYPE_CHECKING:
    from kvm_dist.pretrained import Pretrained

_ORDER_SEED = 0  # that of the validation while training: the same sequences in the same order


def held_out_data(folder: Path | None, opened: "Pretrained") -> DatasetIndex:
    """The prepared data in `folder`, or in the model's own data.path.

    Raises DataError if it is not there, was made by another tokenizer, or holds no documents back.
    """
    data = opened.config.data
    if folder is None and not (data.path / INDEX_NAME).is_file():
        told = ", where the run had it" if opened.step else f"; {opened.path} does not say where its data is"
        seen = "" if data.path.is_absolute() else f" below {Path.cwd()}"
        raise DataError(
            f"no prepared data at data.path={data.path}{seen}{told}; give --data DIR, or run "
            f"`kvm-dist data prepare SOURCE {data.path} --tokenizer {data.tokenizer}`"
        )
    index = load_index(folder or data.path)
    require_tokenizer(index, opened.tokenizer)
    require_vocabulary(index, opened.config.model.vocab_size)
    if not index.split("validation"):
        raise DataError(
            f"{index.directory} holds no documents back; prepare it again with --validation-fraction"
        )
    return index


class PackedSequences:
    """Held-out documents joined and cut into sequences as training does, each with a separator behind it."""

    def __init__(self, index: DatasetIndex, tokens: int, shuffle_tokens: int, limit: int | None) -> None:
        """limit: at most so many sequences of `tokens` tokens, the first of a fixed shuffle."""
        held_out = index.tokens("validation")
        if tokens > held_out:
            raise DataError(
                f"{index.directory} holds back {held_out:,} tokens, fewer than one context of {tokens:,}; "
                "give a smaller --tokens, or other data with --data DIR"
            )
        shards = index.split("validation")
        order = SequenceOrder(shards, sequence_length=tokens, shuffle_tokens=shuffle_tokens, seed=_ORDER_SEED)
        self._reader = SequenceReader(index, order, damaged_shards_allowed=0)
        self.sequences = order.epoch_sequences(0)
        if limit is not None:
            self.sequences = min(limit, self.sequences)

    def batches(self, rows: int) -> Iterator[MicroBatch]:
        """Up to `rows` sequences at a time, read when they are asked for."""
        for first in range(0, self.sequences, rows):
            yield self._reader.batch(range(first, min(first + rows, self.sequences)))


class LongDocuments:
    """The held-out documents of at least `minimum_tokens` tokens, in the order of the data."""

    def __init__(self, index: DatasetIndex, minimum_tokens: int, limit: int | None) -> None:
        self._index, self._minimum, self._limit = index, minimum_tokens, limit
        lengths = index.document_lengths()
        every = np.concatenate([lengths[shard.name] for shard in index.split("validation")])
        self.lengths: list[int] = every[every >= minimum_tokens].tolist()[:limit]
        if not self.lengths:
            raise DataError(
                f"{index.directory} holds back no document of at least {minimum_tokens:,} tokens; its "
                f"longest has {int(every.max()):,}; give --minimum-tokens, or other data with --data DIR"
            )

    def __iter__(self) -> Iterator[np.ndarray]:
        """Each document [tokens], unsigned."""
        return islice(split_documents(self._index, "validation", self._minimum), self._limit)


def row_bytes(tokenizer: Tokenizer, before: int, ids: np.ndarray) -> int:
    """Bytes in UTF-8 of the texts in ids [tokens] of packed data, separators left out, behind token `before`.

    Rows are cut without regard to characters; together they have the bytes of the texts all the same.
    """
    first, *others = np.split(ids, np.flatnonzero(ids == tokenizer.separator_id))
    begun = tokenizer.text_bytes(first, begins=before == tokenizer.separator_id)
    return begun + sum(tokenizer.text_bytes(part[1:], begins=True) for part in others)


def after_separator(ids: np.ndarray, tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """A document [tokens] as it is read alone: inputs [1, tokens] begin with a separator, labels are it."""
    labels = torch.from_numpy(ids.astype(np.int64)).unsqueeze(0)
    first = torch.full((1, 1), tokenizer.separator_id)
    return torch.cat([first, labels[:, :-1]], dim=1), labels


def texts(source: Path | None, data: Path, tokenizer: Tokenizer, characters: int) -> tuple[list[str], str]:
    """About `characters` characters of text, and where they come from.

    From `source`, a file or a folder; without one from the documents held back by the prepared `data`, and
    where there is none from the sources of Python's standard library.
    """
    if source is None and (data / INDEX_NAME).is_file():
        index = load_index(data)
        require_tokenizer(index, tokenizer)
        if index.split("validation"):
            documents = split_documents(index, "validation")
            found = (tokenizer.decode(document.tolist()) for document in documents)
            return _enough(found, characters), f"held-out documents of {index.directory}"
    name = PYTHON_STDLIB if source is None else str(source)
    return _enough(_documents_of(name, tokenizer), characters), name


def _documents_of(source: str, tokenizer: Tokenizer) -> Iterator[str]:
    for piece in find_pieces(source):
        for document in read_documents(piece):
            if document.tokens is not None:
                yield tokenizer.decode(document.tokens.tolist())
            else:
                yield document.content.decode("utf-8", "replace")


def _enough(found: Iterator[str], characters: int) -> list[str]:
    kept, length = [], 0
    for text in found:
        kept.append(text)
        length += len(text)
        if length >= characters:
            break
    return kept
