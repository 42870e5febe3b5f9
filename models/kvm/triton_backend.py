"""`backend="triton"`: from the operator's arguments to one call of its autograd Function, and back."""

import torch
from torch import Tensor

from models.kvm.handover import Handover
from models.kvm.kernels.decode import decode
from models.kvm.kernels.function import Call, CallTensors, TritonFunction
from models.kvm.kernels.tuning import LONGEST_CHUNK, WIDEST_HEAD
from models.kvm.layout import KVMSettings, Plan, plan_call, window_start
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
    call = Call(settings, plan, Handover(exchange, settings, plan), return_state)
    tensors = _tensors(q, k, v, merge_gate, parameters, state)
    alone = not (exchange.has_previous or exchange.has_next)
    with torch.cuda.device_of(q):
        if state and alone and q.shape[1] == 1 and not _wants_gradient(tensors):
            return _decode(call, tensors, state)
        result = TritonFunction.apply(call, *tensors.all())
    if not return_state:
        return result, None
    output, *slots = result
    window = window_after(state, k, v, merge_gate, plan.stop - window_start(settings, plan.stop))
    return output, _state(slots, window, plan, settings)


def _refuse(q: Tensor, settings: KVMSettings) -> None:
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"backend='triton' with {q.dtype}: want float32, float16 or bfloat16; use backend='torch'"
        )
    limits = (("head width", q.shape[3], WIDEST_HEAD), ("chunk", settings.chunk, LONGEST_CHUNK))
    for name, got, most in limits:
        if got > most:
            raise ValueError(f"backend='triton' with {name} {got}: want at most {most}; use backend='torch'")


def _tensors(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, parameters: Parameters, state: KVMState | None
) -> CallTensors:
    """Everything the Function differentiates; the layer's own parameters in float32."""
    return CallTensors(
        q,
        k,
        v,
        gate,
        parameters.norm_weight.float(),
        parameters.norm_bias.float(),
        None if parameters.state_temperature is None else parameters.state_temperature.float(),
        None if parameters.window_temperature is None else parameters.window_temperature.float(),
        state.keys if state else None,
        state.values if state else None,
        state.magnitudes if state else None,
        state.window_keys if state else None,
        state.window_values if state else None,
        state.window_gate if state else None,
    )


def _wants_gradient(tensors: CallTensors) -> bool:
    given = (tensor for tensor in tensors.all() if tensor is not None)
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)


def _decode(call: Call, tensors: CallTensors, before: KVMState) -> tuple[Tensor, KVMState | None]:
    work = tensors.operands(call)
    decoded = decode(work, tensors.boundary())
    if not call.returns_state:
        return decoded.output, None
    stop = call.plan.stop
    kept = stop - window_start(call.settings, stop)

    def last(joined: Tensor) -> Tensor:
        return joined if joined.shape[1] == kept else joined[:, joined.shape[1] - kept :].clone()

    window = last(work.k), last(work.v), None if work.gate is None else last(work.gate)
    slots = [tensor.unflatten(0, before.keys.shape[:2]) for tensor in decoded.slots]
    return decoded.output, _state(slots, window, call.plan, call.settings)


def _state(
    slots: list[Tensor], window: tuple[Tensor, Tensor, Tensor | None], plan: Plan, settings: KVMSettings
) -> KVMState:
    keys, values, magnitudes = slots
    return KVMState(
        keys,
        values,
        magnitudes if settings.value_radius else None,
        None if settings.value_radius else magnitudes,
        *window,
        plan.stop,
    )
