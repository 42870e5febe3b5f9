"""Tensors of any shapes and dtypes as one buffer of bytes, in which each begins where any dtype may."""

import math
from collections.abc import Sequence

from torch import Tensor

_ALIGNMENT = 16  # bytes


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(map(_padded_bytes, tensors))


def pack(tensors: Sequence[Tensor], buffer: Tensor) -> None:
    """Copy all into a buffer [packed_bytes]; what lies between them is not written."""
    offset = 0
    for tensor in tensors:
        _part(buffer, offset, tensor).copy_(tensor.detach())
        offset += _padded_bytes(tensor)


def unpacked(buffer: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Views of the tensors, of the shapes and dtypes of `like`, whose contents are not read."""
    tensors: list[Tensor] = []
    offset = 0
    for tensor in like:
        tensors.append(_part(buffer, offset, tensor))
        offset += _padded_bytes(tensor)
    return tuple(tensors)


def _padded_bytes(tensor: Tensor) -> int:
    return math.ceil(tensor.numel() * tensor.element_size() / _ALIGNMENT) * _ALIGNMENT


def _part(buffer: Tensor, offset: int, like: Tensor) -> Tensor:
    """The bytes from `offset` on as a tensor of the shape and dtype of `like`."""
    return buffer[offset : offset + like.numel() * like.element_size()].view(like.dtype).view(like.shape)
