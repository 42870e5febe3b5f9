"""One layer's sequence mixing on an accelerator: its inputs, the calls, and whether they are right."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvm_dist.bench.setting import BUDGETS
from models.budget import SlotBudget
from models.kvm import KVMState, kvm_attention

WINDOW_CHUNKS = 2


@dataclass(frozen=True)
class Shape:
    """One layer's inputs; by default those of arXiv 2605.09877, Section 5."""

    batch: int = 8
    heads: int = 32
    head_dim: int = 128
    chunk: int = 256
    dtype: torch.dtype = torch.bfloat16


def check(device: torch.device, shape: Shape, tokens: int = 2048) -> dict[str, float]:
    """Largest error of outputs, gradients and decoding against the float64 definition on the same inputs.

    Relative to the largest entry of each tensor. Raises ArithmeticError above what rounding explains.
    """
    small = replace(shape, batch=1, heads=min(shape.heads, 4))
    errors = {
        f"{name} {label}": error
        for name, budget in BUDGETS.items()
        for label, error in _errors(device, small, tokens, budget)
    }
    bound = 8 * torch.finfo(shape.dtype).eps
    if wrong := {name: error for name, error in errors.items() if not error <= bound}:
        raise ArithmeticError(f"wrong on {device}, wanted at most {bound:.1e}: {wrong}; nothing was measured")
    return errors


def _errors(
    device: torch.device, shape: Shape, tokens: int, budget: SlotBudget
) -> Iterator[tuple[str, float]]:
    inputs = make_inputs(shape, tokens, device, requires_grad=True)
    exact = [z.detach().double().requires_grad_() for z in inputs]
    gradient = torch.randn_like(inputs[0])
    out, _ = call_kvm(inputs, budget, shape)
    wanted, _ = call_kvm(exact, budget, shape, backend="reference")
    yield "out", relative_error(out.detach(), wanted.detach())
    out.backward(gradient)
    wanted.backward(gradient.double())
    for label, ours, definition in zip("qkvg", inputs, exact, strict=True):
        assert ours.grad is not None, "every input has a gradient"
        assert definition.grad is not None, "every input has a gradient"
        yield f"d{label}", relative_error(ours.grad, definition.grad)
    yield "decoded", relative_error(decode_last(inputs, budget, shape), wanted.detach()[:, -1:])


def make_inputs(shape: Shape, tokens: int, device: torch.device, requires_grad: bool) -> list[Tensor]:
    """q, k normed and v, [B, T, H, D], and the merge gate [B, T, H]."""
    generator = torch.Generator(device).manual_seed(0)
    size = (shape.batch, tokens, shape.heads, shape.head_dim)
    q, k, v = (torch.randn(size, generator=generator, device=device, dtype=shape.dtype) for _ in range(3))
    gate = torch.rand(size[:3], generator=generator, device=device, dtype=torch.float32).add(0.5)
    tensors = [F.layer_norm(q, size[3:]), F.layer_norm(k, size[3:]), v, gate.to(shape.dtype)]
    return [z.requires_grad_(requires_grad) for z in tensors]


def call_kvm(
    inputs: list[Tensor],
    budget: SlotBudget,
    shape: Shape,
    state: KVMState | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, KVMState | None]:
    q, k, v, gate = inputs
    norm_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    ones = torch.ones(shape.head_dim, device=q.device, dtype=norm_dtype)
    heads = torch.ones(shape.heads, device=q.device, dtype=norm_dtype)
    return kvm_attention(
        q,
        k,
        v,
        gate,
        ones,
        torch.zeros_like(ones),
        heads,
        heads,
        budget=budget,
        chunk=shape.chunk,
        window_chunks=WINDOW_CHUNKS,
        rotary_dims=shape.head_dim // 2,
        state=state,
        return_state=return_state,
        backend=backend,  # type: ignore[arg-type]
    )


@torch.no_grad()
def decode_last(inputs: list[Tensor], budget: SlotBudget, shape: Shape, backend: str = "auto") -> Tensor:
    """The last token's output [B, 1, H, D] after a prefill of those before it."""
    before, last = [z[:, :-1] for z in inputs], [z[:, -1:] for z in inputs]
    _, state = call_kvm(before, budget, shape, return_state=True, backend=backend)
    return call_kvm(last, budget, shape, state=state, return_state=True, backend=backend)[0]


def relative_error(ours: Tensor, wanted: Tensor) -> float:
    """The largest difference, of the largest entry wanted."""
    return float((ours.double() - wanted.double()).abs().max() / wanted.abs().max())
