"""Ranks that each take some heads of all their tokens: tensors go from tokens to heads and back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.sequence.all_to_all import AllToAll, Flight, Part
from parallel.sequence.context import CausalAttention, HeadSplit
from parallel.sequence.relay import gradient_name


@dataclass(frozen=True)
class HeadRanks:
    """Ranks that give each other tokens and take heads.

    place: of this rank among them. lengths: tokens of every rank. heads: those that are split, of which each
    rank takes a group of neighbours; other tensors have a multiple of them and are split alike.
    """

    all_to_all: AllToAll
    place: int
    lengths: tuple[int, ...]
    heads: int

    @property
    def groups(self) -> tuple[slice, ...]:
        """Heads of every rank."""
        return HeadSplit(len(self.lengths)).of(self.heads)

    def to_heads(self, name: str, local: Part) -> "Landing":
        """Own tokens, all heads [B, T, heads, ...] -> all tokens, own heads [B, all T, heads, ...]."""
        parts = [self._of(rank, local) for rank in range(len(self.lengths))]
        own = parts[self.place]
        whole = tuple(_like(one, 1, sum(self.lengths)) for one in own)
        places = [tuple(one.split(self.lengths, dim=1)[rank] for one in whole) for rank in range(len(parts))]
        return Landing(whole, places, self.all_to_all.start(name, parts, places))

    def to_tokens(self, name: str, whole: Part) -> "Landing":
        """All tokens, own heads -> own tokens, all heads: the gradient of `to_heads`."""
        split = [one.split(self.lengths, dim=1) for one in whole]
        parts: list[Part] = list(zip(*split, strict=True))
        own = self.groups[self.place]
        factors = [one.shape[2] // (own.stop - own.start) for one in whole]
        local = tuple(
            _like(one, 2, factor * self.heads) for one, factor in zip(parts[self.place], factors, strict=True)
        )
        places = [self._of(rank, local) for rank in range(len(self.lengths))]
        return Landing(local, places, self.all_to_all.start(name, parts, places))

    def _of(self, rank: int, local: Part) -> Part:
        """The heads that a rank takes of tensors with all of them."""
        return tuple(one[:, :, self._among(rank, one.shape[2])] for one in local)

    def _among(self, rank: int, total: int) -> slice:
        factor, own = total // self.heads, self.groups[rank]
        return slice(own.start * factor, own.stop * factor)


def _like(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Not filled: of another size in one dimension."""
    return tensor.new_empty((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]))


@dataclass(frozen=True)
class Landing:
    """Tensors on their way. places: views of what comes from each rank; not filled until it has landed."""

    tensors: Part
    places: Sequence[Part]
    flight: Flight

    def land(self) -> Part:
        with torch.no_grad():
            for place, part in zip(self.places, self.flight.land(), strict=True):
                for to, source in zip(place, part, strict=True):
                    to.copy_(source)
        return self.tensors


class HeadSwap:
    """Some tensors' way from tokens to heads, or else to tokens, and that of their gradients in reverse.

    `start`, then `land`. In the backward autograd starts the gradients and waits for them at once, unless
    `start_back` was given them before. name: of the message.
    """

    def __init__(self, ranks: HeadRanks, name: str, *, to_heads: bool) -> None:
        self._name = name
        ways: list[Callable[[str, Part], Landing]] = [ranks.to_tokens, ranks.to_heads]
        self._go, self._go_back = ways[to_heads], ways[not to_heads]
        self._there: Landing | None = None
        self._back: Landing | None = None
        self.has_gradient = False

    def start(self, given: Part) -> Part:
        """The tensors as they will be once `land` has filled them. Differentiable."""
        self.has_gradient = torch.is_grad_enabled() and any(one.requires_grad for one in given)
        started: Part = _Start.apply(self, *given)
        return started

    def land(self) -> None:
        assert self._there is not None, f"{self._name}: started once, landed once"
        self._there.land()
        self._there = None

    def start_back(self, gradients: Part) -> None:
        """The gradients of the tensors that `start` returned, which autograd then is not given."""
        self._back = self._go_back(gradient_name(self._name), gradients)

    def depart(self, given: Part) -> Part:
        self._there = self._go(self._name, given)
        return self._there.tensors

    def gradients(self, given: tuple[Tensor | None, ...]) -> Part:
        """Those of what `start` was given. given: of what it returned, unless they left before."""
        if self._back is None:
            self.start_back(tuple(one for one in given if one is not None))
        assert self._back is not None, "started"
        landed, self._back = self._back.land(), None
        return landed


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, swap: HeadSwap, *given: Tensor) -> Part:
        ctx.swap = swap
        ctx.set_materialize_grads(False)
        return swap.depart(given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.swap.gradients(gradients)


def attend_by_heads(
    ranks: HeadRanks, name: str, attention: CausalAttention, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """query, key, value [B, T, H, D] of this rank -> [B, T, H, D], the bits of one rank."""
    inward = HeadSwap(ranks, f"{name}.heads", to_heads=True)
    whole = inward.start((query, key, value))
    inward.land()
    outward = HeadSwap(ranks, f"{name}.tokens", to_heads=False)
    (local,) = outward.start((attention.whole(*whole),))
    outward.land()
    return local
