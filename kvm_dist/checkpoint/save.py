"""Saves a checkpoint: all ranks write into a partial folder, rank 0 reads it back and puts it in place."""

import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvm_dist.checkpoint.durable import FileEntry, sync_folder, write_durably
from kvm_dist.checkpoint.folder import CheckpointInfo, partial_folder, put_in_place, step_folder
from kvm_dist.checkpoint.layout import FileLayout
from kvm_dist.checkpoint.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest, verify_files
from kvm_dist.checkpoint.parts import (
    FAILED,
    SYNCED,
    WRITTEN,
    Range,
    create_files,
    marker_path,
    read_share,
)
from kvm_dist.exit_codes import StorageError

GIBIBYTE = 1 << 30
_READ_BYTES = 4 << 20
_HASH_THREADS = 4
_MANIFEST_BYTES = 64 << 10  # at most, of any sane number of files and ranks
_LONGEST_SILENCE = 3600.0  # seconds without news of any share


@dataclass(frozen=True)
class Draft:
    """A save under way. `partial`: its folder, which never counts as a checkpoint."""

    checkpoints: Path
    step: int
    layouts: Sequence[FileLayout]
    texts: Mapping[str, str]
    partial: Path

    @property
    def needed(self) -> int:
        """Bytes on the disk, known before anything is written."""
        texts = sum(len(text.encode()) for text in self.texts.values())
        return sum(layout.size for layout in self.layouts) + texts + _MANIFEST_BYTES


def state_text(state: Mapping[str, object], step: int) -> str:
    return json.dumps({**state, "step": step}, indent=2, sort_keys=True, allow_nan=False) + "\n"


def begin_save(
    checkpoints: Path, step: int, layouts: Sequence[FileLayout], texts: Mapping[str, str]
) -> Draft:
    """On rank 0: the partial folder with all files at their size, for the ranks to `write_share` into.

    layouts: what `lay_out` says of model, optimizer and rng.  texts: file name -> content, written by rank 0.
    Raises StorageError when the disk has too little space or cannot be written; nothing stays behind then.
    """
    draft = Draft(checkpoints, step, layouts, texts, partial_folder(checkpoints, step))
    try:
        os.makedirs(checkpoints, mode=0o750, exist_ok=True)
        available = free_bytes(checkpoints)
        if available < draft.needed:
            raise StorageError(
                f"not enough space for a checkpoint in {checkpoints}: need {draft.needed} bytes, "
                f"have {available}"
            )
        draft.partial.mkdir(mode=0o750)
        create_files(draft.partial, layouts)
    except OSError as error:
        shutil.rmtree(draft.partial, ignore_errors=True)
        raise StorageError(_explain(draft, error)) from error
    return draft


def finish_save(draft: Draft, ranks: int) -> CheckpointInfo:
    """On rank 0, beside the writing of its own share: wait for all, read everything back, put it into place.

    The files are hashed while they are still syncing; the manifest is written when all have synced.
    Raises StorageError if any share failed or is not on the disk as it was written; the partial folder is
    removed then, and older checkpoints are untouched.
    """
    try:
        _wait_for(draft.partial, ranks, (WRITTEN, SYNCED))
        files = _read_back(draft, ranks)
        _wait_for(draft.partial, ranks, (SYNCED,))
        for rank in range(ranks):
            marker_path(draft.partial, rank, SYNCED).unlink()
        files |= _write_texts(draft)
        manifest = _seal(draft, files)
        put_in_place(draft.partial, step_folder(draft.checkpoints, draft.step))
    except (OSError, StorageError) as error:
        shutil.rmtree(draft.partial, ignore_errors=True)
        raise StorageError(_explain(draft, error)) from error
    except BaseException:
        shutil.rmtree(draft.partial, ignore_errors=True)
        raise
    return CheckpointInfo(
        step_folder(draft.checkpoints, draft.step), draft.step, manifest.total_bytes, valid=True
    )


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _wait_for(partial: Path, ranks: int, states: Sequence[str]) -> None:
    """Until the share of every rank is in one of `states`. By files: a collective would hold up the steps."""
    seen: set[str] = set()
    last_news = time.monotonic()
    while True:
        names = {name for name in os.listdir(partial) if name.startswith("rank-")}
        for name in sorted(names):
            rank_name, _, state = name.partition(".")
            if state.startswith(FAILED):
                raise OSError(f"{rank_name} could not write: {os.strerror(int(state.rpartition('-')[2]))}")
        missing = [
            rank
            for rank in range(ranks)
            if not any(marker_path(partial, rank, state).name in names for state in states)
        ]
        if not missing:
            return
        if names != seen:
            seen, last_news = names, time.monotonic()
        if time.monotonic() - last_news > _LONGEST_SILENCE:
            raise OSError(f"ranks {missing} did not write their parts in {_LONGEST_SILENCE:.0f} s")
        time.sleep(0.02)


def _read_back(draft: Draft, ranks: int) -> dict[str, FileEntry]:
    """Size and hash of every tensor file, of which each byte is what a rank meant to write."""
    shares = [read_share(draft.partial, rank) for rank in range(ranks)]

    def entry(layout: FileLayout) -> FileEntry:
        ranges = sorted(
            (part for share in shares for part in share.get(layout.name, [])), key=lambda part: part.offset
        )
        digest = _checked_hash(draft.partial / layout.name, ranges, layout.size)
        return FileEntry(size=layout.size, sha256=digest, tensors=len(layout.offsets))

    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return dict(zip((lay.name for lay in draft.layouts), pool.map(entry, draft.layouts), strict=True))


def _checked_hash(path: Path, ranges: list[Range], size: int) -> str:
    """The file's sha256. Its ranges must follow each other without gap and hold what was written."""
    digest = hashlib.sha256()
    end = 0
    with path.open("rb", buffering=_READ_BYTES) as file:
        for part in ranges:
            if part.offset != end:
                raise StorageError(f"{path}: bytes {end} to {part.offset} were written by no rank or by two")
            end += part.size
            crc, rest = 0, part.size
            while rest and (chunk := file.read(min(rest, _READ_BYTES))):
                digest.update(chunk)
                crc = zlib.crc32(chunk, crc)
                rest -= len(chunk)
            if rest or crc != part.crc:
                raise StorageError(f"{path}: bytes {part.offset} to {end} are not as they were written")
    if end != size:
        raise StorageError(f"{path}: {end} bytes were written, wanted {size}")
    return digest.hexdigest()


def _write_texts(draft: Draft) -> dict[str, FileEntry]:
    return {name: write_durably(draft.partial / name, [text.encode()]) for name, text in draft.texts.items()}


def _seal(draft: Draft, files: dict[str, FileEntry]) -> Manifest:
    """The manifest is the last file: what has one is whole."""
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        step=draft.step,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        tensor_count=sum(entry.tensors for entry in files.values()),
        files=files,
    ).sealed()
    sync_folder(draft.partial)
    write_durably(draft.partial / MANIFEST_NAME, [manifest.text().encode()])
    sync_folder(draft.partial)
    verify_files(draft.partial, manifest, draft.texts)
    return manifest


def _explain(draft: Draft, error: Exception) -> str:
    if isinstance(error, StorageError):
        return str(error)
    have = free_bytes(draft.checkpoints) if draft.checkpoints.is_dir() else 0
    return f"cannot save into {draft.checkpoints}: {error} (need {draft.needed} bytes, have {have})"
