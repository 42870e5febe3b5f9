"""`backend="torch"`."""

from torch import Tensor

from models.kvm.chunked import Arguments, run
from models.kvm.decode import can_decode, decode
from models.kvm.state import KVMState
from models.kvm.torch_passes import TorchPasses


def kvm_torch(given: Arguments) -> tuple[Tensor, KVMState | None]:
    """Output [B, T, H, D] and the state after the last token, if wanted."""
    call = given.call(TorchPasses)
    tokens = given.q, given.k, given.v, given.merge_gate
    parts = (*tokens, *vars(given.parameters).values())
    if given.state is not None and given.alone and can_decode(call.plan, given.state, parts):
        output, after = decode(*tokens, given.parameters, given.settings, call.plan, given.state)
        return output, after if given.return_state else None
    return run(given, call, given.tensors())
