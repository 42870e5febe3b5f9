"""Writes named tensors into safetensors files of bounded size, one part in memory at a time."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from kvm_dist.checkpoint.durable import FileEntry, write_durably

_WRITE_BYTES = 16 << 20
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class PartWriter:
    """Writes tensors to `STEM.safetensors`, or to `STEM-00001-of-00003.safetensors` and so on.

    A tensor must stay unchanged from `add` until its part is written (at the latest in `finish`).
    """

    def __init__(self, folder: Path, stem: str, part_bytes: int) -> None:
        self._folder = folder
        self._stem = stem
        self._part_bytes = part_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._written: list[FileEntry] = []

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._waiting_bytes + size > self._part_bytes:
            self._write_part()
        self._waiting[name] = tensor.detach()
        self._waiting_bytes += size

    def finish(self) -> dict[str, FileEntry]:
        """Writes what waits and gives every part its final name; returns name -> size and hash."""
        if self._waiting or not self._written:
            self._write_part()
        count = len(self._written)
        files = {}
        for index, entry in enumerate(self._written):
            name = f"{self._stem}.safetensors"
            if count > 1:
                name = f"{self._stem}-{index + 1:05d}-of-{count:05d}.safetensors"
            os.rename(self._part_path(index), self._folder / name)
            files[name] = entry
        return files

    def _write_part(self) -> None:
        path = self._part_path(len(self._written))
        self._written.append(write_durably(path, _serialise(self._waiting), tensors=len(self._waiting)))
        self._waiting = {}
        self._waiting_bytes = 0

    def _part_path(self, index: int) -> Path:
        return self._folder / f"{self._stem}.part-{index:05d}"


def _serialise(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The safetensors layout: header length, JSON header, the bytes of each tensor, widest type first."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        dtype = _DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for _, tensor in ordered:
        raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(raw), _WRITE_BYTES):
            yield raw[start : start + _WRITE_BYTES]
