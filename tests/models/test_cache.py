"""A sequence read in pieces from a cache against one forward."""

import pytest
import torch

from models.cache import CachedSequence, read
from parallel.sequence.context import WholeSequence
from tests.models.tiny import HYBRID, RECURRENCES, SIMPLER_RECURRENCES, tiny_batch, tiny_model

KINDS = [
    ["kvm"],
    ["rwkv7"],
    ["sliding_window"],
    ["full_attention"],
    ["block_window"],
    ["ovq"],
    HYBRID,
    [*RECURRENCES, *SIMPLER_RECURRENCES],
]
TOKENS = 75


@pytest.mark.parametrize("first", [1, 3, 16, 40, TOKENS - 1])
@pytest.mark.parametrize("layers", KINDS, ids=str)
def test_prefill_then_single_tokens_equals_one_forward(layers: list[str], first: int) -> None:
    model = tiny_model(layers)
    ids, _ = tiny_batch(TOKENS)
    cache = CachedSequence()
    with torch.no_grad():
        pieces = [read(model, ids[:, :first], cache)]
        pieces += [read(model, ids[:, t : t + 1], cache) for t in range(first, TOKENS)]
        expected = model(ids, WholeSequence())

    assert cache.start == TOKENS
    assert (torch.cat(pieces, dim=1) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("lengths", [[3, 1, 20, 51], [1, 3, 71], [17, 33, 25], [70, 5]], ids=str)
@pytest.mark.parametrize("layers", KINDS, ids=str)
def test_calls_of_many_tokens_go_on_where_the_last_ended(layers: list[str], lengths: list[int]) -> None:
    model = tiny_model(layers)
    ids, _ = tiny_batch(TOKENS)
    cache = CachedSequence()
    with torch.no_grad():
        logits = torch.cat([read(model, part, cache) for part in ids.split(lengths, dim=1)], dim=1)
        expected = model(ids, WholeSequence())

    assert (logits - expected).abs().max() <= 1e-5


def test_a_window_keeps_no_more_tokens_than_it_asks_for() -> None:
    model = tiny_model(["sliding_window"])  # window 8
    ids, _ = tiny_batch(TOKENS)
    cache = CachedSequence()
    with torch.no_grad():
        read(model, ids, cache)
    key, value = cache.halo("0.sliding_window.window", (torch.empty(2, 0, 2, 16),) * 2, 7)

    assert key.shape[1] == value.shape[1] == 7
    assert key.untyped_storage().nbytes() == key.numel() * key.element_size()
