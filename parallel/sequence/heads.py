"""Attention to all earlier tokens of a sequence on ranks that each take some heads of all its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.mesh import Mesh
from parallel.sequence.context import CausalAttention
from parallel.sequence.problems import naming_problems
from parallel.sequence.relay import gradient_name


class AllToAll(Protocol):
    """Raw transport in which every sequence rank gives each rank of its row a part, itself included."""

    def swap(self, name: str, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """parts: one for each rank. Returns one from each, of the shapes and dtypes of `like`."""
        ...


class RowAllToAll:
    """`AllToAll` over the process group of a row. Raises TimeoutError or ConnectionError naming the swap."""

    def __init__(self, mesh: Mesh) -> None:
        if mesh.row is None:
            raise ValueError("parallel.sequence=1 has no ranks to swap heads with")
        self._mesh, self._group = mesh, mesh.row
        self.bytes_sent = 0

    def swap(self, name: str, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        sizes = [part.numel() for part in self._along_the_row(parts)]
        expected = [tensor.numel() for tensor in self._along_the_row(like)]
        sent = torch.cat([part.detach().reshape(-1) for part in self._along_the_row(parts)])
        received = sent.new_empty(sum(expected))
        with naming_problems(self._mesh, f"not all ranks came to {name!r}", f"{name!r} failed"):
            work = dist.all_to_all_single(received, sent, expected, sizes, group=self._group, async_op=True)
            work.wait(timedelta(seconds=self._mesh.timeout_seconds))
        to_others = sum(sizes) - parts[self._mesh.sequence_rank].numel()
        self.bytes_sent += to_others * sent.element_size()
        flat = self._along_the_row(received.split(expected))
        return [own.view(one.shape) for own, one in zip(flat, like, strict=True)]

    def _along_the_row(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """From the order of the sequence to that of the process group, or back."""
        return tensors[::-1] if self._mesh.descending else tensors


def attend_by_heads(
    all_to_all: AllToAll,
    name: str,
    attention: CausalAttention,
    lengths: Sequence[int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """query, key, value [B, T, H, D] of this rank -> [B, T, H, D], the bits of one rank.

    lengths: tokens of every rank, this one included, in rank order; H must be divisible by their number.
    """
    swaps = _Swaps(all_to_all, tuple(lengths), query.shape[1])
    inward = partial(swaps.to_heads, f"{name}.heads")
    outward = partial(swaps.to_tokens, f"{name}.tokens")
    inward_back = partial(swaps.to_tokens, gradient_name(f"{name}.heads"))
    outward_back = partial(swaps.to_heads, gradient_name(f"{name}.tokens"))
    whole = _Swap.apply(inward, inward_back, torch.stack([query, key, value]))
    output = attention.whole(*whole).unsqueeze(0)
    local: Tensor = _Swap.apply(outward, outward_back, output)
    return local[0]


@dataclass(frozen=True)
class _Swaps:
    """Between the tokens of one rank and the heads of one rank, each other's gradient."""

    all_to_all: AllToAll
    lengths: tuple[int, ...]
    own: int

    def to_heads(self, name: str, z: Tensor) -> Tensor:
        """Own tokens, all heads [n, B, T, H, D] -> all tokens, own heads [n, B, sum of lengths, H/R, D]."""
        parts = z.chunk(len(self.lengths), dim=3)
        like = [self._of_length(parts[0], length) for length in self.lengths]
        return torch.cat(self.all_to_all.swap(name, parts, like), dim=2)

    def to_tokens(self, name: str, z: Tensor) -> Tensor:
        """All tokens, own heads -> own tokens, all heads."""
        parts = z.split(self.lengths, dim=2)
        like = [self._of_length(z, self.own)] * len(self.lengths)
        return torch.cat(self.all_to_all.swap(name, parts, like), dim=3)

    @staticmethod
    def _of_length(z: Tensor, length: int) -> Tensor:
        return z.new_empty(*z.shape[:2], length, *z.shape[3:])


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, move: Callable[[Tensor], Tensor], move_back: Callable[[Tensor], Tensor], z: Tensor
    ) -> Tensor:
        ctx.move_back = move_back
        return move(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.move_back(gradient)
