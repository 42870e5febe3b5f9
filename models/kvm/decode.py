"""One token without gradients: nothing of the state is copied or normed again, only what is new is made."""

import torch
from torch import Tensor

from models.kvm.layout import KVMSettings, Plan, window_start
from models.kvm.memory import KeyNorm, read_values
from models.kvm.reference import Parameters
from models.kvm.softmax_part import join_parts, softmax_part
from models.kvm.state import KVMState, SlotReads, accumulation_dtype
from models.kvm.window_room import room_after


def can_decode(plan: Plan, state: KVMState | None, tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether the call is one token that folds nothing into the state it goes on from."""
    if state is None or plan.stop - plan.start != 1 or plan.folds:
        return False
    held = (state.keys, state.values, state.magnitudes, state.window_keys, state.window_values)
    return not (
        torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors + held)
    )


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    parameters: Parameters,
    settings: KVMSettings,
    plan: Plan,
    state: KVMState,
) -> tuple[Tensor, KVMState]:
    """Output [B, 1, H, D] of one token and the state after it, which shares the slots of `state`."""
    block = plan.blocks[0]
    dtype = accumulation_dtype(q.dtype)
    held = plan.stop - 1 - window_start(settings, plan.stop)
    room = room_after(state, held, settings.window, (k, gate), grows=True)
    room.put(held, k, v, gate)
    window = room.window(held + 1)
    unread = window[0].shape[1] - (block.stop - block.window_start)
    window_k, window_v = (tensor[:, unread:].transpose(1, 2).to(dtype) for tensor in window[:2])
    rows = q.transpose(1, 2).to(dtype)
    rows = rows.view(*window_k.shape[:2], -1, rows.shape[3])  # [B, H, D] grouped by the heads of keys
    parts = [softmax_part(_scaled(rows, parameters.window_temperature), window_k, window_v, causal=False)]
    reads = state.reads
    if block.slots:
        if reads is None or not reads.fit(parameters.norm_weight, parameters.norm_bias):
            reads = _slot_reads(state, parameters, settings)
        parts.append(
            softmax_part(_scaled(rows, parameters.state_temperature), reads.keys, reads.values, causal=False)
        )
    output = join_parts(parts)[0].reshape(q.shape).to(q.dtype)
    slots = (state.keys, state.values, state.radii, state.counts)
    return output, KVMState(*slots, *window, plan.stop, reads, room)


def _slot_reads(state: KVMState, parameters: Parameters, settings: KVMSettings) -> SlotReads:
    weight, bias = parameters.norm_weight, parameters.norm_bias
    norm = KeyNorm(weight.to(state.keys.dtype), bias.to(state.keys.dtype))
    return SlotReads.of(norm(state.keys), read_values(state.values, state.magnitudes, settings), weight, bias)


def _scaled(rows: Tensor, temperature: Tensor | None) -> Tensor:
    return rows if temperature is None else rows * temperature.to(rows.dtype)[:, None, None]
