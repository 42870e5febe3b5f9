"""One token after a state, without gradients: nothing of the state is copied unless a chunk is folded in."""

import torch
from torch import Tensor

from models.kvm.kernels.advance import advance
from models.kvm.kernels.attend import walk_to_end
from models.kvm.kernels.jit.decode import decode_kernel, join_pieces_kernel
from models.kvm.kernels.launch import launch
from models.kvm.kernels.operands import Operands, SlotTensors
from models.kvm.window_room import WindowRoom

# Programs that keep any GPU busy: rows are cut into so many pieces of their keys.
PROGRAMS = 1024


def fold_in(call: Operands, slots: SlotTensors) -> SlotTensors:
    """The slots [rows, m, .] after the folds of a call of one token."""
    (block,) = call.plan.blocks
    assert not (block.slots and call.plan.closing), "one token both reads slots and opens more"
    return walk_to_end(call, advance(call, slots[0])[0], slots)


def decode(token: Operands, slots: SlotTensors, window: WindowRoom, held: int, keep: bool) -> Tensor:
    """Output [B, 1, group * H, D] of a token after slots [rows, m, .] and `held` tokens of the window.

    token: of a call that was handed nothing from before it. keep: write it behind the window's tokens.
    """
    (block,), tile = token.plan.blocks, token.tile("decode")
    keys = max(block.slots + held, 1)
    most = token.tiles(keys, tile.block_n)
    per_piece = token.tiles(most, max(1, min(most, PROGRAMS // token.query_rows))) * tile.block_n
    pieces = token.tiles(keys, per_piece)
    partial = token.norm_weight.new_empty(pieces, token.query_rows, token.width + 2)
    output = torch.empty_like(token.q)
    launch(
        decode_kernel,
        (pieces, token.query_rows),
        (
            token.q, *slots, window.keys, window.values, window.keys if window.gate is None else window.gate,
            token.k, token.v, token.gate_or_any, token.norm_weight, token.norm_bias, token.state_temperature,
            token.window_temperature, partial, block.slots, slots[0].shape[1], held, window.keys.shape[1],
            token.heads, per_piece, token.scale,
        ),
        tile,
        token.target,
        TEMPERED=token.tempered,
        RADIUS=token.settings.value_radius,
        GATE=token.gate is not None,
        KEEP=keep,
        GROUP=token.group,
        BLOCK_N=tile.block_n,
        **token.widths,
    )  # fmt: skip
    grid = (token.query_rows,)
    launch(join_pieces_kernel, grid, (partial, output, pieces), tile, token.target, **token.widths)
    return output
