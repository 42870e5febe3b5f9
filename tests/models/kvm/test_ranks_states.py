"""Everything of one rank comes back bit for bit on 2 to 16: routes, states at every edge, outputs, gradients.

Each rank's own tensors are compared with its part of what one rank has, none only in sum.
"""

from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from models.budget import Budget, FixedBudget, PowerLawBudget, SaturatingBudget
from models.kvm import KVMState, autograd
from parallel.sequence.context import Exchange
from parallel.sequence.recorded import ZeroExchange
from tests.models.kvm.cases import PARAMETERS, PER_TOKEN, Case, assert_close, random_case, state_tensors
from tests.support.logical_ranks import QueueExchange, run_logical_ranks

C = 4
TOKENS = 16 * 2 * C - 1
BUDGETS: list[Budget] = [
    FixedBudget(slots=9),
    PowerLawBudget(factor=2, minimum=C),
    SaturatingBudget(limit=30, minimum=C),
]
STATE = ("keys", "values", "radii")
Slots = tuple[Tensor, ...]  # S_K, S_V and magnitudes, slots first


class KeptStates:
    """An `Exchange` that keeps the states it hands on."""

    def __init__(self, exchange: Exchange) -> None:
        self.has_previous, self.has_next = exchange.has_previous, exchange.has_next
        self.receive_previous, self.receive_next = exchange.receive_previous, exchange.receive_next
        self.send_previous = exchange.send_previous
        self.exchange = exchange
        self.state: Slots = ()

    def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        if name in ("kvm.keys", "kvm.values"):
            self.state += tuple(tensor.clone() for tensor in tensors)
        self.exchange.send_next(name, tensors)


class Shard:
    """One call with its backward, through the output and through the state after the last token."""

    def __init__(self, case: Case, start: int, stop: int, exchange: Exchange) -> None:
        kept = KeptStates(exchange)
        leaves = case.leaves(start, stop)
        last = stop == case.tokens and not exchange.has_next
        output, state = case.call(leaves, exchange=kept, start=start, return_state=last)
        ends, gradients = [output], [case.grad_output[:, start:stop]]
        if state is not None:
            ends += [tensor for name, tensor in state_tensors(state).items() if name in STATE]
            gradients += [tensor.detach().cos() for tensor in ends[1:]]
        torch.autograd.backward(ends, gradients)
        self.output = output.detach()
        self.sent_state = kept.state
        self.state: KVMState | None = state
        self.gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def lengths_of(ranks: int, uneven: bool) -> list[int]:
    """Whole chunks but for the last: one each and the rest on the last rank, or every other three times as
    long."""
    if not uneven:
        return [C] * (ranks - 1) + [TOKENS - C * (ranks - 1)]
    short = -(-TOKENS // (2 * ranks * C)) * C
    lengths = [short, 3 * short] * (ranks // 2)
    return [*lengths[:-1], TOKENS - sum(lengths[:-1])]


def routes_of(calls: list[tuple[int, Tensor]]) -> Tensor:
    """Routes [B, t, H] of the folded tokens, of calls at their starts."""
    return torch.cat([routes for _, routes in sorted(calls, key=lambda call: call[0])], dim=1)


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: budget.kind)
@pytest.mark.parametrize("uneven", [False, True], ids=["shards of one chunk", "uneven shards"])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_every_tensor_of_every_rank_has_the_bits_of_one_rank(
    ranks: int, uneven: bool, budget: Budget
) -> None:
    case = random_case(TOKENS, batch=2, heads=3, width=8, seed=ranks, budget=budget, window_chunks=2)
    lengths = lengths_of(ranks, uneven)
    stops = list(accumulate(lengths))
    assert len(lengths) == ranks
    calls: list[tuple[int, Tensor]] = []
    run_forward = autograd.run_forward

    def watched(call: Any, given: Any) -> Any:
        found = run_forward(call, given)
        calls.append((call.plan.start, found[1].routes[0].clone()))
        return found

    with patch.object(autograd, "run_forward", watched):
        whole = Shard(case, 0, TOKENS, ZeroExchange(has_previous=False, has_next=False))
        of_one_rank = routes_of(calls)
        calls.clear()

        def one(rank: int, exchange: QueueExchange) -> Shard:
            return Shard(case, stops[rank] - lengths[rank], stops[rank], exchange)

        shards = run_logical_ranks(len(lengths), one, timeout_seconds=60)
    assert torch.equal(routes_of(calls), of_one_rank)
    for stop, length, shard in zip(stops, lengths, shards, strict=True):
        own = slice(stop - length, stop)
        assert torch.equal(shard.output, whole.output[:, own])
        for name in PER_TOKEN:
            assert torch.equal(shard.gradients[name], whole.gradients[name][:, own]), f"{name} at {own}"
        if stop < TOKENS:
            alone = Shard(case, 0, stop, ZeroExchange(has_previous=False, has_next=True))
            assert len(shard.sent_state) == len(alone.sent_state) == 3
            assert all(map(torch.equal, shard.sent_state, alone.sent_state)), f"state at {stop}"
    assert whole.state is not None
    assert shards[-1].state is not None
    for name, tensor in state_tensors(whole.state).items():
        assert torch.equal(getattr(shards[-1].state, name), tensor), name
    summed = {name: sum(shard.gradients[name] for shard in shards) for name in PARAMETERS}
    assert_close(
        {name: torch.as_tensor(one) for name, one in summed.items()},
        {name: whole.gradients[name] for name in PARAMETERS},
        2e-6,
    )


def temperatures_by_piece(case: Case, lengths: list[int]) -> list[dict[str, Tensor]]:
    """Gradients of the temperatures on one rank that reads each shard with temperatures of its own."""
    names = ("state_temperature", "window_temperature")
    leaves = case.leaves()
    outputs, state, own = [], None, []
    for stop, length in zip(accumulate(lengths), lengths, strict=True):
        piece = {
            name: leaf[:, stop - length : stop] if name in PER_TOKEN else leaf
            for name, leaf in leaves.items()
        }
        own.append({name: leaves[name].detach().clone().requires_grad_() for name in names})
        output, state = case.call({**piece, **own[-1]}, state=state, return_state=True, backend="torch")
        outputs.append(output)
    torch.cat(outputs, dim=1).backward(case.grad_output)
    return [{name: leaf.grad for name, leaf in one.items() if leaf.grad is not None} for one in own]


def test_every_rank_s_own_gradients_of_the_temperatures_are_those_of_its_tokens() -> None:
    lengths = [8, 24, 4, 4, 31]
    stops = list(accumulate(lengths))
    case = random_case(stops[-1], heads=3, budget=PowerLawBudget(factor=2, minimum=C))

    def one(rank: int, exchange: QueueExchange) -> dict[str, Tensor]:
        leaves = case.leaves(stops[rank] - lengths[rank], stops[rank])
        output, _ = case.call(leaves, exchange=exchange, start=stops[rank] - lengths[rank])
        output.backward(case.grad_output[:, stops[rank] - lengths[rank] : stops[rank]])
        return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    for wanted, found in zip(
        temperatures_by_piece(case, lengths), run_logical_ranks(len(lengths), one), strict=True
    ):
        assert_close({name: found[name] for name in wanted}, wanted, 2e-6)
