"""Attention to all tokens on shards of a sequence: by heads and by a chain, against one rank."""

from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from models.layers.full_attention import SoftmaxAttention
from parallel.mesh import Mesh
from parallel.sequence.chain import attend_by_chain
from parallel.sequence.context import NoExchange, SequenceContext, WholeSequence
from parallel.sequence.ranks import RankedSequence
from parallel.sequence.recorded import ZeroExchange
from tests.support.logical_all_to_all import LogicalRow
from tests.support.logical_ranks import QueueExchange, run_logical_ranks

PRIME_HEADS, WIDTH = 7, 16  # no number of ranks here divides seven heads
Results = list[list[Tensor]]  # output, gradients of query, key, value, each [B, T, H, D]


def tensors(tokens: int, heads: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(2, tokens, heads, WIDTH, generator=generator).to(dtype) for _ in range(4)]


def attended(
    context: SequenceContext,
    given: Sequence[Tensor],
    attention: SoftmaxAttention = SoftmaxAttention(),  # noqa: B008
) -> list[Tensor]:
    *inputs, weight = (z.clone().requires_grad_() for z in given)
    output = context.attend("0.full_attention.window", attention, *inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, weight.detach())]


def on_shards(
    given: list[Tensor],
    lengths: list[int],
    attention: SoftmaxAttention = SoftmaxAttention(),  # noqa: B008
) -> tuple[Results, list[int]]:
    """Results of every rank, and the bytes that each sent in its forward."""
    spans = [(stop - length, stop) for stop, length in zip(accumulate(lengths), lengths, strict=True)]
    row = LogicalRow(len(lengths))

    def one(rank: int, exchange: QueueExchange) -> tuple[list[Tensor], int]:
        mesh = cast(Mesh, SimpleNamespace(sequence_rank=rank))
        swap = row.rank(rank)
        context = RankedSequence(mesh, spans[rank][0], exchange, spans, swap)
        found = attended(context, [z[:, slice(*spans[rank])] for z in given], attention)
        sent = sum(size for direction, _, size in exchange.sent if direction == "next")
        return found, sent + sum(size for name, size in swap.sent if "gradient" not in name)

    results = run_logical_ranks(len(lengths), one)
    return [result[0] for result in results], [result[1] for result in results]


SHARDS = [[16, 16], [5, 1, 32], [16, 3, 40, 7], [1, 2, 3, 4, 5, 6, 7, 8]]
ERRORS = [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", SHARDS, ids=str)
def test_swapping_heads_gives_the_bits_of_one_rank(lengths: list[int], dtype: torch.dtype) -> None:
    given = tensors(sum(lengths), 2 * len(lengths), dtype)
    results, _ = on_shards(given, lengths)
    for found, expected in zip(zip(*results, strict=True), attended(WholeSequence(), given), strict=True):
        assert torch.equal(torch.cat(found, dim=1), expected)


@pytest.mark.parametrize(("dtype", "error"), ERRORS, ids=str)
@pytest.mark.parametrize("lengths", SHARDS, ids=str)
def test_a_chain_gives_the_output_and_gradients_of_one_rank(
    lengths: list[int], dtype: torch.dtype, error: float
) -> None:
    given = tensors(sum(lengths), PRIME_HEADS, dtype)
    results, _ = on_shards(given, lengths)
    for found, expected in zip(zip(*results, strict=True), attended(WholeSequence(), given), strict=True):
        assert (torch.cat(found, dim=1) - expected).abs().max() <= error * expected.abs().max()


@pytest.mark.parametrize(("dtype", "error"), ERRORS, ids=str)
def test_a_chain_may_read_blocks_of_queries_in_a_more_precise_dtype(dtype: torch.dtype, error: float) -> None:
    given, lengths = tensors(66, PRIME_HEADS, dtype), [16, 3, 40, 7]
    results, _ = on_shards(given, lengths, SoftmaxAttention(queries=5, part_dtype=torch.float32))
    for found, expected in zip(zip(*results, strict=True), attended(WholeSequence(), given), strict=True):
        assert (torch.cat(found, dim=1) - expected).abs().max() <= error * expected.abs().max()


@pytest.mark.parametrize("lengths", SHARDS, ids=str)
def test_each_way_sends_the_bytes_of_its_closed_form(lengths: list[int]) -> None:
    tokens, ranks, batch, size = sum(lengths), len(lengths), 2, 4
    _, by_heads = on_shards(tensors(tokens, 2 * ranks, torch.float32), lengths)
    _, by_chain = on_shards(tensors(tokens, PRIME_HEADS, torch.float32), lengths)
    token = batch * WIDTH * size  # of one head

    assert by_heads == [token * (3 * own * 2 * (ranks - 1) + 2 * (tokens - own)) for own in lengths]
    assert sum(by_heads) == 4 * token * 2 * ranks * tokens * (ranks - 1) // ranks
    stops = list(accumulate(lengths))
    assert by_chain == [*(2 * token * PRIME_HEADS * stop for stop in stops[:-1]), 0]


def test_keys_leave_before_any_are_read_and_are_passed_on_as_they_come() -> None:
    events: list[str] = []

    class Watched(SoftmaxAttention):
        def part(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
            events.append(f"read {key.shape[1]} tokens")
            return super().part(query, key, value, causal)

    class Neighbours(ZeroExchange):
        def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
            events.append(f"send {tensors[0].shape[1]} tokens")

        def receive_previous(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            events.append(f"receive {like[0].shape[1]} tokens")
            return super().receive_previous(name, like)

    neighbours = Neighbours(has_previous=True, has_next=True)
    attend_by_chain(neighbours, "keys", Watched(), [3, 5], *tensors(7, 2, torch.float32)[:3])
    own = ["send 7 tokens", "read 7 tokens"]
    assert events == own + [
        f"{event} {tokens} tokens" for tokens in (5, 3) for event in ("receive", "send", "read")
    ]


def test_a_context_without_the_spans_of_all_ranks_is_refused() -> None:
    context = RankedSequence(cast(Mesh, SimpleNamespace(sequence_rank=1)), 16, NoExchange())
    with pytest.raises(ValueError, match=r"0\.full_attention\.window.*spans of all ranks"):
        attended(context, tensors(4, 2, torch.float32))
