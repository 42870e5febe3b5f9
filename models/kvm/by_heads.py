"""The whole operator split by heads inside a node of ranks; states go from node to node.

Every member gives each other member, for its group of the heads, the queries, keys, values and gates of its
tokens; runs the operator on its own heads and the tokens of all members, as one rank of a sequence that has
the nodes for ranks; and gives the outputs back. The backward goes the same ways in reverse, so that both
directions have as many links as there are nodes. Heads do not see each other: nothing changes but who
computes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.kvm.compiled import Tensors
from parallel.sequence.context import Exchange, HeadSplit
from parallel.sequence.node import Node, NodeExchange
from parallel.sequence.relay import gradient_name

Place = tuple[Exchange, int, HeadSplit]
TO_HEADS, TO_TOKENS = "kvm.node.heads", "kvm.node.outputs"


def attend_by_heads(
    tensors: Tensors, node: Node, groups: int, attend: Callable[[Tensors, Place], Tensor]
) -> Tensor:
    """tensors: as `kvm_attention` takes them, of this rank's tokens -> their outputs [B, T, H, D].

    attend: the operator. groups: of this member's heads, in which it hands over their state.
    """
    q, k, v, gate, norm_weight, norm_bias, *temperatures = tensors
    if (start := node.spans[node.rank])[1] - start[0] != q.shape[1]:
        raise ValueError(
            f"{q.shape[1]} tokens on a rank that holds {start}; give the context the spans of all ranks"
        )
    swaps = _Swaps(node, q.shape[2], k.shape[2])
    local = (q, k, v) if gate is None else (q, k, v, gate)
    queries, keys, values, *gates = swaps.to_heads(local)
    own = swaps.state_heads[node.place]
    of_state, of_window = (None if one is None else one[own] for one in temperatures)
    own_gate = gates[0] if gates else None
    given = (queries, keys, values, own_gate, norm_weight, norm_bias, of_state, of_window)
    output = attend(given, (NodeExchange(node), node.start, HeadSplit(groups)))
    return swaps.to_tokens(output)


@dataclass(frozen=True)
class _Swaps:
    """Between the tokens of one member with all heads, and the tokens of all members with one's heads."""

    node: Node
    heads: int  # of queries
    state_head_count: int

    @property
    def state_heads(self) -> tuple[slice, ...]:
        """Of every member: those with keys, values and a state."""
        return HeadSplit(self.node.size).of(self.state_head_count)

    def to_heads(self, local: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Each [B, T, heads, ...] -> [B, tokens of the node, own heads, ...]."""
        totals = [one.shape[2] for one in local]
        out = partial(self._to_heads, TO_HEADS)
        back = partial(self._to_tokens, gradient_name(TO_HEADS), totals)
        whole: tuple[Tensor, ...] = _Swap.apply(out, back, *local)
        return whole

    def to_tokens(self, output: Tensor) -> Tensor:
        """[B, tokens of the node, own heads, D] -> [B, T, H, D]."""
        out = partial(self._to_tokens, TO_TOKENS, [self.heads])
        back = partial(self._to_heads, gradient_name(TO_TOKENS))
        (local,) = _Swap.apply(out, back, output)
        return local

    def _to_heads(self, name: str, local: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        members = range(self.node.size)
        parts = [tuple(one[:, :, self._of(member, one.shape[2])] for one in local) for member in members]
        own = parts[self.node.place]
        like = [
            tuple(one.new_empty(len(one), length, *one.shape[2:]) for one in own)
            for length in self.node.lengths
        ]
        received = self.node.swap(name, parts, like)
        return tuple(torch.cat(one, dim=1) for one in zip(*received, strict=True))

    def _to_tokens(self, name: str, totals: list[int], whole: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """totals: heads of each tensor over all members."""
        split = [one.split(self.node.lengths, dim=1) for one in whole]
        parts = list(zip(*split, strict=True))
        like = [
            tuple(self._like(one, member, total) for one, total in zip(whole, totals, strict=True))
            for member in range(self.node.size)
        ]
        received = self.node.swap(name, parts, like)
        return tuple(torch.cat(one, dim=2) for one in zip(*received, strict=True))

    def _like(self, whole: Tensor, member: int, total: int) -> Tensor:
        heads = self._of(member, total)
        own = self.node.lengths[self.node.place]
        return whole.new_empty(len(whole), own, heads.stop - heads.start, *whole.shape[3:])

    def _of(self, member: int, total: int) -> slice:
        """A member's heads of a tensor with `total` of them: those that read its states."""
        group, own = total // self.state_head_count, self.state_heads[member]
        return slice(own.start * group, own.stop * group)


Move = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, move: Move, move_back: Move, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.move_back = move_back
        return move(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.move_back(gradients)
