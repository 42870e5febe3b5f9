"""The launches of calls that never run: what is compiled ahead of time, and reported."""

import torch
from torch import Tensor

from models.budget import FixedBudget, PowerLawBudget, SlotBudget
from models.kvm.kernels.launch import Launch, recorded_launches
from models.kvm.kernels.tuning import Target
from models.kvm.layout import KVMSettings
from models.kvm.reference import Parameters
from models.kvm.state import KVMState
from models.kvm.triton_backend import kvm_triton
from parallel.sequence.context import NoExchange

HEADS, CHUNK, WINDOW_CHUNKS = 16, 256, 2


def sample_launches(target: Target, dtype: torch.dtype, width: int) -> list[Launch]:
    """Forward, backward and decoding at the paper's C=256, n=2: every kernel of one shape class.

    Each kernel comes once per set of constants; a growing and a fixed budget route differently.
    """
    with recorded_launches(target) as recorded:
        for budget in (PowerLawBudget(), FixedBudget()):
            _train(budget, dtype, width)
        for tokens in (1, CHUNK):
            _go_on(tokens, dtype, width)
    launches: dict[tuple[object, ...], Launch] = {}
    for launch in recorded:
        launches.setdefault((launch.kernel.__name__, *sorted(launch.constants.items())), launch)
    return list(launches.values())


def settings(budget: SlotBudget, width: int) -> KVMSettings:
    return KVMSettings(budget, CHUNK, WINDOW_CHUNKS, rotary_dims=width // 2)


def _parameters(width: int) -> Parameters:
    def empty(count: int) -> Tensor:
        return torch.empty(count).requires_grad_()

    return Parameters(empty(width), empty(width), empty(HEADS), empty(HEADS))


def _tokens(count: int, dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = (1, count, HEADS, width)
    q, k, v = (torch.empty(shape, dtype=dtype).requires_grad_() for _ in range(3))
    return q, k, v, torch.empty(shape[:3], dtype=dtype).requires_grad_()


def _train(budget: SlotBudget, dtype: torch.dtype, width: int) -> None:
    tokens = _tokens(4 * CHUNK + 100, dtype, width)
    output, _ = kvm_triton(*tokens, _parameters(width), settings(budget, width), None, False, NoExchange(), 0)
    output.backward(torch.empty_like(output))


def _go_on(tokens: int, dtype: torch.dtype, width: int) -> None:
    """Without gradients, after a state."""
    position = 4 * CHUNK + 100
    slots = torch.empty(1, HEADS, CHUNK, width)
    _, keys, values, gate = _tokens(position - 3 * CHUNK, dtype, width)
    state = KVMState(slots, slots, slots[..., 0].contiguous(), None, keys, values, gate, position)
    given, parameters = _tokens(tokens, dtype, width), _parameters(width)
    with torch.no_grad():
        kvm_triton(*given, parameters, settings(FixedBudget(), width), state, True, NoExchange(), 0)
