"""Saves a checkpoint: into a partial folder, read back, then renamed into place."""

import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from kvm_dist.checkpoint.durable import FileEntry, sync_folder, write_durably
from kvm_dist.checkpoint.folder import (
    CheckpointInfo,
    inspect_folder,
    partial_folder,
    put_in_place,
    step_folder,
)
from kvm_dist.checkpoint.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest, verify_checkpoint
from kvm_dist.checkpoint.parts import PartWriter
from kvm_dist.exit_codes import StorageError

GIBIBYTE = 1 << 30
NamedTensors = Iterable[tuple[str, Mapping[str, Tensor]]]


def save_checkpoint(
    checkpoints: Path,
    step: int,
    named_tensors: NamedTensors,
    *,
    rng_states: Sequence[Mapping[str, Tensor]],
    state: Mapping[str, object],
    config_text: str,
    write: bool = True,
    expected_bytes: int | None = None,
    part_bytes: int = GIBIBYTE,
) -> CheckpointInfo | None:
    """Writes `checkpoints/step-XXXXXXXX/` and reads it back before it gets its final name.

    Every rank calls this at the same step, since producing `named_tensors` is collective; rank 0 passes
    `write=True` and gets the verified checkpoint, the others only drain the iterator and get None.

    named_tensors: (parameter name, {"weight": ..., "master": ..., "exp_avg": ..., "exp_avg_sq": ..., ...}),
        whole tensors; "weight" has the dtype of the forward, "master" is left out when it has the same dtype.
        Tensors must not be reused by the iterator (they are written part by part, up to `part_bytes` later).
    rng_states: one `capture_rng` per rank, in rank order.  state: JSON values; `step` is added.
    expected_bytes: free space asked for before anything is written; None: the size of the last checkpoint.

    Raises StorageError on rank 0 when the disk is full or cannot be written; its partial folder is removed,
    older checkpoints are untouched. The iterator is drained all the same: no rank is left waiting.
    """
    tensors = iter(named_tensors)
    if not write:
        _drain(tensors)
        return None
    partial = partial_folder(checkpoints, step)
    needed = expected_bytes or 0
    try:
        if expected_bytes is None:
            needed = _expected(checkpoints)
        _make_room(checkpoints, partial, needed)
        files = _write_tensors(partial, tensors, part_bytes)
        files |= _write_rest(partial, rng_states, {**state, "step": step}, config_text)
        manifest = _seal(partial, step, files)
        verify_checkpoint(partial)
        put_in_place(partial, step_folder(checkpoints, step))
    except (OSError, StorageError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        _drain(tensors)
        raise StorageError(_explain(checkpoints, error, needed)) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return CheckpointInfo(step_folder(checkpoints, step), step, manifest.total_bytes, valid=True)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _drain(tensors: NamedTensors) -> None:
    for _ in tensors:
        pass


def _expected(checkpoints: Path) -> int:
    return max((info.bytes for info in inspect_folder(checkpoints)), default=0)


def _make_room(checkpoints: Path, partial: Path, needed: int) -> None:
    os.makedirs(checkpoints, mode=0o750, exist_ok=True)
    available = free_bytes(checkpoints)
    if available < needed:
        raise StorageError(f"not enough space for a checkpoint: need {needed} bytes, have {available}")
    partial.mkdir(mode=0o750)


def _write_tensors(partial: Path, tensors: NamedTensors, part_bytes: int) -> dict[str, FileEntry]:
    """Weights under their own name, everything else as KIND.NAME beside them."""
    model = PartWriter(partial, "model", part_bytes)
    optimizer = PartWriter(partial, "optimizer", part_bytes)
    for name, kinds in tensors:
        weight = kinds["weight"]
        model.add(name, weight)
        for kind, tensor in kinds.items():
            if kind == "weight" or (kind == "master" and tensor.dtype == weight.dtype):
                continue
            optimizer.add(f"{kind}.{name}", tensor)
    return model.finish() | optimizer.finish()


def _write_rest(
    partial: Path, rng_states: Sequence[Mapping[str, Tensor]], state: Mapping[str, object], config_text: str
) -> dict[str, FileEntry]:
    rng = PartWriter(partial, "rng", GIBIBYTE)
    for rank, tensors in enumerate(rng_states):
        for kind, tensor in tensors.items():
            rng.add(f"rank-{rank:05d}.{kind}", tensor)
    state_text = json.dumps(state, indent=2, sort_keys=True, allow_nan=False) + "\n"
    return rng.finish() | {
        "state.json": write_durably(partial / "state.json", [state_text.encode()]),
        "config.yaml": write_durably(partial / "config.yaml", [config_text.encode()]),
    }


def _seal(partial: Path, step: int, files: dict[str, FileEntry]) -> Manifest:
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        step=step,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        tensor_count=sum(entry.tensors for entry in files.values()),
        files=files,
    ).sealed()
    sync_folder(partial)
    write_durably(partial / MANIFEST_NAME, [manifest.text().encode()])
    sync_folder(partial)
    return manifest


def _explain(checkpoints: Path, error: Exception, needed: int) -> str:
    if isinstance(error, StorageError):
        return str(error)
    have = free_bytes(checkpoints) if checkpoints.is_dir() else 0
    need = f"need {needed} bytes" if needed else "need an unknown number of bytes"
    return f"cannot save into {checkpoints}: {error} ({need}, have {have})"
