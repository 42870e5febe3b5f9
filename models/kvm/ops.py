"""`kvm_attention`: the door to the operator, in eager and in compiled code."""

import torch
from torch import Tensor

from models.budget import SlotBudget
from models.kvm.backends import Backend, choose_backend
from models.kvm.by_heads import Place, attend_by_heads
from models.kvm.checks import check_place, check_state, check_tensors, check_widths
from models.kvm.chunked import Arguments
from models.kvm.compiled import Tensors, can_compile, compiled_attention
from models.kvm.layout import KVMSettings
from models.kvm.node_inputs import NodeInputs
from models.kvm.opaque import opaque_to_compiler
from models.kvm.reference import Parameters, kvm_reference
from models.kvm.state import KVMState
from models.kvm.torch_backend import kvm_torch
from models.precision import without_autocast
from parallel.sequence.context import Exchange, HeadSplit, NoExchange

Settings = tuple[SlotBudget, int, int, int, int, int | None, bool, bool, bool]


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
    head_split: HeadSplit = HeadSplit(),  # noqa: B008
    inputs: NodeInputs | None = None,
) -> tuple[Tensor, KVMState | None]:
    """Key-Value Means attention (arXiv 2605.09877): one softmax over a block window and growing state.

    q: [B, T, H, D]; k, v: [B, T, h, D] with h heads that divide those of q (as many, mostly), of which query
        head i reads head i // (H / h). Normed per head and rotated in their first `rotary_dims` dims.
    merge_gate: [B, T, h], positive, or None for no gate.
    key_norm_weight, key_norm_bias: [D] of the state key norm.
    state_temperature, window_temperature: [h] inverse temperatures, or None for 1.
    state: goes on after an earlier call; return_state: also return what the next call needs (else None).
    exchange: neighbours along the sequence. The tokens are then a chunk-aligned shard whose first position is
        `start`; the window and state before it come from the rank before, those after it go to the next, in
        groups of the h heads as `head_split` has them.
    inputs: those of a node that splits the operator, which q, k, v and merge_gate were started with.

    Returns the output [B, T, H, D] and the state. Raises ValueError for shapes or settings that do not fit.
    """
    tensors = (q, k, v, merge_gate, key_norm_weight, key_norm_bias, state_temperature, window_temperature)
    numbers = (chunk, window_chunks, sinks, rotary_dims, max_slots)
    switches = (gate_appends, gate_first_state, value_radius)
    if torch.compiler.is_compiling() and can_compile(budget, backend):
        alone = not (exchange.has_previous or exchange.has_next)
        if alone and start == 0 and state is None and not return_state:
            return compiled_attention(tensors, budget, numbers, switches, backend), None
    place = (exchange, start, head_split)
    return _attention(tensors, (budget, *numbers, *switches), state, return_state, backend, place, inputs)


@opaque_to_compiler
def _attention(
    tensors: Tensors,
    switches: Settings,
    state: KVMState | None,
    return_state: bool,
    backend: Backend,
    place: Place,
    inputs: NodeInputs | None = None,
) -> tuple[Tensor, KVMState | None]:
    """Check what was given, and run it on the backend chosen."""
    exchange, start, split = place
    if split.node is not None and split.node.splits == "operator":
        if state is not None or return_state:
            raise ValueError(
                "ranks that split the operator by heads keep no state; use a node that splits routing"
            )

        def attend(given: Tensors, at: Place, arriving: NodeInputs) -> Tensor:
            return _attention(given, switches, None, False, backend, at, arriving)[0]

        return attend_by_heads(tensors, inputs, split.node, split.groups, attend), None
    q, k, v, merge_gate, norm_weight, norm_bias, state_temperature, window_temperature = tensors
    settings = KVMSettings(*switches)
    norm = {"key_norm_weight": norm_weight, "key_norm_bias": norm_bias}
    temperatures = {"state_temperature": state_temperature, "window_temperature": window_temperature}
    check_tensors(q, k, v, merge_gate, norm, temperatures)
    check_widths(q, settings)
    if state is not None:
        check_state(state, k, merge_gate, settings)
    check_place(state, exchange, start, q.shape[1], return_state, settings)
    chosen = choose_backend(backend, exchange, q, settings)
    parameters = Parameters(norm_weight, norm_bias, state_temperature, window_temperature)
    with without_autocast(q.device):  # routing does not survive rounding
        if chosen == "reference":
            if inputs is not None:
                inputs.wait_for_tokens()
                inputs.wait_for_queries()
            output, after = kvm_reference(q, k, v, merge_gate, parameters, settings, state)
            return output, after if return_state else None
        given = Arguments(q, k, v, merge_gate, parameters, settings, state, return_state, *place, inputs)
        if chosen == "triton":
            from models.kvm.triton_backend import kvm_triton  # only where there is a Triton to import

            return kvm_triton(given)
        return kvm_torch(given)
