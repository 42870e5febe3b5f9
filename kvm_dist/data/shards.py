"""Reading a shard through webdataset, after its bytes were checked against the index.

webdataset ends a truncated tar early without an error, opens `pipe:` addresses and unpickles members. So the
file is read here, hashed, and its headers are scanned first; webdataset sees only those bytes, never an
address, and the arrays are decoded by `members.read_sample`.
"""

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from webdataset.tariterators import group_by_keys, tar_file_expander

from kvm_dist.data.check import read_bytes, verify_shard
from kvm_dist.data.index import DatasetIndex, ShardEntry
from kvm_dist.data.members import EXTENSIONS, BadShard, read_sample, scan_samples
from kvm_dist.data.shard_writer import Split
from kvm_dist.exit_codes import DataError


@dataclass(frozen=True)
class Documents:
    """Documents one after the other: `tokens` [tokens], `lengths` [documents]."""

    tokens: np.ndarray
    lengths: np.ndarray


def read_shard(index: DatasetIndex, shard: ShardEntry) -> Documents:
    """All documents of a shard. Raises BadShard, naming the first bad sample, unless the index agrees."""
    data = read_bytes(index.directory, shard)
    if hashlib.sha256(data).hexdigest() != shard.sha256:
        verify_shard(data, shard, index.sample_checks()[shard.name])
        raise BadShard("the file's hash is not the index's", 0)
    for _ in scan_samples(data):
        pass
    stream = [{"url": shard.name, "stream": io.BytesIO(data)}]
    samples = [
        read_sample(sample["__key__"], {name: sample[name] for name in EXTENSIONS}, number)
        for number, sample in enumerate(group_by_keys(tar_file_expander(stream)))
    ]
    tokens = np.concatenate([sample.tokens for sample in samples])
    lengths = np.concatenate([sample.lengths for sample in samples])
    if (len(samples), lengths.size, tokens.size) != (shard.samples, shard.documents, shard.tokens):
        raise BadShard(
            f"{len(samples)} samples, {lengths.size} documents, {tokens.size} tokens; the index says "
            f"{shard.samples}, {shard.documents}, {shard.tokens}",
            len(samples),
        )
    if tokens.dtype.str != index.tokenizer.dtype or int(tokens.max()) >= index.tokenizer.vocab_size:
        raise BadShard(f"token ids of another vocabulary than {index.tokenizer.name}", 0)
    return Documents(tokens, lengths)


def split_documents(index: DatasetIndex, split: Split, minimum_tokens: int = 1) -> Iterator[np.ndarray]:
    """Documents of a split of at least `minimum_tokens`, in the order of the index, each [tokens] unsigned.

    Raises DataError at a damaged shard.
    """
    for shard in index.split(split):
        try:
            documents = read_shard(index, shard)
        except BadShard as error:
            raise DataError(f"damaged shard: {index.directory / shard.name}: {error}") from error
        for document in np.split(documents.tokens, np.cumsum(documents.lengths, dtype=np.int64)[:-1]):
            if document.size >= minimum_tokens:
                yield document
