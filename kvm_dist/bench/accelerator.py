"""KVM against full attention on an accelerator: decode, prefill and backward over lengths.

One layer's sequence mixing, routing and state update included, as measured in arXiv 2605.09877, Section 5.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from kvm_dist.bench.setting import BUDGETS, FULL_ATTENTION
from models.budget import SlotBudget
from models.kvm import KVMState, kvm_attention
from models.kvm.layout import KVMSettings, slots_covering, tokens_covered

LENGTHS = tuple(1024 * 2**power for power in range(8))  # 1K to 128K
WINDOW_CHUNKS = 2


@dataclass(frozen=True)
class Shape:
    """One layer's inputs; the published measurement's by default."""

    batch: int = 8
    heads: int = 32
    head_dim: int = 128
    chunk: int = 256
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Measured:
    """seconds: median of one call; ratio: full attention's seconds over these, None where it was left out."""

    phase: str  # prefill, backward or decode
    method: str
    tokens: int
    seconds: float
    floor_seconds: float | None  # by the device's peak FLOPs and bandwidth
    ratio: float | None = None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Peak:
    """Dense 16-bit matrix FLOPs a second and bytes a second."""

    flops: float
    bandwidth: float


PEAKS = {"H200": Peak(989e12, 4.8e12), "H100": Peak(989e12, 3.35e12), "MI325X": Peak(1307e12, 6.0e12)}


def peak_of(device: torch.device) -> Peak | None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for key, peak in PEAKS.items() if key in name), None)


def check(device: torch.device, shape: Shape, tokens: int = 2048) -> dict[str, float]:
    """Largest error of outputs and gradients against the float64 definition on the same (rounded) inputs.

    Relative to the largest entry of each tensor. Raises ArithmeticError above what rounding explains.
    """
    small = Shape(1, min(shape.heads, 4), shape.head_dim, shape.chunk, shape.dtype)
    errors: dict[str, float] = {}
    for name, budget in BUDGETS.items():
        inputs = _inputs(small, tokens, device, requires_grad=True)
        exact = [z.detach().double().requires_grad_() for z in inputs]
        gradient = torch.randn_like(inputs[0])
        _forward(inputs, budget, small).backward(gradient)
        _forward(exact, budget, small, backend="reference").backward(gradient.double())
        for label, ours, wanted in zip("qkvg", inputs, exact, strict=True):
            assert ours.grad is not None, "every input has a gradient"
            assert wanted.grad is not None, "every input has a gradient"
            errors[f"{name} d{label}"] = _error(ours.grad, wanted.grad)
        with torch.no_grad():
            errors[f"{name} out"] = _error(
                _forward(inputs, budget, small), _forward(exact, budget, small, backend="reference")
            )
    bound = 8 * torch.finfo(shape.dtype).eps
    if wrong := {name: error for name, error in errors.items() if not error <= bound}:
        raise ArithmeticError(f"wrong on {device}, wanted at most {bound:.1e}: {wrong}; nothing was measured")
    return errors


def measure(
    device: torch.device, shape: Shape, lengths: tuple[int, ...], seconds: float, clock: "Clock | None" = None
) -> Iterator[Measured]:
    """Every phase and method at growing lengths, as long as the next length fits into `seconds`."""
    clock = clock or Clock(device)
    begun = time.perf_counter()
    for tokens in lengths:
        length_begun = time.perf_counter()
        try:
            rows = list(_at_length(device, shape, tokens, clock))
        except torch.OutOfMemoryError:
            return
        yield from with_ratios(rows)
        now = time.perf_counter()
        if now - begun + 4 * (now - length_begun) > seconds:  # attention at twice the length costs four times
            return


def with_ratios(rows: list[Measured]) -> Iterator[Measured]:
    """Adds how many times as fast as full attention in the same phase at the same length."""
    full = {row.phase: row.seconds for row in rows if row.method == FULL_ATTENTION}
    for row in rows:
        ratio = full[row.phase] / row.seconds if row.phase in full else None
        yield Measured(row.phase, row.method, row.tokens, row.seconds, row.floor_seconds, ratio)


def _at_length(device: torch.device, shape: Shape, tokens: int, clock: "Clock") -> Iterator[Measured]:
    inputs = _inputs(shape, tokens, device, requires_grad=True)
    peak = peak_of(device)
    for name, budget in BUDGETS.items():
        for phase, call in _kvm_calls(inputs, budget, shape):
            floor = kvm_floor(phase, tokens, budget, shape, peak) if peak else None
            yield Measured(phase, name, tokens, clock.median(call), floor)
    for phase, call in _full_calls(inputs):
        floor = full_floor(phase, tokens, shape, peak) if peak else None
        yield Measured(phase, FULL_ATTENTION, tokens, clock.median(call), floor)


def _kvm_calls(
    inputs: list[Tensor], budget: SlotBudget, shape: Shape
) -> Iterator[tuple[str, Callable[[], object]]]:
    detached = [z.detach() for z in inputs]
    yield "prefill", lambda: _forward(detached, budget, shape)
    out = _forward(inputs, budget, shape)
    gradient = torch.ones_like(out)
    yield "backward", lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)
    with torch.no_grad():
        _, state = _call([z[:, :-1] for z in detached], budget, shape, return_state=True)
    last = [z[:, -1:] for z in detached]
    yield "decode", lambda: _call(last, budget, shape, state=state, return_state=True)


def _full_calls(inputs: list[Tensor]) -> Iterator[tuple[str, Callable[[], object]]]:
    q, k, v = (z.detach().transpose(1, 2).contiguous().requires_grad_() for z in inputs[:3])
    a, b, c = q.detach(), k.detach(), v.detach()
    yield "prefill", lambda: F.scaled_dot_product_attention(a, b, c, is_causal=True)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.ones_like(out)
    yield "backward", lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)
    last = a[:, :, -1:]
    yield "decode", lambda: F.scaled_dot_product_attention(last, b, c)


class Clock:
    """Medians of synchronised calls; CUDA events where there is a GPU."""

    def __init__(self, device: torch.device, repeats: int = 5, most_seconds: float = 4.0) -> None:
        self.device, self.repeats, self.most_seconds = device, repeats, most_seconds

    def median(self, call: Callable[[], object]) -> float:
        """Seconds of one call, after one to warm up; fewer repeats if one takes long."""
        first = self._once(call)
        repeats = self.repeats if first * self.repeats < self.most_seconds else 1
        return median(self._once(call) for _ in range(repeats))

    def _once(self, call: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            begun = time.perf_counter()
            call()
            return time.perf_counter() - begun
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def kvm_floor(phase: str, tokens: int, budget: SlotBudget, shape: Shape, peak: Peak) -> float:
    """Least seconds by arithmetic and by bytes; a backward takes 2.5 times the reads of a forward."""
    settings = KVMSettings(budget, shape.chunk, WINDOW_CHUNKS, 1, 0, None, False, False, True)
    size = torch.finfo(shape.dtype).bits // 8
    per_head = shape.batch * shape.heads * shape.head_dim
    if phase == "decode":
        slots = slots_covering(settings, tokens_covered(settings, tokens))
        return per_head * (2 * 4 * slots + 2 * size * WINDOW_CHUNKS * shape.chunk) / peak.bandwidth
    ends = range(shape.chunk, tokens + 1, shape.chunk)
    slots_by_chunk = [slots_covering(settings, tokens_covered(settings, end)) for end in ends]
    window = min(tokens, WINDOW_CHUNKS * shape.chunk - shape.chunk // 2)
    reads = 4 * per_head * shape.chunk * sum(m + window for m in slots_by_chunk)
    routing = 2 * per_head * shape.chunk * sum(slots_by_chunk)
    flops = reads + routing if phase == "prefill" else 2.5 * reads
    return max(flops / peak.flops, _io_bytes(phase, per_head * tokens * size) / peak.bandwidth)


def full_floor(phase: str, tokens: int, shape: Shape, peak: Peak) -> float:
    size = torch.finfo(shape.dtype).bits // 8
    per_head = shape.batch * shape.heads * shape.head_dim
    if phase == "decode":
        return 2 * size * per_head * tokens / peak.bandwidth
    flops = 2 * per_head * tokens**2 * (1 if phase == "prefill" else 2.5)
    return max(flops / peak.flops, _io_bytes(phase, per_head * tokens * size) / peak.bandwidth)


def _io_bytes(phase: str, tensor_bytes: float) -> float:
    """q, k, v in and out out; a backward also reads the output's gradient and writes three."""
    return tensor_bytes * (4 if phase == "prefill" else 8)


def _inputs(shape: Shape, tokens: int, device: torch.device, requires_grad: bool) -> list[Tensor]:
    """q, k normed and v, [B, T, H, D], and the merge gate [B, T, H]."""
    generator = torch.Generator(device).manual_seed(0)
    size = (shape.batch, tokens, shape.heads, shape.head_dim)
    q, k, v = (torch.randn(size, generator=generator, device=device, dtype=shape.dtype) for _ in range(3))
    gate = torch.rand(size[:3], generator=generator, device=device, dtype=torch.float32).add(0.5)
    tensors = [F.layer_norm(q, size[3:]), F.layer_norm(k, size[3:]), v, gate.to(shape.dtype)]
    return [z.requires_grad_(requires_grad) for z in tensors]


def _forward(inputs: list[Tensor], budget: SlotBudget, shape: Shape, backend: str = "auto") -> Tensor:
    return _call(inputs, budget, shape, backend=backend)[0]


def _call(
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


def _error(ours: Tensor, wanted: Tensor) -> float:
    return float((ours.double() - wanted).abs().max() / wanted.abs().max())
