"""A prompt read on several ranks against one: its logits, and the tokens after it."""

from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from models.backbone import Backbone
from models.cache import CachedSequence, read
from models.config import BlockWindowConfig
from models.generate import generate, go_on
from models.prefill import prefill
from models.sequence_shards import sequence_shards
from parallel.config import ParallelConfig
from parallel.mesh import Mesh
from parallel.sequence.all_to_all import GroupAllToAll
from parallel.sequence.exchange import RankExchange
from parallel.sequence.ranks import RankedSequence
from parallel.world import World
from tests.models.tiny import RECURRENCES, tiny_batch, tiny_model
from tests.support.logical_all_to_all import LogicalRow
from tests.support.logical_ranks import QueueExchange, run_logical_ranks
from tests.support.ranks import run_ranks

ALL_KINDS = ["kvm", "rwkv7", "sliding_window", "block_window", "ovq", "full_attention", *RECURRENCES]
AFTER = 21  # crosses block edges of every kind


def decoded(model: Backbone, cache: CachedSequence, ids: Tensor) -> Tensor:
    """Logits of AFTER tokens, one call each but for the last four."""
    calls = ids[:, -AFTER:].split([1] * (AFTER - 4) + [4], dim=1)
    return torch.cat([read(model, call, cache) for call in calls], dim=1)


@torch.no_grad()
def on_one_rank(model: Backbone, ids: Tensor) -> tuple[Tensor, Tensor]:
    cache = CachedSequence()
    return read(model, ids[:, :-AFTER], cache), decoded(model, cache, ids)


def on_ranks(model: Backbone, ids: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """Logits of the prompt, and of the tokens after it on the last rank."""
    spans = list(pairwise([0, *cuts, ids.shape[1] - AFTER]))
    row = LogicalRow(len(spans))

    @torch.no_grad()
    def one(rank: int, exchange: QueueExchange) -> tuple[Tensor, Tensor | None]:
        mesh = cast(Mesh, SimpleNamespace(sequence_rank=rank))
        shard = RankedSequence(mesh, spans[rank][0], exchange, spans, row.rank(rank))
        logits, cache = prefill(model, ids[:, slice(*spans[rank])], shard)
        assert (cache is None) == (rank < len(cuts))
        return logits, None if cache is None else decoded(model, cache, ids)

    results = run_logical_ranks(len(spans), one)
    after = results[-1][1]
    assert after is not None
    return torch.cat([logits for logits, _ in results], dim=1), after


@pytest.mark.parametrize("cuts", [[], [64], [32], [32, 64, 96]], ids=str)
def test_the_last_rank_goes_on_as_if_it_had_read_the_whole_prompt(cuts: list[int]) -> None:
    model = tiny_model(ALL_KINDS, num_heads=4, head_dim=8)
    ids, _ = tiny_batch(117 + AFTER)
    prompt, after = on_ranks(model, ids, cuts)
    expected, expected_after = on_one_rank(model, ids)

    assert torch.equal(prompt, expected)
    assert torch.equal(after, expected_after)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_last_shard_of_a_few_tokens_keeps_what_lies_on_the_ranks_before(kind: str) -> None:
    wide = BlockWindowConfig(chunk=16, window_chunks=6, sinks=2)  # its window lies on three ranks
    model = tiny_model([kind, kind], num_heads=4, head_dim=8, block_window=wide)
    ids, _ = tiny_batch(99 + AFTER)
    prompt, after = on_ranks(model, ids, [32, 64, 96])
    expected, expected_after = on_one_rank(model, ids)

    assert (prompt - expected).abs().max() <= 1e-5
    assert (after - expected_after).abs().max() <= 1e-5


@torch.no_grad()
def written_on_ranks(world: World, prompt: Tensor) -> Tensor | None:
    """What the last of the world's ranks writes after a prompt [T] that all of them read."""
    mesh = Mesh.build(world, ParallelConfig(sequence=world.size, timeout_seconds=30))
    model = tiny_model(ALL_KINDS)
    shards = sequence_shards(model.config, len(prompt), world.size)
    spans = [(start, min(stop, len(prompt))) for start, stop in shards.spans]
    start, stop = spans[mesh.sequence_rank]
    exchange = RankExchange(mesh)
    shard = RankedSequence(mesh, start, exchange, spans, GroupAllToAll(mesh, mesh.row))
    logits, cache = prefill(model, prompt[None, start:stop], shard)
    exchange.drain()
    if cache is None:
        return None
    return go_on(model, cache, logits[0, -1], tokens=20, temperature=0, generator=torch.Generator())


def test_two_processes_write_what_one_does() -> None:
    prompt = tiny_batch(75)[0][0]
    first, last = run_ranks(written_on_ranks, 2, prompt)

    assert first is None
    assert torch.equal(last, generate(tiny_model(ALL_KINDS), prompt, 20, 0, torch.Generator()))
