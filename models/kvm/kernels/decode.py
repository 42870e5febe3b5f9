"""One token after a state, without gradients: nothing of the state is copied unless a chunk is folded in."""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.kvm.kernels.advance import advance
from models.kvm.kernels.attend import walk_to_end
from models.kvm.kernels.jit.decode import decode_kernel, join_pieces_kernel
from models.kvm.kernels.launch import launch
from models.kvm.kernels.operands import Operands, SlotTensors

# Programs that keep any GPU busy: rows are cut into so many pieces of their keys.
PROGRAMS = 1024


@dataclass(frozen=True)
class Decoded:
    output: Tensor  # [B, 1, H, D]
    slots: SlotTensors  # [rows, m, .] after the token


def decode(call: Operands, boundary: SlotTensors) -> Decoded:
    """The call's one token, after slots [rows, m, .]."""
    (block,) = call.plan.blocks
    slots = boundary
    if call.plan.folds:
        assert not (block.slots and call.plan.closing), "one token both reads slots and opens more"
        slots = walk_to_end(call, advance(call, boundary[0])[0], boundary)
    slots = slots[0].contiguous(), slots[1].contiguous(), slots[2].contiguous()
    first_key = block.window_start - (block.stop - call.tokens)
    return Decoded(_read(call, slots, block.slots, first_key), slots)


def _read(call: Operands, slots: SlotTensors, read: int, first_key: int) -> Tensor:
    tile = call.tile("decode")
    keys = read + call.tokens - first_key
    most = call.tiles(keys, tile.block_n)
    per_piece = call.tiles(most, max(1, min(most, PROGRAMS // call.rows))) * tile.block_n
    pieces = call.tiles(keys, per_piece)
    partial = call.norm_weight.new_empty(pieces, call.rows, call.width + 2)
    output = torch.empty_like(call.q)
    launch(
        decode_kernel,
        (pieces, call.rows),
        (
            call.q, *slots, call.k, call.v, call.norm_weight, call.norm_bias, call.state_temperature,
            call.window_temperature, partial, read, slots[0].shape[1], first_key, call.tokens, call.heads,
            per_piece, call.scale,
        ),
        tile,
        call.target,
        TEMPERED=call.tempered,
        RADIUS=call.settings.value_radius,
        BLOCK_N=tile.block_n,
        **call.widths,
    )  # fmt: skip
    launch(join_pieces_kernel, (call.rows,), (partial, output, pieces), tile, call.target, **call.widths)
    return output
