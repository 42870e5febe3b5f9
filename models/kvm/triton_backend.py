"""`backend="triton"`: from the operator's arguments to one call of its autograd Function, and back."""

import torch
from torch import Tensor

from models.kvm.handover import Handover
from models.kvm.kernels.function import Call, TritonFunction
from models.kvm.layout import KVMSettings, plan_call, window_start
from models.kvm.reference import Parameters
from models.kvm.state import KVMState, window_after
from parallel.sequence.context import Exchange


def kvm_triton(
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
    _refuse(q, settings)
    start = state.position if state else start
    plan = plan_call(
        settings,
        start,
        start + q.shape[1],
        ahead_at_start=exchange.has_previous,
        ahead_at_stop=exchange.has_next,
    )
    tensors: tuple[Tensor | None, ...] = (
        q,
        k,
        v,
        merge_gate,
        parameters.norm_weight.float(),
        parameters.norm_bias.float(),
        None if parameters.state_temperature is None else parameters.state_temperature.float(),
        None if parameters.window_temperature is None else parameters.window_temperature.float(),
    )
    if state:
        tensors += (state.keys, state.values, state.magnitudes)
        tensors += (state.window_keys, state.window_values, state.window_gate)
    else:
        tensors += (None,) * 6
    call = Call(settings, plan, Handover(exchange, settings, plan), return_state)
    with torch.cuda.device_of(q):
        result = TritonFunction.apply(call, *tensors)
    if not return_state:
        return result, None
    output, keys, values, magnitudes = result
    after = KVMState(
        keys,
        values,
        magnitudes if settings.value_radius else None,
        None if settings.value_radius else magnitudes,
        *window_after(state, k, v, merge_gate, plan.stop - window_start(settings, plan.stop)),
        plan.stop,
    )
    return output, after


def _refuse(q: Tensor, settings: KVMSettings) -> None:
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"backend='triton' with {q.dtype}: want float32, float16 or bfloat16; use backend='torch'"
        )
    for name, got, most in (("head width", q.shape[3], 256), ("chunk", settings.chunk, 512)):
        if got > most:
            raise ValueError(f"backend='triton' with {name} {got}: want at most {most}; use backend='torch'")
