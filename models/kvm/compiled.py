"""The training call as two operators that `torch.compile` does not look into.

Tracing the call itself would unroll every chunk of a sequence. Operators take numbers and strings, so the
settings travel as those. Shapes depend on those of queries and keys alone, which may be symbolic.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from models.budget import FixedBudget, PowerLawBudget, SaturatingBudget, SlotBudget
from models.kvm.autograd import run_backward, run_forward
from models.kvm.backends import choose_backend
from models.kvm.call import Attended, Call, CallTensors
from models.kvm.checks import check_tensors, check_widths
from models.kvm.chunked import Arguments
from models.kvm.layout import KVMSettings
from models.kvm.reference import Parameters
from models.kvm.state import accumulation_dtype
from models.kvm.torch_passes import TorchPasses
from models.precision import without_autocast
from parallel.sequence.context import NoExchange

BUDGETS: dict[str, type[SlotBudget]] = {
    "fixed": FixedBudget,
    "power_law": PowerLawBudget,
    "saturating": SaturatingBudget,
}
NO_BOUND = -1  # of the slots

# The tensor arguments of `kvm_attention`.
Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None]


def can_compile(budget: SlotBudget, backend: str) -> bool:
    """Whether a training call on one rank can be one operator."""
    return type(budget) in BUDGETS.values() and backend != "reference"


def compiled_attention(
    tensors: Tensors,
    budget: SlotBudget,
    numbers: tuple[int, int, int, int, int | None],
    switches: tuple[bool, bool, bool],
    backend: str,
) -> Tensor:
    """Output [B, T, H, D].

    tensors: the arguments of `kvm_attention` in order. numbers: chunk, window_chunks, sinks, rotary_dims and
    max_slots; switches: gate_appends, gate_first_state and value_radius.
    """
    kind, budget_numbers = _encoded(budget)
    *sizes, max_slots = numbers
    bounded = [*sizes, NO_BOUND if max_slots is None else max_slots]
    output, _, _ = _attention(*tensors, kind, budget_numbers, bounded, list(switches), backend)
    return output


def _encoded(budget: SlotBudget) -> tuple[str, list[float]]:
    if isinstance(budget, FixedBudget):
        return "fixed", [budget.slots]
    if isinstance(budget, PowerLawBudget):
        return "power_law", [budget.factor, budget.exponent, budget.minimum, budget.round_down]
    assert isinstance(budget, SaturatingBudget), "asked for by `can_compile`"
    return "saturating", [budget.limit, budget.minimum, budget.round_down]


@lru_cache(maxsize=256)
def _decoded(
    kind: str, budget_numbers: tuple[float, ...], numbers: tuple[int, ...], switches: tuple[bool, ...]
) -> KVMSettings:
    names = [name for name in BUDGETS[kind].model_fields if name != "kind"]
    budget = BUDGETS[kind](**dict(zip(names, budget_numbers, strict=True)))
    chunk, window_chunks, sinks, rotary_dims, bound = numbers
    gate_appends, gate_first_state, value_radius = switches
    return KVMSettings(
        budget,
        chunk,
        window_chunks,
        sinks,
        rotary_dims,
        None if bound == NO_BOUND else bound,
        gate_appends,
        gate_first_state,
        value_radius,
    )


@torch.library.custom_op("kvm_dist::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor,
    state_temperature: Tensor | None,
    window_temperature: Tensor | None,
    budget: str,
    budget_numbers: Sequence[float],
    numbers: Sequence[int],
    switches: Sequence[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, T, H, D], its log-sum-exp [B, H, T] and the routes."""
    given = (q, k, v, gate, norm_weight, norm_bias, state_temperature, window_temperature)
    per_dim = {"key_norm_weight": norm_weight, "key_norm_bias": norm_bias}
    per_head = {"state_temperature": state_temperature, "window_temperature": window_temperature}
    check_tensors(q, k, v, gate, per_dim, per_head)
    settings = _decoded(budget, tuple(budget_numbers), tuple(numbers), tuple(switches))
    check_widths(q, settings)
    call, tensors = _call(given, settings, backend)
    with without_autocast(q.device), torch.cuda.device_of(q):
        _, attended = run_forward(call, tensors)
    packed = q.new_empty(_routes_room(k, settings.chunk, backend), dtype=torch.int32)
    filled = 0
    for one in attended.routes:
        packed[filled : filled + one.numel()] = one.flatten()
        filled += one.numel()
    packed[filled:] = 0
    return attended.output, attended.log_sum, packed


@_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor,
    state_temperature: Tensor | None,
    window_temperature: Tensor | None,
    budget: str,
    budget_numbers: Sequence[float],
    numbers: Sequence[int],
    switches: Sequence[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, heads, _ = q.shape
    log_sum = q.new_empty(batch, heads, tokens, dtype=accumulation_dtype(q.dtype))
    routes = q.new_empty(_routes_room(k, numbers[0], backend), dtype=torch.int32)
    return q.new_empty(q.shape), log_sum, routes


@torch.library.custom_op("kvm_dist::attention_backward", mutates_args=())
def _attention_backward(
    grad_output: Tensor,
    given: Sequence[Tensor],
    absent: Sequence[int],
    output: Tensor,
    log_sum: Tensor,
    routes: Tensor,
    budget: str,
    budget_numbers: Sequence[float],
    numbers: Sequence[int],
    switches: Sequence[bool],
    backend: str,
) -> list[Tensor]:
    """Gradients of the tensors given, those `absent` in the forward left out."""
    settings = _decoded(budget, tuple(budget_numbers), tuple(numbers), tuple(switches))
    present = iter(given)
    tensors: Any = tuple(None if place in absent else next(present) for place in range(8))
    call, prepared = _call(tensors, settings, backend)
    unpacked: list[Tensor] = []
    for shape in call.passes(call, prepared).routes_shapes(prepared.heads):
        filled = sum(one.numel() for one in unpacked)
        unpacked.append(routes[filled : filled + prod(shape)].view(shape))
    attended = Attended(output, log_sum, tuple(unpacked), prepared.boundary())
    found = run_backward(call, prepared, attended, grad_output)
    gradients = [grad for grad, tensor in zip(found.all()[:8], tensors, strict=True) if tensor is not None]
    # Small ones may share memory, which operators may not return.
    return [
        (grad if grad.dim() > 1 else grad.clone()).to(tensor.dtype).contiguous()
        for grad, tensor in zip(gradients, given, strict=True)
        if grad is not None
    ]


@_attention_backward.register_fake
def _(grad_output: Tensor, given: Sequence[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in given]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors, ctx.settings = inputs[:8], inputs[8:]
    ctx.absent = [place for place, tensor in enumerate(tensors) if tensor is None]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(tensor for tensor in tensors if tensor is not None), *output)


def _differentiate(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    *given, output, log_sum, routes = ctx.saved_tensors
    nothing = (None,) * (8 + len(ctx.settings))
    if grad_output is None:
        return nothing
    found = iter(_attention_backward(grad_output, given, ctx.absent, output, log_sum, routes, *ctx.settings))
    gradients = [None if place in ctx.absent else next(found) for place in range(8)]
    wanted = ctx.needs_input_grad[:8]
    return (*(grad if want else None for grad, want in zip(gradients, wanted, strict=True)), *nothing[8:])


_attention.register_autograd(_differentiate, setup_context=_save)


def _call(tensors: Tensors, settings: KVMSettings, backend: str) -> tuple[Call, CallTensors]:
    q, k, v, gate, norm_weight, norm_bias, state_temperature, window_temperature = tensors
    parameters = Parameters(norm_weight, norm_bias, state_temperature, window_temperature)
    exchange = NoExchange()
    given = Arguments(q, k, v, gate, parameters, settings, None, False, exchange, 0)
    if choose_backend(backend, exchange, q, settings) == "triton":
        from models.kvm.kernels.passes import TritonPasses  # only where there is a Triton to import

        return given.call(TritonPasses), given.tensors()
    return given.call(TorchPasses), given.tensors()


def _routes_room(k: Tensor, chunk: int, backend: str) -> int:
    """Numbers that the routes of a call may take: a token folds once; kernels pad chunks and keep two."""
    batch, tokens, heads, _ = k.shape
    in_torch = backend == "torch" or (backend == "auto" and not k.is_cuda)
    return batch * heads * (tokens if in_torch else 2 * (tokens + chunk))
