"""From the operator's arguments to one call of its autograd Function, and back."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.kvm.autograd import KVMFunction
from models.kvm.call import Arrivals, Call, CallTensors, Passes
from models.kvm.handover import Handover
from models.kvm.layout import KVMSettings, plan_call, window_start
from models.kvm.reference import Parameters
from models.kvm.state import KVMState, accumulation_dtype, window_after
from parallel.sequence.context import Exchange, HeadSplit

MakePasses = Callable[[Call, CallTensors], Passes]


@dataclass(frozen=True)
class Arguments:
    """What `kvm_attention` was given, checked. Shapes as there."""

    q: Tensor
    k: Tensor
    v: Tensor
    merge_gate: Tensor | None
    parameters: Parameters
    settings: KVMSettings
    state: KVMState | None
    return_state: bool
    exchange: Exchange
    start: int
    head_split: HeadSplit = HeadSplit()  # noqa: RUF009
    arrivals: Arrivals | None = None

    @property
    def alone(self) -> bool:
        """Whether no other rank holds tokens of the sequence."""
        return not (self.exchange.has_previous or self.exchange.has_next)

    def call(self, passes: MakePasses) -> Call:
        start = self.state.position if self.state else self.start
        plan = plan_call(
            self.settings,
            start,
            start + self.q.shape[1],
            ahead_at_start=self.exchange.has_previous,
            ahead_at_stop=self.exchange.has_next,
        )
        handover = Handover(self.exchange, self.settings, plan, self.head_split)
        return Call(self.settings, plan, handover, self.return_state, passes, self.arrivals)

    def tensors(self) -> CallTensors:
        """Everything the Function differentiates; the layer's own parameters in the accumulation dtype."""
        dtype = accumulation_dtype(self.q.dtype)
        norm_weight, norm_bias, *temperatures = vars(self.parameters).values()
        return CallTensors(
            _unit_stride(self.q),
            _unit_stride(self.k),
            _unit_stride(self.v),
            self.merge_gate,
            norm_weight.to(dtype),
            norm_bias.to(dtype),
            *(None if one is None else one.to(dtype) for one in temperatures),
            *_of_state(self.state, self.k.dtype),
        )


def run(given: Arguments, call: Call, tensors: CallTensors) -> tuple[Tensor, KVMState | None]:
    """Output [B, T, H, D] and the state after the last token, if wanted."""
    result = KVMFunction.apply(call, *tensors.all())
    if not call.returns_state:
        return result, None
    output, *slots = result
    kept = call.plan.stop - window_start(call.settings, call.plan.stop)
    window = window_after(given.state, given.k, given.v, given.merge_gate, kept)
    window = call.handover.complete(window, kept)
    keys, values = (tensor.permute(1, 2, 0, 3).contiguous() for tensor in slots[:2])
    return output, state_after(call, (keys, values, slots[2].permute(1, 2, 0).contiguous()), window)


def state_after(
    call: Call, slots: tuple[Tensor, Tensor, Tensor], window: tuple[Tensor, Tensor, Tensor | None]
) -> KVMState:
    """slots: [B, H, m, D], [B, H, m, D] and [B, H, m]."""
    keys, values, magnitudes = slots
    radius = call.settings.value_radius
    return KVMState(
        keys,
        values,
        magnitudes if radius else None,
        None if radius else magnitudes,
        *window,
        call.plan.stop,
    )


def wants_gradient(tensors: CallTensors) -> bool:
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors.all())


def _of_state(state: KVMState | None, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Slots of a state, slots first, and its window."""
    if state is None:
        return (None,) * 6
    return (
        state.keys.permute(2, 0, 1, 3),
        state.values.permute(2, 0, 1, 3),
        state.magnitudes.permute(2, 0, 1),
        _unit_stride(state.window_keys.to(dtype)),
        _unit_stride(state.window_values.to(dtype)),
        state.window_gate,
    )


def _unit_stride(tensor: Tensor) -> Tensor:
    """Fused attention wants the head width innermost."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
