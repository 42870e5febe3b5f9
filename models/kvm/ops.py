"""`kvm_attention`: checks what it is given and picks the backend. Nothing else does either."""

from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from models.budget import SlotBudget
from models.kvm.kernels.tuning import LONGEST_CHUNK, WIDEST_HEAD
from models.kvm.layout import KVMSettings, slots_covering, tokens_covered, window_start
from models.kvm.opaque import opaque_to_compiler
from models.kvm.reference import Parameters, kvm_reference
from models.kvm.state import KVMState, accumulation_dtype
from models.kvm.torch_backend import kvm_torch
from parallel.sequence.context import Exchange, NoExchange

Backend = Literal["auto", "reference", "torch", "triton"]


@opaque_to_compiler
def kvm_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    merge_gate: Tensor | None,
    key_norm_weight: Tensor,
    key_norm_bias: Tensor,
    state_temperature: Tensor | None = None,
    window_temperature: Tensor | None = None,
    *,
    budget: SlotBudget,
    chunk: int = 256,
    window_chunks: int = 2,
    sinks: int = 1,
    rotary_dims: int = 0,
    max_slots: int | None = None,
    gate_appends: bool = False,
    gate_first_state: bool = False,
    value_radius: bool = True,
    state: KVMState | None = None,
    return_state: bool = False,
    backend: Backend = "auto",
    exchange: Exchange = NoExchange(),  # noqa: B008
    start: int = 0,
) -> tuple[Tensor, KVMState | None]:
    """Key-Value Means attention (arXiv 2605.09877): one softmax over a block window and growing state.

    q, k, v: [B, T, H, D], normed per head and rotated in their first `rotary_dims` dims.
    merge_gate: [B, T, H], positive, or None for no gate.
    key_norm_weight, key_norm_bias: [D] of the state key norm.
    state_temperature, window_temperature: [H] inverse temperatures, or None for 1.
    state: goes on after an earlier call; return_state: also return what the next call needs (else None).
    exchange: neighbours along the sequence. The tokens are then a chunk-aligned shard whose first position is
        `start`; the window and state before it come from the rank before, those after it go to the next.

    Returns the output [B, T, H, D] and the state. Raises ValueError for shapes or settings that do not fit.
    """
    settings = KVMSettings(
        budget,
        chunk,
        window_chunks,
        sinks,
        rotary_dims,
        max_slots,
        gate_appends,
        gate_first_state,
        value_radius,
    )
    temperatures = {"state_temperature": state_temperature, "window_temperature": window_temperature}
    norm = {"key_norm_weight": key_norm_weight, "key_norm_bias": key_norm_bias}
    _check_tensors(q, k, v, merge_gate, norm, temperatures)
    if rotary_dims >= q.shape[3]:
        raise ValueError(
            f"rotary_dims={rotary_dims}: want less than the head width {q.shape[3]}, or no dim is left"
        )
    if state is not None:
        _check_state(state, q, merge_gate, settings)
    _check_place(state, exchange, start, q.shape[1], return_state, settings)
    chosen = _backend(backend, exchange, q, settings)
    parameters = Parameters(key_norm_weight, key_norm_bias, state_temperature, window_temperature)
    with torch.autocast(q.device.type, enabled=False):  # routing does not survive rounding
        if chosen == "reference":
            output, after = kvm_reference(q, k, v, merge_gate, parameters, settings, state)
            return output, after if return_state else None
        if chosen == "triton":
            from models.kvm.triton_backend import kvm_triton  # only where there is a Triton to import

            return kvm_triton(q, k, v, merge_gate, parameters, settings, state, return_state, exchange, start)
        return kvm_torch(q, k, v, merge_gate, parameters, settings, state, return_state, exchange, start)


def _backend(
    backend: str, exchange: Exchange, q: Tensor, settings: KVMSettings
) -> Literal["reference", "torch", "triton"]:
    if backend == "reference":
        if exchange.has_previous or exchange.has_next:
            raise ValueError(
                "backend='reference' does not run on a shard of a sequence; use 'auto' or 'torch'"
            )
        return "reference"
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend={backend!r}: want 'auto', 'reference', 'torch' or 'triton'")
    if backend == "triton" and not _has_triton():
        raise ValueError("backend='triton': Triton is not installed; install it, or use 'auto' or 'torch'")
    if backend == "auto":
        in_kernels = (
            q.dtype != torch.float64 and q.shape[3] <= WIDEST_HEAD and settings.chunk <= LONGEST_CHUNK
        )
        return "triton" if q.is_cuda and in_kernels and _has_triton() else "torch"
    return "torch" if backend == "torch" else "triton"


@cache
def _has_triton() -> bool:
    """Looked for once: it would cost as much as decoding a token."""
    return find_spec("triton") is not None


def _check_place(
    state: KVMState | None,
    exchange: Exchange,
    start: int,
    tokens: int,
    return_state: bool,
    settings: KVMSettings,
) -> None:
    """Where the tokens lie in the sequence, and who holds what is before and after them."""
    stop = start + tokens
    if not exchange.has_previous:
        expected = state.position if state else 0
        if start not in (0, expected):
            raise ValueError(f"start={start}: these tokens begin at {expected}; leave start out")
    elif state is not None:
        raise ValueError("state: the rank before hands it over; give state only without an exchange")
    elif start <= 0 or start % settings.chunk:
        raise ValueError(
            f"start={start}: a shard after the first begins at a multiple of chunk={settings.chunk}"
        )
    if exchange.has_next and stop % settings.chunk:
        raise ValueError(
            f"the shard [{start}, {stop}) ends inside a chunk: want a multiple of chunk="
            f"{settings.chunk} for all shards but the last"
        )
    if exchange.has_next and return_state:
        raise ValueError("return_state: only the last rank has the state after the sequence")


def _check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    merge_gate: Tensor | None,
    per_dim: dict[str, Tensor],
    per_head: dict[str, Tensor | None],
) -> None:
    if q.dim() != 4 or 0 in q.shape:
        raise ValueError(f"q has shape {list(q.shape)}: want [B, T, H, D], none of them 0")
    batch, tokens, heads, width = q.shape
    wanted: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("k", k, (batch, tokens, heads, width)),
        ("v", v, (batch, tokens, heads, width)),
        ("merge_gate", merge_gate, (batch, tokens, heads)),
        *((name, tensor, (width,)) for name, tensor in per_dim.items()),
        *((name, tensor, (heads,)) for name, tensor in per_head.items()),
    ]
    for name, tensor, shape in wanted:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: want {list(shape)} beside q {list(q.shape)}"
            )
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}: want a floating-point dtype")
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}: move them to one device")
    if not k.dtype == v.dtype == q.dtype:
        raise ValueError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}: want one dtype")


def _check_state(state: KVMState, q: Tensor, merge_gate: Tensor | None, settings: KVMSettings) -> None:
    """A state made under other settings has other shapes: they are functions of the position."""
    batch, _, heads, width = q.shape
    position = state.position
    slots = slots_covering(settings, tokens_covered(settings, position))
    window = position - window_start(settings, position)
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "state.keys": (state.keys, (batch, heads, slots, width)),
        "state.values": (state.values, (batch, heads, slots, width)),
        "state.radii": (state.radii, (batch, heads, slots)),
        "state.counts": (state.counts, (batch, heads, slots)),
        "state.window_keys": (state.window_keys, (batch, window, heads, width)),
        "state.window_values": (state.window_values, (batch, window, heads, width)),
        "state.window_gate": (state.window_gate, (batch, window, heads)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: want {list(shape)} at position {position}; "
                "go on with the batch and the settings the state was made with"
            )
    if (state.radii is None) == settings.value_radius:
        raise ValueError(
            f"state holds {'counts' if state.radii is None else 'radii'} but value_radius="
            f"{settings.value_radius}; go on with the settings the state was made with"
        )
    if (state.window_gate is None) != (merge_gate is None):
        raise ValueError("merge_gate: give it in every call of a sequence or in none")
    if state.keys.dtype != accumulation_dtype(q.dtype):
        raise ValueError(
            f"state.keys has dtype {state.keys.dtype}: want {accumulation_dtype(q.dtype)} for {q.dtype}"
        )
