"""Key-Value Means by definition: one function per equation of arXiv 2605.09877, under plain autograd.

Slow, and the yardstick of every other backend. Inside, tensors are [B, H, T, D] in the accumulation dtype.
Letters: B batch, H heads, D head width, m slots, C chunk. Where several query heads read one head of keys,
values and slots, H of all but queries and outputs is the number of those.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from models.kvm.layout import Block, Fold, KVMSettings, Plan, plan_call, window_start
from models.kvm.state import KVMState, accumulation_dtype, window_after


@dataclass(frozen=True)
class Parameters:
    """The layer's own tensors: the state key norm N_s [D] and the inverse temperatures [H, 1, 1]."""

    norm_weight: Tensor
    norm_bias: Tensor
    state_temperature: Tensor | None
    window_temperature: Tensor | None


@dataclass(frozen=True)
class Slots:
    """S_K, S_V [B, H, m, D] and, per slot, the radius rho or the count [B, H, m]."""

    keys: Tensor
    values: Tensor
    magnitudes: Tensor


def kvm_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    merge_gate: Tensor | None,
    parameters: Parameters,
    settings: KVMSettings,
    state: KVMState | None,
) -> tuple[Tensor, KVMState]:
    """Output [B, T, H, D] and the state after the last token. Shapes as in `models.kvm.kvm_attention`."""
    start = state.position if state else 0
    plan = plan_call(settings, start, start + q.shape[1])
    window = _with_window(k, v, merge_gate, state)
    dtype = accumulation_dtype(q.dtype)
    parameters = _cast(parameters, dtype)
    keys, values = (_heads_first(tensor, dtype) for tensor in window[:2])
    gate = None if window[2] is None else _heads_first(window[2], dtype)
    queries = _heads_first(q, dtype)
    tokens = _Tokens(keys, values, gate, base=start + q.shape[1] - keys.shape[2])
    slots = _slots_of(state) if state else _no_slots(keys)
    outputs = []
    for block in plan.blocks:
        slots = _fold_all(slots, block.folds, tokens, parameters, settings)
        block_queries = queries[:, :, block.start - start : block.stop - start]
        outputs.append(read(block_queries, block, slots, tokens, parameters, settings))
    slots = _fold_all(slots, plan.closing, tokens, parameters, settings)
    output = torch.cat(outputs, dim=2).transpose(1, 2).to(q.dtype)
    return output, _state_after(plan, slots, window, settings)


@dataclass(frozen=True)
class _Tokens:
    """Keys, values [B, H, t, D] and gate [B, H, t] of the tokens from position `base` on."""

    keys: Tensor
    values: Tensor
    gate: Tensor | None
    base: int

    def span(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor | None]:
        at = slice(start - self.base, stop - self.base)
        return self.keys[:, :, at], self.values[:, :, at], None if self.gate is None else self.gate[:, :, at]


def read(
    queries: Tensor,
    block: Block,
    slots: Slots,
    tokens: _Tokens,
    parameters: Parameters,
    settings: KVMSettings,
) -> Tensor:
    """One softmax over all slots and the causal window."""
    keys, values, _ = tokens.span(block.window_start, block.stop)
    keys = _tempered(keys, parameters.window_temperature)
    key_position = torch.arange(block.window_start, block.stop, device=keys.device)
    query_position = torch.arange(block.start, block.stop, device=keys.device)
    visible = key_position <= query_position[:, None]
    if block.slots:
        slot_keys = _tempered(normed_slots(slots, parameters), parameters.state_temperature)
        keys = torch.cat([slot_keys, keys], dim=2)
        values = torch.cat([slot_values(slots, settings), values], dim=2)
        visible = torch.cat([visible.new_ones(len(visible), block.slots), visible], dim=1)
    keys, values = (_for_each_query_head(tensor, queries.shape[1]) for tensor in (keys, values))
    scores = queries @ keys.transpose(2, 3) * queries.shape[-1] ** -0.5
    return scores.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ values


def state_key(keys: Tensor, parameters: Parameters, settings: KVMSettings) -> Tensor:
    """kbar = N_s([0_r ; k[r:]]): the rotary dims are zeroed before the norm."""
    at_rotary = torch.arange(keys.shape[-1], device=keys.device) < settings.rotary_dims
    return _norm(keys.masked_fill(at_rotary, 0), parameters)


def normed_slots(slots: Slots, parameters: Parameters) -> Tensor:
    """N_s(S_K)."""
    return _norm(slots.keys, parameters)


def slot_values(slots: Slots, settings: KVMSettings) -> Tensor:
    """rho * S_V / ||S_V||, or the mean S_V / count without radii."""
    if not settings.value_radius:
        return slots.values / slots.magnitudes[..., None]
    return slots.magnitudes[..., None] * F.normalize(slots.values, dim=-1, eps=1e-12)


def open_slots(slots: Slots, keys: Tensor, values: Tensor, magnitudes: Tensor) -> Slots:
    """Tokens become slots of their own."""
    return Slots(
        torch.cat([slots.keys, keys], dim=2),
        torch.cat([slots.values, values], dim=2),
        torch.cat([slots.magnitudes, magnitudes], dim=2),
    )


def first_magnitudes(values: Tensor, settings: KVMSettings) -> Tensor:
    """rho = ||v|| of the token that opens a slot, or a count of one."""
    return values.norm(dim=-1) if settings.value_radius else torch.ones_like(values[..., 0])


def choose_appends(kbar: Tensor, slots: Slots, parameters: Parameters, count: int) -> Tensor:
    """[B, H, count] the tokens least similar to any slot (ties: the earliest), in token order."""
    scores = (kbar @ normed_slots(slots, parameters).transpose(2, 3)).amax(dim=-1)
    return scores.sort(dim=-1, stable=True).indices[..., :count].sort(dim=-1).values


def choose_slots(kbar: Tensor, slots: Slots, parameters: Parameters, sinks: int) -> Tensor:
    """[B, H, t] the most similar slot that is no sink (the first of equals)."""
    similarity = kbar @ normed_slots(slots, parameters)[:, :, sinks:].transpose(2, 3)
    return similarity.argmax(dim=-1) + sinks


def merge(slots: Slots, keys: Tensor, values: Tensor, chosen: Tensor, settings: KVMSettings) -> Slots:
    """S_K[i] += g * kbar, S_V[i] += g * v with both products given; radii stay, counts count."""
    at = chosen[..., None].expand_as(keys)
    magnitudes = slots.magnitudes
    if not settings.value_radius:
        magnitudes = magnitudes.scatter_add(2, chosen, torch.ones_like(values[..., 0]))
    return Slots(slots.keys.scatter_add(2, at, keys), slots.values.scatter_add(2, at, values), magnitudes)


def fold(slots: Slots, step: Fold, tokens: _Tokens, parameters: Parameters, settings: KVMSettings) -> Slots:
    """Tokens that leave the window enter the state: new slots open first, then the other tokens merge."""
    keys, values, gate = tokens.span(step.start, step.stop)
    kbar = state_key(keys, parameters, settings)
    gated_kbar = kbar if gate is None else gate[..., None] * kbar
    gated_values = values if gate is None else gate[..., None] * values
    if step.is_first_state:
        radii = first_magnitudes(values, settings)
        gated = settings.gate_first_state
        return open_slots(slots, gated_kbar if gated else kbar, gated_values if gated else values, radii)
    with torch.no_grad():
        opening = choose_appends(kbar, slots, parameters, step.appended)
        merging = _others(opening, step.stop - step.start)
    new_keys = _take(gated_kbar if settings.gate_appends else kbar, opening)
    new_values = _take(gated_values if settings.gate_appends else values, opening)
    slots = open_slots(slots, new_keys, new_values, first_magnitudes(new_values, settings))
    with torch.no_grad():
        chosen = choose_slots(_take(kbar, merging), slots, parameters, settings.sinks)
    return merge(slots, _take(gated_kbar, merging), _take(gated_values, merging), chosen, settings)


def _fold_all(
    slots: Slots, folds: tuple[Fold, ...], tokens: _Tokens, parameters: Parameters, settings: KVMSettings
) -> Slots:
    for step in folds:
        slots = fold(slots, step, tokens, parameters, settings)
    return slots


def _norm(tensor: Tensor, parameters: Parameters) -> Tensor:
    return F.layer_norm(tensor, tensor.shape[-1:], parameters.norm_weight, parameters.norm_bias, eps=1e-5)


def _tempered(keys: Tensor, temperature: Tensor | None) -> Tensor:
    return keys if temperature is None else keys * temperature


def _for_each_query_head(tensor: Tensor, heads: int) -> Tensor:
    """[B, h, t, D] as [B, H, t, D]: query head i reads head i // (H / h)."""
    group = heads // tensor.shape[1]
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [B, H, t] of [B, H, C, D]."""
    return tensor.gather(2, index[..., None].expand(*index.shape, tensor.shape[-1]))


def _others(index: Tensor, length: int) -> Tensor:
    """[B, H, length - t] what `index` [B, H, t] leaves of range(length), in order."""
    taken = torch.zeros(*index.shape[:2], length, dtype=torch.int8, device=index.device).scatter(2, index, 1)
    return taken.sort(dim=-1, stable=True).indices[..., : length - index.shape[2]]


def _heads_first(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).transpose(1, 2)


def _cast(parameters: Parameters, dtype: torch.dtype) -> Parameters:
    def per_head(temperature: Tensor | None) -> Tensor | None:
        return None if temperature is None else temperature.to(dtype)[:, None, None]

    return Parameters(
        parameters.norm_weight.to(dtype),
        parameters.norm_bias.to(dtype),
        per_head(parameters.state_temperature),
        per_head(parameters.window_temperature),
    )


def _with_window(
    k: Tensor, v: Tensor, gate: Tensor | None, state: KVMState | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    if state is None:
        return k, v, gate
    keys = torch.cat([state.window_keys, k], dim=1)
    values = torch.cat([state.window_values, v], dim=1)
    if gate is None or state.window_gate is None:
        return keys, values, None
    return keys, values, torch.cat([state.window_gate, gate], dim=1)


def _no_slots(keys: Tensor) -> Slots:
    empty = keys[:, :, :0]
    return Slots(empty, empty, empty[..., 0])


def _slots_of(state: KVMState) -> Slots:
    return Slots(state.keys, state.values, state.magnitudes)


def _state_after(
    plan: Plan, slots: Slots, window: tuple[Tensor, Tensor, Tensor | None], settings: KVMSettings
) -> KVMState:
    return KVMState(
        slots.keys,
        slots.values,
        slots.magnitudes if settings.value_radius else None,
        None if settings.value_radius else slots.magnitudes,
        *window_after(None, *window, plan.stop - window_start(settings, plan.stop)),
        plan.stop,
    )
