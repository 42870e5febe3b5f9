"""`backend="torch"`: from the operator's arguments to one call of its autograd Function, and back."""

import torch
from torch import Tensor

from models.kvm.autograd import Call, KVMFunction
from models.kvm.decode import can_decode, decode
from models.kvm.handover import Handover
from models.kvm.layout import KVMSettings, Plan, plan_call, window_start
from models.kvm.reference import Parameters
from models.kvm.state import KVMState, accumulation_dtype, window_after
from parallel.sequence.context import Exchange


def kvm_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    merge_gate: Tensor | None,
    parameters: Parameters,
    settings: KVMSettings,
    state: KVMState | None,
    return_state: bool,
    exchange: Exchange,
    start: int,
) -> tuple[Tensor, KVMState | None]:
    """Output [B, T, H, D] and the state after the last token, if wanted. Shapes as in `kvm_attention`."""
    start = state.position if state else start
    plan = plan_call(
        settings,
        start,
        start + q.shape[1],
        ahead_at_start=exchange.has_previous,
        ahead_at_stop=exchange.has_next,
    )
    alone = not (exchange.has_previous or exchange.has_next)
    parts = (q, k, v, merge_gate, *vars(parameters).values())
    if state is not None and alone and can_decode(plan, state, parts):
        output, after = decode(q, k, v, merge_gate, parameters, settings, plan, state)
        return output, after if return_state else None
    dtype = accumulation_dtype(q.dtype)
    tensors: tuple[Tensor | None, ...] = (
        *(_unit_stride(tensor) for tensor in (q, k, v)),
        merge_gate,
        parameters.norm_weight.to(dtype),
        parameters.norm_bias.to(dtype),
        _cast(parameters.state_temperature, dtype),
        _cast(parameters.window_temperature, dtype),
        *(_boundary(state, k.dtype) if state else (None,) * 6),
    )
    call = Call(settings, plan, Handover(exchange, settings, plan), return_state)
    result = KVMFunction.apply(call, *tensors)
    if not return_state:
        return result, None
    output, *slots = result
    return output, _state_after(slots, state, k, v, merge_gate, plan, settings)


def _boundary(state: KVMState, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Slots of a state, slots first, and its window."""
    return (
        state.keys.permute(2, 0, 1, 3).contiguous(),
        state.values.permute(2, 0, 1, 3).contiguous(),
        state.magnitudes.permute(2, 0, 1).contiguous(),
        _unit_stride(state.window_keys.to(dtype)),
        _unit_stride(state.window_values.to(dtype)),
        state.window_gate,
    )


def _state_after(
    slots: list[Tensor],
    before: KVMState | None,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    plan: Plan,
    settings: KVMSettings,
) -> KVMState:
    keys, values = (tensor.permute(1, 2, 0, 3).contiguous() for tensor in slots[:2])
    magnitudes = slots[2].permute(1, 2, 0).contiguous()
    return KVMState(
        keys,
        values,
        magnitudes if settings.value_radius else None,
        None if settings.value_radius else magnitudes,
        *window_after(before, k, v, gate, plan.stop - window_start(settings, plan.stop)),
        plan.stop,
    )


def _unit_stride(tensor: Tensor) -> Tensor:
    """Fused attention wants the head width innermost."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
