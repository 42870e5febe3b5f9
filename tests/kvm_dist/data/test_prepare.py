import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvm_dist.data import prepare as prepare_module
from kvm_dist.data.check import check
from kvm_dist.data.files import locked
from kvm_dist.data.index import load_index
from kvm_dist.data.prepare import prepare
from kvm_dist.data.shards import split_documents
from kvm_dist.exit_codes import ConfigError, DataError, StorageError
from tests.kvm_dist.data.corpus import small_dataset, text_of, write_folder, write_lines


def texts(directory: Path, split: str) -> list[bytes]:
    return [document.tobytes() for document in split_documents(load_index(directory), split)]  # type: ignore[arg-type]


def test_every_document_lands_whole_in_exactly_one_split(tmp_path: Path) -> None:
    index = small_dataset(tmp_path)
    train, validation = texts(index.directory, "train"), texts(index.directory, "validation")
    wanted = [text_of(number, 40 + number % 7).encode() for number in range(60)]
    assert sorted(train + validation) == sorted(wanted)
    assert 2 <= len(validation) <= 30
    assert len(index.split("train")) > 3
    assert index.tokens("train") == sum(map(len, train))
    check(index.directory, progress=False)


def test_copies_of_a_document_fall_on_one_side(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text_of(number % 20, 10)}) for number in range(100)]
    source.write_text("\n".join(lines))
    prepare(source, tmp_path / "out", validation_fraction=0.4, progress=False)
    assert not set(texts(tmp_path / "out", "train")) & set(texts(tmp_path / "out", "validation"))


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_both_splits_hold_a_document_whatever_the_fraction(tmp_path: Path, fraction: float) -> None:
    index = small_dataset(tmp_path, validation_fraction=fraction)
    smaller = min(texts(index.directory, "train"), texts(index.directory, "validation"), key=len)
    assert len(smaller) == 1
    check(index.directory, progress=False)
    again = small_dataset(tmp_path, validation_fraction=fraction)
    assert again.digest == index.digest


def test_one_document_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("only one")
    with pytest.raises(DataError, match="one document; training and validation need at least two"):
        prepare(tmp_path / "text", tmp_path / "out", progress=False)


def test_number_of_processes_and_repetition_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "IN_PROCESS_BYTES", 0)
    digests = [small_dataset(tmp_path / name, workers=n).digest for name, n in [("a", 1), ("b", 2), ("b", 2)]]
    assert len(set(digests)) == 1


def test_short_documents_share_samples_and_long_ones_get_shards_of_their_own(tmp_path: Path) -> None:
    source = tmp_path / "text"
    source.mkdir()
    for number in range(40):
        (source / f"{number:02d}.txt").write_text(text_of(number, 5))
    (source / "long.txt").write_text(text_of(99, 20_000))
    index = prepare(source, tmp_path / "out", shard_tokens=4000, progress=False)
    assert sum(shard.samples for shard in index.shards) < 20
    assert any(shard.documents == 1 and shard.tokens > 4000 for shard in index.shards)
    check(index.directory, progress=False)


def test_finished_units_are_kept_and_changed_inputs_are_prepared_again(tmp_path: Path) -> None:
    index = small_dataset(tmp_path)
    before = {path.name: path.stat().st_ino for path in index.directory.glob("*.tar")}
    small_dataset(tmp_path)
    assert {path.name: path.stat().st_ino for path in index.directory.glob("*.tar")} == before
    changed = tmp_path / "text" / "part0" / "000.txt"
    changed.write_bytes(b"c" * changed.stat().st_size)
    small_dataset(tmp_path)
    after = {path.name: path.stat().st_ino for path in index.directory.glob("*.tar")}
    kept = {name for name in after if before.get(name) == after[name]}
    assert kept
    assert kept != set(after)
    everything = texts(tmp_path / "data", "train") + texts(tmp_path / "data", "validation")
    assert changed.read_bytes() in everything
    assert len(everything) == 60


def test_shards_of_a_source_that_shrank_are_removed(tmp_path: Path) -> None:
    index = small_dataset(tmp_path)
    for path in (tmp_path / "text" / "part2").iterdir():
        path.unlink()
    smaller = small_dataset(tmp_path)
    on_disk = {path.name for path in index.directory.glob("*.tar")}
    assert on_disk == {shard.name for shard in smaller.shards}
    assert len(texts(tmp_path / "data", "train") + texts(tmp_path / "data", "validation")) == 40


def test_other_settings_in_a_prepared_folder_are_refused(tmp_path: Path) -> None:
    small_dataset(tmp_path)
    with pytest.raises(ConfigError, match=r"another tokenizer \(there 'bytes', now 'rwkv-world'\)"):
        small_dataset(tmp_path, tokenizer_name="rwkv-world")
    with pytest.raises(ConfigError, match="another validation_fraction"):
        small_dataset(tmp_path, validation_fraction=0.5)


def test_a_folder_that_another_process_prepares_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data" / ".prepare").mkdir(parents=True)
    with (
        locked(tmp_path / "data" / ".prepare" / "lock", wait=False),
        pytest.raises(ConfigError, match="another process is preparing"),
    ):
        small_dataset(tmp_path)


def test_an_output_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file is in the way")
    with pytest.raises(StorageError, match="preparing"):
        small_dataset(tmp_path)


def test_bad_input_in_a_process_is_reported_as_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "IN_PROCESS_BYTES", 0)
    source = write_folder(tmp_path / "text", documents=6)
    (source / "bad.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r'bad\.jsonl:1: no key "text"'):
        prepare(source, tmp_path / "out", unit_bytes=1000, workers=2, progress=False)
    assert not (tmp_path / "out" / "index.json").exists()


def test_token_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    np.save(tmp_path / "text" / "a.npy", np.array([1, 300]))
    with pytest.raises(DataError, match="wanted 0 to 255"):
        prepare(tmp_path / "text", tmp_path / "out", progress=False)


def test_the_dataset_does_not_read_itself(tmp_path: Path) -> None:
    source = write_folder(tmp_path, documents=20)
    first = prepare(source, tmp_path / "data", progress=False)
    assert prepare(source, tmp_path / "data", progress=False).digest == first.digest


def test_a_source_inside_the_output_folder_is_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path, documents=20)
    for out in (source, tmp_path):
        with pytest.raises(ConfigError, match="choose another folder"):
            prepare(source, out, progress=False)


KILLED = """
import sys
from kvm_dist.data import prepare as module
module.IN_PROCESS_BYTES = 0
if __name__ == "__main__":
    print("started", flush=True)
    module.prepare(sys.argv[1], sys.argv[2], shard_tokens=3000, unit_bytes=3000, workers=2, progress=False)
"""


def test_a_killed_preparation_goes_on_to_the_same_dataset(tmp_path: Path) -> None:
    """Kills the command at many moments; no shard is ever partial under its final name."""
    source = write_lines(tmp_path / "a.jsonl", documents=300)
    settings = {"shard_tokens": 3000, "unit_bytes": 3000, "progress": False}
    script = tmp_path / "run.py"
    script.write_text(KILLED)
    undisturbed = prepare(source, tmp_path / "undisturbed", **settings)  # type: ignore[arg-type]
    sizes = {shard.name: shard.bytes for shard in undisturbed.shards}
    interrupted = 0
    out = tmp_path / "killed"
    for shards in (0, 1, 5, 10, 20):
        process = subprocess.Popen(
            [sys.executable, str(script), str(source), str(out)], stdout=subprocess.PIPE, env=_environment()
        )
        assert process.stdout is not None
        process.stdout.readline()
        while len(list(out.glob("*.tar"))) < shards and process.poll() is None:
            time.sleep(0.002)
        process.kill()
        interrupted += process.wait() == -signal.SIGKILL
        process.stdout.close()
        for path in out.glob("*.tar"):
            assert path.stat().st_size == sizes[path.name]
    assert interrupted >= 3
    assert prepare(source, out, **settings).digest == undisturbed.digest  # type: ignore[arg-type]
    check(out, progress=False)
    assert not list((out / ".prepare").glob("*.tmp"))


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}


def test_a_kill_at_every_file_written_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops at each rename in turn, before and after it, as a kill would: nothing is cleaned up."""
    undisturbed = small_dataset(tmp_path / "a")
    interrupted = 0
    while not (tmp_path / "b" / "data" / "index.json").exists():
        with monkeypatch.context() as patched:
            _kill_at_rename(patched, 1 + interrupted % 9, after=interrupted % 2 == 0)
            with contextlib.suppress(_Killed):
                small_dataset(tmp_path / "b")
        interrupted += 1
        assert interrupted < 200
    assert interrupted > 5
    again = small_dataset(tmp_path / "b")
    assert again.digest == undisturbed.digest
    check(again.directory, progress=False)


class _Killed(BaseException):
    pass


def _kill_at_rename(patched: pytest.MonkeyPatch, count: int, after: bool) -> None:
    left = count
    rename = Path.replace

    def killed_rename(self: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left == 0 and not after:
            raise _Killed
        renamed = rename(self, target)
        if left == 0:
            raise _Killed
        return renamed

    patched.setattr(Path, "replace", killed_rename)
    patched.setattr(Path, "unlink", lambda self, missing_ok=False: None)
