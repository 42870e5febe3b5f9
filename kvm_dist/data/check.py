"""Verification of shards against the index, down to the first damaged sample. Imports no torch."""

import hashlib
from pathlib import Path

import numpy as np

from kvm_dist.data.index import DatasetIndex, ShardEntry, load_index
from kvm_dist.data.members import BadShard, read_sample, scan_samples
from kvm_dist.data.progress import show_progress
from kvm_dist.exit_codes import DataError

SHOWN_SHARDS = 20


def check(directory: str | Path, *, progress: bool = True) -> DatasetIndex:
    """Verify every shard of a dataset: hash, counts, adjacency, unique keys, every sample's checksum.

    Returns the index. Raises DataError naming every damaged shard and its first bad sample.
    """
    index = load_index(directory)
    index.document_lengths()
    checks = index.sample_checks()
    problems: list[str] = []
    keys: set[str] = set()
    with show_progress(
        f"checking {directory}", sum(shard.bytes for shard in index.shards), not progress
    ) as shown:
        for shard in index.shards:
            try:
                verify_shard(read_bytes(index.directory, shard), shard, checks[shard.name], keys)
            except BadShard as error:
                problems.append(f"{shard.name}: {error}")
            shown.advance(shard.bytes)
    if problems:
        more = [f"and {len(problems) - SHOWN_SHARDS} more"] if len(problems) > SHOWN_SHARDS else []
        raise DataError(
            f"{len(problems)} of {len(index.shards)} shards in {directory} are damaged; delete them and run "
            "`kvm-dist data prepare` again to have them written anew:\n  "
            + "\n  ".join(problems[:SHOWN_SHARDS] + more)
        )
    return index


def read_bytes(directory: Path, shard: ShardEntry) -> bytes:
    """The bytes of a shard's file. Raises BadShard if it cannot be read or its size is another."""
    try:
        with (directory / shard.name).open("rb") as file:
            return file.read(shard.bytes + 1)  # never more than promised, whatever the file has become
    except OSError as error:
        raise BadShard(f"the file cannot be read: {error.strerror}", 0) from error


def verify_shard(data: bytes, shard: ShardEntry, checks: np.ndarray, keys: set[str] | None = None) -> None:
    """Compare a shard's bytes with its entry and the (documents, checksum) of its samples, [samples, 2].

    `keys` holds the sample keys of other shards and is extended. Raises BadShard at the first bad sample.
    """
    known = set() if keys is None else keys
    count = 0
    for key, members in scan_samples(data):
        sample = read_sample(key, members, count)
        if count >= shard.samples:
            raise BadShard(f"the index promises only {shard.samples} samples", count, key)
        if (sample.lengths.size, sample.checksum) != tuple(checks[count].tolist()):
            raise BadShard("its content is not what was prepared", count, key)
        if key in known:
            raise BadShard("another shard holds a sample with this key", count, key)
        known.add(key)
        count += 1
    if count < shard.samples:
        raise BadShard(f"the shard ends after {count} of {shard.samples} samples", count)
    found = hashlib.sha256(data).hexdigest()
    if found != shard.sha256:
        raise BadShard(
            f"every sample is intact, but the file's hash is {found[:16]}, wanted {shard.sha256[:16]}", 0
        )
