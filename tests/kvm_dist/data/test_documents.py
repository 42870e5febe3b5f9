import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import zstandard

from kvm_dist.data import documents
from kvm_dist.data.documents import PYTHON_STDLIB, find_pieces, read_documents
from kvm_dist.exit_codes import ConfigError, DataError
from tests.kvm_dist.data.corpus import text_of, write_folder, write_lines


def contents(source: Path) -> list[bytes]:
    return [document.content for piece in find_pieces(str(source)) for document in read_documents(piece)]


def compress(path: Path, suffix: str) -> Path:
    packed = path.with_name(path.name + suffix)
    data = path.read_bytes()
    packed.write_bytes(gzip.compress(data) if suffix == ".gz" else zstandard.ZstdCompressor().compress(data))
    return packed


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines_give_one_document_a_line(tmp_path: Path, suffix: str) -> None:
    path = write_lines(tmp_path / "a.b.jsonl")
    path = compress(path, suffix) if suffix else path
    assert contents(path) == [text_of(number, 30).encode() for number in range(40)]


def test_json_lines_cut_into_ranges_give_every_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "a.jsonl")
    whole = contents(path)
    for size in (1, 97, 300, 4096):
        monkeypatch.setattr(documents, "LINES_PIECE_BYTES", size)
        assert contents(path) == whole


def test_a_long_text_file_is_cut_at_line_ends_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(text_of(number, 5) for number in range(50)).encode() + b"no newline at the end"
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "long.txt"
    path.write_bytes(text)
    assert contents(tmp_path / "folder") == [text]
    monkeypatch.setattr(documents, "TEXT_PIECE_BYTES", 200)
    pieces = contents(tmp_path / "folder")
    assert len(pieces) > 5
    assert b"".join(pieces) == text
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])


def test_a_lone_text_file_becomes_several_documents(tmp_path: Path) -> None:
    path = tmp_path / "input.txt"
    path.write_text("".join(text_of(number, 20) for number in range(200)))
    assert len(contents(path)) > 10
    assert b"".join(contents(path)) == path.read_bytes()


def test_a_folder_is_walked_in_sorted_order_without_hidden_binary_and_empty_files(tmp_path: Path) -> None:
    write_folder(tmp_path, documents=6)
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("no")
    (tmp_path / "binary.bin").write_bytes(b"a\0b")
    (tmp_path / "empty.txt").write_bytes(b"")
    assert contents(tmp_path) == [text_of(n, 40 + n % 7).encode() for n in (0, 3, 1, 4, 2, 5)]


def test_token_files_give_their_ids(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([5, 6, 7], np.int32))
    (document,) = (d for piece in find_pieces(str(tmp_path)) for d in read_documents(piece))
    assert document.tokens is not None
    assert document.tokens.tolist() == [5, 6, 7]


def test_pickled_token_files_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{"x": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"a\.npy: not a readable \.npy array"):
        contents(tmp_path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("not json", "Expecting value"),
        ("[1]", "got a JSON list"),
        ('{"content": "x"}', "no key \"text\" among \\['content'\\]"),
        ('{"text": 3}', '"text" is a int'),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, problem: str
) -> None:
    path = tmp_path / "bad.jsonl"
    good = [json.dumps({"text": "fine"})] * 20
    path.write_text("\n".join([*good, "", line, *good]))
    with pytest.raises(DataError, match=rf"bad\.jsonl:22: {problem}"):
        contents(path)
    monkeypatch.setattr(documents, "LINES_PIECE_BYTES", 50)
    with pytest.raises(DataError, match=rf"bad\.jsonl:22: {problem}"):
        contents(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_truncated_compressed_file_is_an_error_and_not_a_short_corpus(tmp_path: Path, suffix: str) -> None:
    packed = compress(write_lines(tmp_path / "a.jsonl"), suffix)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(DataError, match="damaged or truncated"):
        contents(packed)


def test_zstd_files_of_several_frames_are_read_to_the_end(tmp_path: Path) -> None:
    pack = zstandard.ZstdCompressor().compress
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(pack(b'{"text": "on') + pack(b'e"}\n{"text": "two"}'))
    assert contents(path) == [b"one", b"two"]


def test_the_standard_library_is_found() -> None:
    pieces = find_pieces(PYTHON_STDLIB)
    assert all(piece.path.suffix == ".py" for piece in pieces)
    assert not any("site-packages" in piece.path.parts for piece in pieces)
    assert "json" in {piece.path.parent.name for piece in pieces}


def test_a_missing_or_empty_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        find_pieces(str(tmp_path / "nothing"))
    with pytest.raises(DataError, match="no text found"):
        find_pieces(str(tmp_path))
