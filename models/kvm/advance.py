"""The serial pass: decide where every overflowing token goes. It reads keys and gate, no attention output."""

import torch
from torch import Tensor

from models.kvm.layout import Fold, KVMSettings, Plan
from models.kvm.memory import ROW_BLOCK, KeyMemory, KeyNorm, RoutedTokens
from models.kvm.tokens import Tokens

_MANY_SLOTS = 512


class CallTokens:
    """Keys, values and gate of one call, handed out a fold at a time in the accumulation dtype."""

    def __init__(
        self, keys: Tokens, values: Tokens, gate: Tokens | None, norm: KeyNorm, settings: KVMSettings
    ) -> None:
        self.keys = keys
        self.values = values
        self.gate = gate
        self.norm = norm
        self.settings = settings
        self._masked = norm.weight.new_empty(0)

    def masked_keys(self, fold: Fold) -> Tensor:
        """[B, c, H, D] keys whose rotary dims are zeroed: what the state key norm is given. Valid until the
        next fold's."""
        keys = self.keys.span(fold.start, fold.stop)
        rotary = self.settings.rotary_dims
        if not rotary:
            return keys.to(self.norm.weight.dtype)
        if self._masked.shape != keys.shape:
            self._masked = torch.zeros(keys.shape, dtype=self.norm.weight.dtype, device=keys.device)
        self._masked[..., rotary:] = keys[..., rotary:]
        return self._masked

    def routes(self, fold: Fold, route: Tensor) -> RoutedTokens:
        """Where the tokens of a fold go, given their routes [B, c, H]."""
        gate = None if self.gate is None else self.gate.span(fold.start, fold.stop).to(self.norm.weight.dtype)
        return RoutedTokens(fold, route, gate, self.settings)

    def values_of(self, fold: Fold) -> Tensor:
        """[B, c, H, D]."""
        return self.values.span(fold.start, fold.stop).to(self.norm.weight.dtype)

    def routed(self, fold: Fold, route: Tensor, kbar: Tensor, with_values: bool) -> RoutedTokens:
        return self.routes(fold, route).of(kbar, self.values_of(fold) if with_values else None)


class Router:
    """Routes fold after fold: the only part of the operator that is serial."""

    def __init__(self, tokens: CallTokens, boundary: Tensor, plan: Plan) -> None:
        """boundary: [m, B, H, D], S_K before the call."""
        self.tokens = tokens
        self.plan = plan
        self.memory = KeyMemory(boundary, plan.slots_stop, tokens.norm)
        batch, heads = boundary.shape[1:3]
        count = plan.covered_stop - plan.covered_start
        # [B, t, H] of the tokens folded in this call
        self.routes = torch.empty(batch, count, heads, dtype=torch.int32, device=boundary.device)
        self._scratch = _similarity_buffer(plan, batch * heads, boundary)

    def fold(self, fold: Fold, with_values: bool) -> RoutedTokens:
        """Route the tokens of the next fold and fold their keys."""
        tokens = self.tokens
        kbar = tokens.norm(tokens.masked_keys(fold))
        route = route_of(self.routes, fold, self.plan)
        if fold.is_first_state:
            route.copy_(_open_all(fold, route))
        else:
            route.copy_(_route(tokens, kbar, self.memory, fold, self._scratch))
        routed = tokens.routed(fold, route, kbar, with_values)
        self.memory.fold(routed)
        return routed


def route_of(routes: Tensor, fold: Fold, plan: Plan) -> Tensor:
    """The routes [B, c, H] of one fold."""
    return routes[:, fold.start - plan.covered_start : fold.stop - plan.covered_start]


def _open_all(fold: Fold, route: Tensor) -> Tensor:
    slots = torch.arange(fold.slots_before, fold.slots_after, dtype=route.dtype, device=route.device)
    return (~slots)[None, :, None].expand_as(route)


def _route(tokens: CallTokens, kbar: Tensor, memory: KeyMemory, fold: Fold, scratch: Tensor) -> Tensor:
    """[B, C, H]: the least similar tokens open slots, the others merge into the most similar slot."""
    sinks, slots = tokens.settings.sinks, fold.slots_before
    queries = _flat_heads(kbar.permute(0, 2, 1, 3))  # [B*H, C, D]
    similarity = _similarity(queries, memory.normed.first(_searched(slots)), scratch)
    best_sink = similarity[:, :, :sinks].amax(dim=-1) if sinks and fold.appended else None
    similarity[:, :, :sinks] = -torch.inf
    similarity[:, :, slots:] = -torch.inf
    best, chosen = first_maximum(similarity)
    if fold.appended:
        scores = best if best_sink is None else torch.maximum(best, best_sink)
        opening = scores.sort(dim=-1, stable=True).indices[:, : fold.appended].sort(dim=-1).values
        new_keys = _opened_keys(tokens, queries, fold, opening)
        new_best, newly_chosen = torch.bmm(queries, tokens.norm(new_keys).transpose(1, 2)).max(dim=-1)
        chosen = torch.where(new_best > best, newly_chosen + slots, chosen)
        chosen.scatter_(
            1, opening, ~torch.arange(slots, fold.slots_after, device=chosen.device).expand_as(opening)
        )
    return chosen.view(kbar.shape[0], kbar.shape[2], -1).transpose(1, 2)


def _similarity(queries: Tensor, normed: Tensor, scratch: Tensor) -> Tensor:
    """[B*H, C, m] of queries [B*H, C, D] with slots [B, H, m, D]."""
    keys = _flat_heads(normed).transpose(1, 2)
    shape = (*queries.shape[:2], keys.shape[2])
    out = scratch[: shape[0] * shape[1] * shape[2]].view(shape)
    return torch.bmm(queries, keys, out=out)


def _searched(slots: int) -> int:
    """Columns that are searched for the most similar of some slots: whole blocks where there are many."""
    return slots if slots < _MANY_SLOTS else -(-slots // ROW_BLOCK) * ROW_BLOCK


def first_maximum(similarity: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum [R, C] over the slots of [R, C, m] and the first slot that has it.

    Maxima alone are found several times faster than with their places, so of many slots the block is found
    first.
    """
    rows, tokens, slots = similarity.shape
    if slots < _MANY_SLOTS:
        return similarity.max(dim=-1)
    blocks = slots // ROW_BLOCK
    best, block = similarity.view(rows, tokens, blocks, ROW_BLOCK).amax(dim=-1).max(dim=-1)
    start = torch.arange(0, rows * tokens * blocks, blocks, device=block.device)
    inside = similarity.view(-1, ROW_BLOCK).index_select(0, block.view(-1) + start).max(dim=-1).indices
    return best, block * ROW_BLOCK + inside.view_as(block)


def _opened_keys(tokens: CallTokens, queries: Tensor, fold: Fold, opening: Tensor) -> Tensor:
    """[B*H, a, D] the sums of the slots that tokens `opening` [B*H, a] open."""
    keys = queries.gather(1, opening[..., None].expand(*opening.shape, queries.shape[-1]))
    if tokens.gate is None or not tokens.settings.gate_appends:
        return keys
    gate = tokens.gate.span(fold.start, fold.stop).to(queries.dtype).transpose(1, 2).flatten(0, 1)
    return keys * gate.gather(1, opening)[..., None]


def _similarity_buffer(plan: Plan, rows: int, like: Tensor) -> Tensor:
    """One allocation for all folds: fresh memory of this size would cost more than the product itself."""
    sizes = [
        (fold.stop - fold.start) * _searched(fold.slots_before)
        for fold in plan.folds
        if not fold.is_first_state
    ]
    return like.new_empty(rows * max(sizes, default=0))


def _flat_heads(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, 1)
