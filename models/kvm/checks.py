"""What the operator's arguments must be. A ValueError names what does not fit, and what would."""

from torch import Tensor

from models.kvm.layout import KVMSettings, slots_covering, tokens_covered, window_start
from models.kvm.state import KVMState, accumulation_dtype
from parallel.sequence.context import Exchange


def check_place(
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


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    merge_gate: Tensor | None,
    per_dim: dict[str, Tensor],
    per_head: dict[str, Tensor | None],
) -> None:
    if q.dim() != 4 or 0 in q.shape:
        raise ValueError(f"q has shape {list(q.shape)}: want [B, T, H, D], none of them 0")
    batch, tokens, query_heads, width = q.shape
    heads = k.shape[2] if k.dim() == 4 else query_heads
    if not heads or query_heads % heads:
        raise ValueError(
            f"k has shape {list(k.shape)}: want a number of heads that divides the {query_heads} of q "
            f"{list(q.shape)}, so that as many query heads read each"
        )
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
                + (f" and k {list(k.shape)}" if heads != query_heads else "")
            )
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}: want a floating-point dtype")
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}: move them to one device")
    if not k.dtype == v.dtype == q.dtype:
        raise ValueError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}: want one dtype")


def check_widths(q: Tensor, settings: KVMSettings) -> None:
    if settings.rotary_dims >= q.shape[3]:
        raise ValueError(
            f"rotary_dims={settings.rotary_dims}: want less than the head width {q.shape[3]}, or no dim "
            "is left"
        )


def check_state(state: KVMState, k: Tensor, merge_gate: Tensor | None, settings: KVMSettings) -> None:
    """A state made under other settings has other shapes: they are functions of the position."""
    batch, _, heads, width = k.shape
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
    if state.keys.dtype != accumulation_dtype(k.dtype):
        raise ValueError(
            f"state.keys has dtype {state.keys.dtype}: want {accumulation_dtype(k.dtype)} for {k.dtype}"
        )
