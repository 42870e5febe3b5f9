"""A sequence in pieces: by calls, by tokens, and by ranks."""

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from models.kvm import KVMState
from parallel.config import NodeSplits
from parallel.sequence.context import HeadSplit
from tests.models.kvm.cases import (
    PARAMETERS,
    PER_TOKEN,
    Case,
    assert_close,
    gradients,
    random_case,
    state_tensors,
)
from tests.support.logical_all_to_all import logical_node
from tests.support.logical_peers import LogicalPeers
from tests.support.logical_ranks import QueueExchange, run_logical_ranks


def in_pieces(case: Case, lengths: list[int]) -> tuple[Tensor, KVMState, dict[str, Tensor]]:
    """Output, last state and leaves of a case called piece by piece."""
    leaves = case.leaves()
    state, outputs = None, []
    for stop, length in zip(accumulate(lengths), lengths, strict=True):
        piece = {
            name: one[:, stop - length : stop] if name in PER_TOKEN else one for name, one in leaves.items()
        }
        output, state = case.call(piece, backend="triton", state=state, return_state=True)
        outputs.append(output)
    assert state is not None
    return torch.cat(outputs, dim=1), state, leaves


def test_pieces_give_the_output_state_and_gradients_of_one_call() -> None:
    case = random_case(27, heads=1, seed=3)
    wanted = case.run("reference")
    output, state, leaves = in_pieces(case, [3, 6, 9, 1, 8])
    output.backward(case.grad_output)
    assert_close({"output": output.detach()}, {"output": wanted.output}, 1e-5)
    assert_close(
        {name: one.detach() for name, one in state_tensors(state).items()}, state_tensors(wanted.state), 1e-5
    )
    assert_close(gradients(leaves), wanted.gradients, 2e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"gate_appends": True},
        {"gate": False, "value_radius": False, "temperatures": False, "window_chunks": 1},
    ],
)
def test_token_by_token_gives_the_output_and_state_of_one_call(settings: dict[str, Any]) -> None:
    case = random_case(14, batch=2, **settings)
    wanted = case.run("reference")
    with torch.no_grad():
        output, state, _ = in_pieces(case, [1] * 14)
    assert_close({"output": output}, {"output": wanted.output}, 1e-5)
    assert_close(state_tensors(state), state_tensors(wanted.state), 1e-5)


@pytest.mark.parametrize(
    ("lengths", "window_chunks", "groups"),
    [([8, 4, 12, 3], 2, 1), ([4, 4, 4, 12, 2], 4, 1), ([12, 14], 1, 1), ([8, 12, 6], 2, 2)],
)
def test_shards_give_the_bits_of_one_rank(lengths: list[int], window_chunks: int, groups: int) -> None:
    """groups: of heads in which states are handed over."""
    heads, batch = (1, 1) if groups == 1 else (3, 2)
    case = random_case(sum(lengths), window_chunks=window_chunks, heads=heads, batch=batch, gate_appends=True)
    one = case.run("triton")
    wanted = {"output": one.output, **one.gradients}
    stops = list(accumulate(lengths))
    more: dict[str, Any] = {"backend": "triton", "head_split": HeadSplit(groups)}

    def shard(rank: int, exchange: QueueExchange) -> dict[str, Tensor]:
        start, stop = stops[rank] - lengths[rank], stops[rank]
        leaves = case.leaves(start, stop)
        output, _ = case.call(leaves, exchange=exchange, start=start, **more)
        output.backward(case.grad_output[:, start:stop])
        return {"output": output.detach(), **gradients(leaves)}

    parts = run_logical_ranks(len(lengths), shard, timeout_seconds=120)
    for name, tensor in wanted.items():
        pieces = [part[name] for part in parts]
        if name in PARAMETERS:
            assert_close({name: sum(pieces[1:], pieces[0])}, {name: tensor}, 1e-5)
        else:
            assert torch.equal(torch.cat(pieces, dim=1), tensor), name


@pytest.mark.parametrize(
    ("lengths", "size", "groups", "splits"),
    [([8, 6], 2, 2, "routing"), ([8, 6], 2, 1, "operator"), ([4, 8, 4, 6], 2, 2, "operator")],
)
def test_ranks_that_split_heads_give_the_bits_of_one_rank(
    lengths: list[int], size: int, groups: int, splits: NodeSplits
) -> None:
    """groups: of a member's heads."""
    case = random_case(sum(lengths), heads=2 * groups if splits == "operator" else 2)
    one = case.run("triton")
    spans, peers = tuple(pairwise(accumulate(lengths, initial=0))), LogicalPeers(len(lengths), 120)

    def shard(rank: int, exchange: QueueExchange) -> dict[str, Tensor]:
        start, stop = spans[rank]
        leaves = case.leaves(start, stop)
        split = HeadSplit(groups, logical_node(peers.of(rank), rank, size, spans, splits))
        output, _ = case.call(leaves, exchange=exchange, start=start, backend="triton", head_split=split)
        output.backward(case.grad_output[:, start:stop])
        return {"output": output.detach(), **gradients(leaves)}

    parts = run_logical_ranks(len(lengths), shard, timeout_seconds=120)
    for name, tensor in {"output": one.output, **one.gradients}.items():
        if name not in PARAMETERS:
            assert torch.equal(torch.cat([part[name] for part in parts], dim=1), tensor), name
