"""`backend="triton"`."""

from dataclasses import replace

import torch
from torch import Tensor

from models.kvm.call import Call, CallTensors
from models.kvm.chunked import Arguments, run, state_after, wants_gradient
from models.kvm.kernels.decode import decode, fold_in
from models.kvm.kernels.passes import TritonPasses
from models.kvm.kernels.tuning import LONGEST_CHUNK, MOST_ROWS, WIDEST_HEAD
from models.kvm.layout import KVMSettings, window_start
from models.kvm.state import KVMState
from models.kvm.window_room import room_after


def kvm_triton(given: Arguments) -> tuple[Tensor, KVMState | None]:
    """Output [B, T, H, D] and the state after the last token, if wanted."""
    _refuse(given.q, given.settings)
    call, tensors = given.call(TritonPasses), given.tensors()
    with torch.cuda.device_of(given.q):
        if given.state and given.alone and given.q.shape[1] == 1 and not wants_gradient(tensors):
            return _decode(call, tensors, given.state)
        return run(given, call, tensors)


def _refuse(q: Tensor, settings: KVMSettings) -> None:
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"backend='triton' with {q.dtype}: want float32, float16 or bfloat16; use backend='torch'"
        )
    limits = (
        ("head width", q.shape[3], WIDEST_HEAD),
        ("chunk", settings.chunk, LONGEST_CHUNK),
        ("batch times heads", q.shape[0] * q.shape[2], MOST_ROWS),
    )
    for name, got, most in limits:
        if got > most:
            raise ValueError(f"backend='triton' with {name} {got}: want at most {most}; use backend='torch'")


def _decode(call: Call, tensors: CallTensors, before: KVMState) -> tuple[Tensor, KVMState | None]:
    keys, values, magnitudes = (
        one.flatten(0, 1).contiguous() for one in (before.keys, before.values, before.magnitudes)
    )
    if call.plan.folds:
        keys, values, magnitudes = fold_in(TritonPasses(call, tensors).work, (keys, values, magnitudes))
    alone = replace(tensors, window_keys=None, window_values=None, window_gate=None)
    token = TritonPasses(call, alone).work
    held = call.plan.stop - 1 - window_start(call.settings, call.plan.stop)
    like = (token.k, token.gate)
    room = room_after(before, held, call.settings.window, like, grows=call.returns_state)
    output = decode(token, (keys, values, magnitudes), room, held, keep=call.returns_state)
    if not call.returns_state:
        return output, None
    of_heads = before.keys.shape[:2]
    slots = keys.unflatten(0, of_heads), values.unflatten(0, of_heads), magnitudes.unflatten(0, of_heads)
    return output, replace(state_after(call, slots, room.window(held + 1)), room=room)
