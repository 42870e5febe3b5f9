"""Damaged and hostile shards: refused by name, or masked and counted without moving anything else."""

import gzip
import hashlib
import io
import json
import pickle
import tarfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from kvm_dist.data import index as index_module
from kvm_dist.data.check import check
from kvm_dist.data.index import DatasetIndex, ShardEntry, load_index
from kvm_dist.data.loader import BatchStream
from kvm_dist.data.members import BadShard, read_sample, scan_samples
from kvm_dist.data.shards import read_shard
from kvm_dist.exit_codes import DataError, ExitCode
from tests.kvm_dist.data.corpus import small_dataset, write_folder

Members = list[tuple[str, bytes]]


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetIndex:
    """Shards of several samples each: four documents a sample."""
    monkeypatch.setattr("kvm_dist.data.shard_writer.SAMPLE_TOKENS", 1200)
    write_folder(tmp_path / "text")
    index = small_dataset(tmp_path, shard_tokens=5000, unit_bytes=6000)
    assert all(shard.samples >= 3 for shard in index.split("train")[:3])
    return index


def victim(index: DatasetIndex) -> ShardEntry:
    return index.split("train")[1]


def members_of(path: Path) -> Members:
    with tarfile.open(path) as archive:
        return [(info.name, archive.extractfile(info).read()) for info in archive]  # type: ignore[union-attr]


def rewrite(path: Path, members: Members) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def truncate(path: Path) -> None:
    offset = offset_of_sample(path, 2)
    path.write_bytes(path.read_bytes()[: offset + 700])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[offset_of_sample(path, 2) + 512 + 300] ^= 4
    path.write_bytes(data)


def overwrite_a_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    offset = offset_of_sample(path, 2)
    data[offset : offset + 512] = b"\xff" * 512
    path.write_bytes(data)


def drop_a_member(path: Path) -> None:
    members = members_of(path)
    rewrite(path, members[:4] + members[5:])


def interleave(path: Path) -> None:
    members = members_of(path)
    members[5], members[-1] = members[-1], members[5]
    rewrite(path, members)


def repeat_a_sample(path: Path) -> None:
    members = members_of(path)
    rewrite(path, members[:4] + members[:2] + members[4:])


def offset_of_sample(path: Path, sample: int) -> int:
    with tarfile.open(path) as archive:
        return archive.getmembers()[2 * sample].offset


DAMAGES = [truncate, flip_a_bit, overwrite_a_header, drop_a_member, interleave, repeat_a_sample]


def stream(index: DatasetIndex, **changes: object) -> BatchStream:
    settings: dict[str, object] = {
        "sequence_length": 50,
        "shuffle_tokens": 9000,
        "seed": 0,
        "batch_sequences": 8,
    }
    return BatchStream(index, **{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_reported_with_the_shard_and_the_first_bad_sample(
    dataset: DatasetIndex, damage: Callable[[Path], None]
) -> None:
    shard = victim(dataset)
    damage(dataset.directory / shard.name)
    with pytest.raises(DataError, match=rf"1 of {len(dataset.shards)} shards.*\n  {shard.name}: sample 2\b"):
        check(dataset.directory, progress=False)
    with pytest.raises(DataError, match=rf"damaged shard: .*{shard.name}: sample 2\b") as caught:
        list(islice(stream(dataset), 500))
    assert caught.value.code == ExitCode.DATA == 65


def test_a_shard_that_is_gone_is_reported(dataset: DatasetIndex) -> None:
    shard = victim(dataset)
    (dataset.directory / shard.name).unlink()
    with pytest.raises(DataError, match=rf"{shard.name}.*cannot be read"):
        check(dataset.directory, progress=False)
    with pytest.raises(DataError, match=rf"{shard.name}.*cannot be read"):
        list(islice(stream(dataset), 500))


def test_preparing_again_mends_deleted_shards(dataset: DatasetIndex, tmp_path: Path) -> None:
    (dataset.directory / victim(dataset).name).unlink()
    mended = small_dataset(tmp_path, shard_tokens=5000, unit_bytes=6000)
    assert mended.digest == dataset.digest
    check(mended.directory, progress=False)


@pytest.mark.parametrize(
    ("damage", "workers"), [(truncate, 0), (truncate, 1), (flip_a_bit, 0), (drop_a_member, 0)]
)
def test_an_allowed_damaged_shard_is_masked_and_every_other_token_keeps_its_place(
    dataset: DatasetIndex, damage: Callable[[Path], None], workers: int
) -> None:
    steps = stream(dataset)._order.epoch_sequences(0) // 8
    whole = list(islice(stream(dataset), steps))
    shard = victim(dataset)
    damage(dataset.directory / shard.name)
    damaged = stream(dataset, damaged_shards_allowed=1, workers=workers)
    masked = 0
    for good, bad in zip(whole, islice(damaged, steps), strict=True):
        assert good.position == bad.position
        for g, b in zip(good.micro_batches, bad.micro_batches, strict=True):
            kept = b.labels >= 0
            assert bool((b.labels[kept] == g.labels[kept]).all())
            assert bool((b.labels[~kept] == -100).all())
            masked += int(((g.labels >= 0) & ~kept).sum())
    tail = stream(dataset)._order.epoch_sequences(0) - steps * 8
    assert shard.tokens + shard.documents - tail * 50 <= masked <= shard.tokens + shard.documents
    assert (damaged.lost_shards, damaged.corrupt_records) == (1, shard.documents)
    assert damaged.damaged == {shard.name: shard.documents}


def test_damage_of_every_shard_ends_training_whatever_is_allowed(dataset: DatasetIndex) -> None:
    for shard in dataset.split("train"):
        truncate(dataset.directory / shard.name)
    with pytest.raises(DataError, match="nothing is left to train on"):
        list(islice(stream(dataset, damaged_shards_allowed=99), 500))


def test_counts_survive_a_resume_and_the_limit_holds_across_it(dataset: DatasetIndex) -> None:
    first, second = dataset.split("train")[:2]
    for shard in (first, second):
        truncate(dataset.directory / shard.name)
    with pytest.raises(DataError, match=r"Damaged so far: 2, data\.damaged_shards_allowed=1"):
        list(islice(stream(dataset, damaged_shards_allowed=1), 500))
    counted = {first.name: first.documents, "train-99999-000.tar": 7}
    with pytest.raises(DataError, match="Damaged so far: 3"):
        list(islice(stream(dataset, damaged_shards_allowed=2, damaged=counted), 500))
    resumed = stream(dataset, damaged_shards_allowed=3, damaged=counted)
    list(islice(resumed, 100))
    assert (resumed.lost_shards, resumed.corrupt_records) == (3, first.documents + 7 + second.documents)


def test_all_data_ranks_count_damage_at_the_same_step(dataset: DatasetIndex) -> None:
    order = stream(dataset)._order
    second_pool = order.pools(0)[1]
    assert second_pool.first_sequence % 8, "the second pool has to begin inside a step"
    truncate(dataset.directory / order.shards[second_pool.shards[0]].name)
    counts = []
    for rank in range(4):
        batches = stream(dataset, data_rank=rank, data_size=4, damaged_shards_allowed=1)
        counts.append([batches.lost_shards for _ in islice(batches, 60)])
    assert counts[0] == counts[1] == counts[2] == counts[3]
    assert set(counts[0]) == {0, 1}
    stopped = []
    for rank in range(4):
        batches = stream(dataset, data_rank=rank, data_size=4)
        with pytest.raises(DataError):
            list(islice(batches, 60))
        stopped.append(batches.position)
    assert len(set(stopped)) == 1


def test_an_error_in_a_loader_process_arrives_as_itself(dataset: DatasetIndex) -> None:
    shard = victim(dataset)
    truncate(dataset.directory / shard.name)
    with pytest.raises(DataError, match=rf"^damaged shard: .*{shard.name}"):
        list(islice(stream(dataset, workers=1), 500))


class Explosive:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return (open, ("exploded", "w"))


def packed(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "name",
    ["00000-0000000.pkl", "00000-0000000.pyd", "../00000-0000000.tokens.npy", "__main__.py", "a.npy.gz"],
)
def test_members_that_are_not_allow_listed_are_refused(name: str) -> None:
    with pytest.raises(BadShard, match="is not allowed in a shard"):
        list(scan_samples(packed((name, pickle.dumps(Explosive())))))


def test_links_and_devices_are_refused() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("00000-0000000.tokens.npy")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(BadShard, match="is not allowed"):
        list(scan_samples(buffer.getvalue()))


def test_compressed_tars_are_refused_unread() -> None:
    with pytest.raises(BadShard, match="the tar is damaged"):
        list(scan_samples(gzip.compress(packed(("00000-0000000.tokens.npy", b"")))))


def test_pickled_and_boasting_arrays_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lengths = io.BytesIO()
    np.save(lengths, np.array([1], "<u4"))
    pickled = io.BytesIO()
    np.save(pickled, np.array([Explosive()], dtype=object), allow_pickle=True)
    with pytest.raises(BadShard, match="not a token array: dtype"):
        read_sample("k", {"tokens.npy": pickled.getvalue(), "lengths.npy": lengths.getvalue()}, 0)
    boasting = lengths.getvalue().replace(b"(1,)", b"(9,)")
    with pytest.raises(BadShard, match="does not fit"):
        read_sample("k", {"tokens.npy": boasting, "lengths.npy": lengths.getvalue()}, 0)
    assert not (tmp_path / "exploded").exists()


def test_a_hostile_shard_with_a_fitting_index_runs_nothing(
    dataset: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes shard and index can give wrong tokens, and no more."""
    monkeypatch.chdir(tmp_path)
    shard = victim(dataset)
    data = packed(("00000-0000000.pkl", pickle.dumps(Explosive())))
    (dataset.directory / shard.name).write_bytes(data)
    content = json.loads((dataset.directory / "index.json").read_text())
    for entry in content["shards"]:
        if entry["name"] == shard.name:
            entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    content["digest"] = index_module._digest(content)
    (dataset.directory / "index.json").write_text(json.dumps(content))
    hostile = load_index(dataset.directory)
    with pytest.raises(BadShard, match="is not allowed"):
        read_shard(hostile, next(s for s in hostile.shards if s.name == shard.name))
    assert not (tmp_path / "exploded").exists()


def test_ids_beyond_the_vocabulary_never_reach_the_model(
    dataset: DatasetIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = dataset.tokenizer.model_copy(update={"vocab_size": 50})
    with pytest.raises(BadShard, match="another vocabulary"):
        read_shard(dataset.model_copy(update={"tokenizer": tokenizer}), victim(dataset))
