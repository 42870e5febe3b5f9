"""The backward of one call. Routes carry no gradient and the state is a sum: only sums are sequential here.

A token in slot i gets what later reads send to slot i, so blocks are walked from last to first with one
running gradient of the slots. All gradients are summed in a fixed order, later blocks first, however the
sequence is cut.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.kvm.advance import CallTokens, route_of
from models.kvm.attend import Queries
from models.kvm.layout import Block, Fold, Plan
from models.kvm.memory import RoutedTokens, as_rows, grown
from models.kvm.rewind import RewindableMemory, SlotTensors
from models.kvm.softmax_part import softmax_part_backward
from models.kvm.tokens import Tokens
from models.kvm.workspace import BlockGroup, block_groups, window_of


class ReadBackward:
    """What the backward of reads starts from."""

    def __init__(self, queries: Queries, grad_output: Tensor, output: Tensor, log_sum: Tensor) -> None:
        """grad_output, output: [B, T, H, D]; log_sum: [B, H, T]."""
        self.queries = queries
        self.grad_output = grad_output
        self.output = output
        self.log_sum = log_sum

    def through_window(self, group: BlockGroup) -> "PartBackward":
        """Valid until the next call."""
        return self._of(group, self.queries.for_window(group))

    def through_state(self, group: BlockGroup) -> "PartBackward":
        """Valid until the next call."""
        return self._of(group, self.queries.for_state(group))

    def _of(self, group: BlockGroup, q: Tensor) -> "PartBackward":
        local, dtype = self.queries.local(group), self.queries.dtype
        grad_output, output = (
            group.rows(tensor[:, local].to(dtype)) for tensor in (self.grad_output, self.output)
        )
        return PartBackward(q, grad_output, output, group.rows_of_sums(self.log_sum[:, :, local]))


@dataclass(frozen=True)
class PartBackward:
    """The same for one group of blocks: [b, H, c, D] each, the log-sum-exp [b, H, c]."""

    q: Tensor
    grad_output: Tensor
    output: Tensor
    log_sum: Tensor

    def part(self, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the scaled queries, of the keys and of the values of one part, [b, H, ., D]."""
        return softmax_part_backward(self.grad_output, self.q, k, v, self.output, self.log_sum, causal)


class CallGradients:
    """Gradients of everything a call was given, in the accumulation dtype."""

    def __init__(self, queries: Queries, tokens: CallTokens, edge: int) -> None:
        """Tokens from position `edge` on are needed by the rank after too."""
        dtype = queries.dtype
        self.queries = queries
        self.q = torch.empty_like(queries.tensor, dtype=dtype, memory_format=torch.contiguous_format)
        # What windows read is written first and needs no zeros; tokens from `edge` on wait.
        self.k = Tokens.zeros_like(tokens.keys, dtype, local_from=edge)
        self.v = Tokens.zeros_like(tokens.values, dtype, local_from=edge)
        self.gate = None if tokens.gate is None else Tokens.zeros_like(tokens.gate, dtype)
        self.norm_weight = torch.zeros_like(tokens.norm.weight)
        self.norm_bias = torch.zeros_like(tokens.norm.bias)
        self._heads = tokens.keys.local.shape[2]
        self._state_scale = _zeros_or_none(queries.state_scale)
        self._window_scale = _zeros_or_none(queries.window_scale)

    @property
    def state_temperature(self) -> Tensor | None:
        return self._of_key_heads(self._state_scale)

    @property
    def window_temperature(self) -> Tensor | None:
        return self._of_key_heads(self._window_scale)

    def _of_key_heads(self, scale: Tensor | None) -> Tensor | None:
        return None if scale is None else scale.view(self._heads, -1).sum(dim=1)

    def set_window_query(self, group: BlockGroup, grad: Tensor) -> None:
        """The gradient [B, t, H, D] of a group's scaled queries through its window: comes first."""
        held = self.q[:, self.queries.local(group)]
        if self.queries.window_scale is None:
            held.copy_(grad)
        else:
            torch.mul(grad, self.queries.window_scale, out=held)
        self._add_scale(self._window_scale, group, grad)

    def add_state_query(self, group: BlockGroup, grad: Tensor) -> None:
        """The same through the state."""
        held = self.q[:, self.queries.local(group)]
        if self.queries.state_scale is None:
            held.add_(grad)
        else:
            held.addcmul_(grad, self.queries.state_scale)
        self._add_scale(self._state_scale, group, grad)

    def _add_scale(self, scale: Tensor | None, group: BlockGroup, grad: Tensor) -> None:
        if scale is not None:
            scale += grad.mul_(self.queries.of(group)).sum(dim=(0, 1))  # the last use of grad

    def add_norm(self, weight: Tensor, bias: Tensor) -> None:
        self.norm_weight += weight
        self.norm_bias += bias


@dataclass
class WindowBackward:
    """Gradients through the window.

    Tokens from `edge` on are also read by the rank after, whose sums come first: what this rank has for them
    waits until those are here.
    """

    gradients: CallGradients
    edge: int
    waiting: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._untouched = self.edge  # tokens before it were not added to yet

    def run(self, reads: ReadBackward, tokens: CallTokens, plan: Plan) -> None:
        batch = len(reads.output)
        for group in reversed(list(block_groups(plan, batch))):
            backward = reads.through_window(group)
            k, v = (window_of(one, group, reads.queries.dtype) for one in (tokens.keys, tokens.values))
            # In two parts, as causality of all keys would cost a mask over them; gradients need no join.
            own, before = slice(group.reach, None), slice(group.reach)
            grad_q, *own_grads = backward.part(k[:, :, own], v[:, :, own], causal=True)
            before_grads = None
            if group.reach:
                dq, *before_grads = backward.part(k[:, :, before], v[:, :, before], causal=False)
                grad_q += dq
            self._add_windows(group, own_grads, before_grads)
            self.gradients.set_window_query(group, group.tokens(grad_q))

    def _add_windows(self, group: BlockGroup, own: list[Tensor], before: list[Tensor] | None) -> None:
        """Add a group's gradients of keys and values, [b, H, c, D] of the blocks' own tokens and [b, H, t, D]
        of those before them. Every token gets those of later blocks first."""
        first, last, others = group.blocks[0], group.blocks[-1], len(group.blocks) - 1
        length = last.stop - last.start
        self._add(last.start, *(group.of_block(one, others).transpose(1, 2) for one in own))
        if before is not None:
            self._add(last.window_start, *(group.of_block(one, others).transpose(1, 2) for one in before))
        if others:
            for offset in range(0, group.reach, length):
                rows = (one[:others, :, offset : offset + length] for one in before or ())
                self._add(first.window_start + offset, *(_joined(one) for one in rows))
            self._add(first.start, *(_joined(one[:others]) for one in own))

    def finish(self, later: tuple[Tensor, ...]) -> None:
        """Take the sums of the rank after for the tokens from `edge` on, and add to them what waited."""
        self.gradients.k.add(self.edge, later[0])
        self.gradients.v.add(self.edge, later[1])
        for start, dk, dv in self.waiting:
            self.gradients.k.add(start, dk)
            self.gradients.v.add(start, dv)
        self.waiting.clear()

    def _add(self, start: int, dk: Tensor, dv: Tensor) -> None:
        """Add rows [B, t, H, D] to the tokens from position `start` on."""
        now = min(max(self.edge - start, 0), dk.shape[1])
        first = min(max(self._untouched - start, 0), now)
        for gradient, rows in ((self.gradients.k, dk), (self.gradients.v, dv)):
            if first:
                gradient.put(start, rows[:, :first])
            if first < now:
                gradient.add(start + first, rows[:, first:now])
        self._untouched = min(self._untouched, start)
        if now < dk.shape[1]:
            self.waiting.append((start + now, dk[:, now:], dv[:, now:]))


class StateReads:
    """Gradients that reads send to the slots, block by block from the last, as the memory goes back."""

    def __init__(
        self, reads: ReadBackward, tokens: CallTokens, routes: Tensor, plan: Plan, boundary: SlotTensors
    ) -> None:
        self.reads = reads
        self.tokens = tokens
        self.routes = routes
        self.plan = plan
        self.memory = RewindableMemory(boundary, plan.slots_stop, tokens.norm, tokens.settings)
        for fold in plan.folds:
            kbar = tokens.norm(tokens.masked_keys(fold))
            self.memory.fold(tokens.routed(fold, route_of(routes, fold, plan), kbar, with_values=True))
        self.memory.renew()

    def rewind(self, folds: tuple[Fold, ...]) -> list[tuple[Fold, RoutedTokens]]:
        """Undo folds, newest first; returns them with where their tokens went."""
        return [(fold, self.memory.undo()) for fold in reversed(folds)]

    def backward(self, block: Block, gradients: CallGradients) -> SlotTensors | None:
        """What one block sends to the slots it read, or None; the memory must be at the block."""
        if not block.slots:
            return None
        read = self.memory.normed.first(block.slots), self.memory.read.first(block.slots)
        alone = BlockGroup((block,))
        dq, *grad_read = self.reads.through_state(alone).part(*read, causal=False)
        gradients.add_state_query(alone, dq.transpose(1, 2))
        sent, grad_norm = self.memory.backward(*(_slots_first(grad) for grad in grad_read))
        gradients.add_norm(*grad_norm)
        return sent


class SlotGradient:
    """The running gradient of the slots, and the share of each token that was folded into them."""

    def __init__(self, later: SlotTensors, slots: int) -> None:
        """later: the gradient that everything after the call sends, of the state the call leaves."""
        self.keys, self.values, self.magnitudes = (grown(tensor, slots) for tensor in later)

    def add(self, sent: SlotTensors) -> None:
        for running, one in zip((self.keys, self.values, self.magnitudes), sent, strict=True):
            running[: len(one)] += one

    def first(self, slots: int) -> SlotTensors:
        return self.keys[:slots], self.values[:slots], self.magnitudes[:slots]

    def share_out(
        self, fold: Fold, routes: RoutedTokens, tokens: CallTokens, gradients: CallGradients
    ) -> None:
        """Hand the tokens of a fold their share; every read after the fold must have been added."""
        norm = tokens.norm
        masked = tokens.masked_keys(fold)
        kbar, mean, deviation = norm.with_statistics(masked)
        values = tokens.values_of(fold)
        routed = routes.of(kbar, values)
        grad_keys = as_rows(self.keys).index_select(0, routed.rows).view(kbar.shape)
        grad_values = as_rows(self.values).index_select(0, routed.rows).view(kbar.shape)
        dk, *grad_norm = norm.backward(routed.weighted(grad_keys), masked, mean, deviation)
        gradients.add_norm(*grad_norm)
        gradients.k.add(fold.start, dk, tokens.settings.rotary_dims)
        dv = routed.weighted(grad_values)
        dg = None
        if routed.weight is not None:
            dg = (kbar * grad_keys).addcmul_(values, grad_values).sum(dim=-1)
            dg = dg if routed.ungated is None else dg.masked_fill_(routed.ungated, 0)
        if tokens.settings.value_radius and routed.opens is not None:
            along = self._radius_share(routed, routed.opens)
            dv = dv + (routed.weighted(along) if routed.radius_gated else along)
            if dg is not None and routed.radius_gated:
                dg += torch.linalg.vecdot(values, along)
        gradients.v.add(fold.start, dv)
        if dg is not None and gradients.gate is not None:
            gradients.gate.add(fold.start, dg)

    def _radius_share(self, routed: RoutedTokens, opens: Tensor) -> Tensor:
        """Gradient of the value that opened a slot, through the radius, its length (none at length 0)."""
        opening = routed.opening_values()
        grad = self.magnitudes.view(-1).index_select(0, routed.rows).view(opens.shape)
        lengths = torch.linalg.vector_norm(opening, dim=-1)
        per_length = (grad / lengths).masked_fill_(~opens | (lengths == 0), 0)
        return opening * per_length[..., None]


def _joined(rows: Tensor) -> Tensor:
    """[b, H, c, D] of blocks that follow each other as [1, b * c, H, D]."""
    return rows.transpose(1, 2).flatten(0, 1)[None]


def _slots_first(tensor: Tensor) -> Tensor:
    """[B, H, m, D] to contiguous [m, B, H, D]."""
    return tensor.permute(2, 0, 1, 3).contiguous()


def _zeros_or_none(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.zeros_like(tensor)
