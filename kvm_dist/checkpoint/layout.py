"""Where every tensor of a checkpoint lies: from names and shapes alone, so alike on every rank."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

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
_FILES = 16
_SMALLEST_PART, _LARGEST_PART = 64 << 20, 1 << 30  # bytes


@dataclass(frozen=True)
class TensorSpec:
    """A whole tensor of a checkpoint, without its elements."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """A safetensors file: `header` first, then each tensor from its byte in `offsets` on."""

    name: str
    header: bytes
    offsets: Mapping[str, int]
    size: int


def lay_out(stem: str, specs: Sequence[TensorSpec], part_bytes: int) -> list[FileLayout]:
    """`STEM.safetensors`, or `STEM-00001-of-00003.safetensors` and so on.

    A file holds at most `part_bytes` of tensors, or one larger tensor.
    """
    parts = list(_parts(specs, part_bytes))
    if len(parts) == 1:
        return [_file(f"{stem}.safetensors", parts[0])]
    names = [f"{stem}-{index + 1:05d}-of-{len(parts):05d}.safetensors" for index in range(len(parts))]
    return [_file(name, part) for name, part in zip(names, parts, strict=True)]


def part_size(total: int) -> int:
    """Of files of a checkpoint of `total` bytes: enough files to work at side by side, none of them tiny."""
    return min(max(total // _FILES, _SMALLEST_PART), _LARGEST_PART)


def _parts(specs: Sequence[TensorSpec], part_bytes: int) -> Iterator[list[TensorSpec]]:
    part: list[TensorSpec] = []
    size = 0
    for spec in specs:
        if part and size + spec.bytes > part_bytes:
            yield part
            part, size = [], 0
        part.append(spec)
        size += spec.bytes
    yield part


def _file(name: str, specs: list[TensorSpec]) -> FileLayout:
    """Header length, JSON header, the bytes of each tensor, widest type first."""
    ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for spec in ordered:
        starts[spec.key], begin, end = end, end, end + spec.bytes
        described[spec.key] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(
        name, header, {key: len(header) + start for key, start in starts.items()}, len(header) + end
    )
