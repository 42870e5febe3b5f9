import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvm_dist.config import DataConfig
from kvm_dist.data.first_use import ensure_prepared
from kvm_dist.data.index import DatasetIndex, load_index, require_tokenizer, require_vocabulary
from kvm_dist.data.tokenizer import build_tokenizer
from kvm_dist.exit_codes import DataError
from tests.kvm_dist.data.corpus import small_dataset, write_folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetIndex:
    return small_dataset(tmp_path_factory.mktemp("dataset"))


def edited(dataset: DatasetIndex, folder: Path, **changes: object) -> Path:
    content = json.loads((dataset.directory / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**content, **changes}))
    return folder


def test_a_missing_index_says_which_command_to_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"index\.json is missing.*kvm-dist data prepare"):
        load_index(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"version": 1}'])
def test_a_damaged_index_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(DataError, match=r"index\.json is damaged"):
        load_index(tmp_path)


def test_an_edited_index_is_refused(dataset: DatasetIndex, tmp_path: Path) -> None:
    content = json.loads((dataset.directory / "index.json").read_text())
    content["shards"][0]["tokens"] += 1
    with pytest.raises(DataError, match="edited or damaged"):
        load_index(edited(dataset, tmp_path, shards=content["shards"]))


def test_another_version_is_refused(dataset: DatasetIndex, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="version 99, wanted 1"):
        load_index(edited(dataset, tmp_path, version=99))


@pytest.mark.parametrize("name", ["pipe:touch x", "../train-00000-000.tar", "/etc/passwd", "http://x/y.tar"])
def test_shard_names_that_leave_the_folder_or_run_commands_are_refused(
    dataset: DatasetIndex, tmp_path: Path, name: str
) -> None:
    content = json.loads((dataset.directory / "index.json").read_text())
    content["shards"][0]["name"] = name
    with pytest.raises(DataError, match=r"index\.json is damaged"):
        load_index(edited(dataset, tmp_path, shards=content["shards"]))


def test_another_tokenizer_is_refused(dataset: DatasetIndex) -> None:
    with pytest.raises(DataError, match=r"tokenizer 'bytes'.*data\.tokenizer is 'rwkv-world'"):
        require_tokenizer(dataset, build_tokenizer("rwkv-world"))
    require_tokenizer(dataset, build_tokenizer("bytes"))


def test_a_vocabulary_too_large_for_the_model_is_refused(dataset: DatasetIndex) -> None:
    with pytest.raises(DataError, match=r"below 256.*model\.vocab_size=255; set model\.vocab_size"):
        require_vocabulary(dataset, 255)
    require_vocabulary(dataset, 256)


def test_lengths_and_samples_belong_to_their_shards(dataset: DatasetIndex) -> None:
    lengths, checks = dataset.document_lengths(), dataset.sample_checks()
    for shard in dataset.shards:
        assert lengths[shard.name].size == shard.documents
        assert lengths[shard.name].sum() == shard.tokens
        assert checks[shard.name].shape == (shard.samples, 2)
        assert checks[shard.name][:, 0].sum() == shard.documents


def test_damaged_lengths_are_refused(tmp_path: Path) -> None:
    index = small_dataset(tmp_path)
    np.save(index.directory / "lengths.npy", np.zeros(3, np.uint32))
    with pytest.raises(DataError, match=r"lengths\.npy is missing or damaged"):
        index.document_lengths()


def config(folder: Path, **changes: object) -> DataConfig:
    return DataConfig.model_validate({"path": folder / "data", "source": str(folder / "text"), **changes})


def test_data_is_prepared_on_first_use_and_only_then(tmp_path: Path) -> None:
    write_folder(tmp_path / "text")
    first = ensure_prepared(config(tmp_path), vocab_size=256, progress=False)
    (tmp_path / "text" / "part0" / "000.txt").write_text("changed later")
    assert ensure_prepared(config(tmp_path), progress=False).digest == first.digest


def test_missing_data_without_a_source_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.source is not set; run `kvm-dist data prepare SOURCE"):
        ensure_prepared(config(tmp_path, source=None), progress=False)


def test_data_of_another_tokenizer_is_refused_before_training(tmp_path: Path) -> None:
    write_folder(tmp_path / "text")
    ensure_prepared(config(tmp_path), progress=False)
    with pytest.raises(DataError, match=r"data\.tokenizer is 'rwkv-world'"):
        ensure_prepared(config(tmp_path, tokenizer="rwkv-world"), progress=False)
    with pytest.raises(DataError, match=r"model\.vocab_size=100"):
        ensure_prepared(config(tmp_path), vocab_size=100, progress=False)


def test_processes_that_start_together_prepare_once(tmp_path: Path) -> None:
    write_folder(tmp_path / "text")
    code = (
        "from kvm_dist.config import DataConfig\nfrom kvm_dist.data.first_use import ensure_prepared\n"
        f"config = DataConfig(path={str(tmp_path / 'data')!r}, source={str(tmp_path / 'text')!r})\n"
        "print(ensure_prepared(config, progress=False).digest)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    digests = [process.communicate()[0].strip() for process in processes]
    assert len(digests[0]) == 64
    assert len(set(digests)) == 1
