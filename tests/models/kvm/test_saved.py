"""What one KVM layer keeps for its backward beside its own tokens: the routes and the state before them."""

import pytest
import torch
from torch import Tensor

from models.budget import PowerLawBudget
from models.kvm import kvm_attention
from models.kvm.layout import KVMSettings, slots_covering, tokens_covered_ahead
from tests.support.logical_ranks import QueueExchange, run_logical_ranks
from tests.support.saved_bytes import saved_bytes

BATCH, HEADS, WIDTH, CHUNK, BLOCKS = 2, 2, 8, 16, 12
SETTINGS = KVMSettings(PowerLawBudget(factor=4, minimum=16), chunk=CHUNK)


def kept_beside_its_tokens(rank: int, exchange: QueueExchange, ranks: int) -> int:
    tokens = BLOCKS * CHUNK // ranks
    start, generator = rank * tokens, torch.Generator().manual_seed(rank)
    shapes = [(BATCH, tokens, HEADS, WIDTH)] * 3 + [(BATCH, tokens, HEADS), (WIDTH,), (WIDTH,)]
    given: list[Tensor] = [
        (torch.rand(shape, generator=generator) + 0.5).requires_grad_() for shape in shapes
    ]
    with saved_bytes(given) as saved:
        out, _ = kvm_attention(
            *given, budget=SETTINGS.budget, chunk=CHUNK, exchange=exchange, start=start, backend="torch"
        )
    out.sum().backward()
    output_and_log_sum = BATCH * tokens * HEADS * (WIDTH + 1) * 4
    return saved.total - output_and_log_sum


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_shard_keeps_its_routes_the_state_before_it_and_its_window_s_halo(ranks: int) -> None:
    def one(rank: int, exchange: QueueExchange) -> int:
        return kept_beside_its_tokens(rank, exchange, ranks)

    tokens = BLOCKS * CHUNK // ranks
    for rank, kept in enumerate(run_logical_ranks(ranks, one)):
        start = rank * tokens
        slots = slots_covering(SETTINGS, tokens_covered_ahead(SETTINGS, start)) if start else 0
        state = slots * (2 * WIDTH + 1)
        halo = SETTINGS.halo * (2 * WIDTH + 1) if start else 0
        routes = tokens
        assert kept <= BATCH * HEADS * 4 * (routes + state + halo)
