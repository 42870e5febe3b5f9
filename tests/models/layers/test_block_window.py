"""Blocks and first tokens against a masked softmax over everything."""

import pytest
import torch
from torch import Tensor

from models.config import BlockWindowConfig
from models.layers.attention import QueriesKeysValues
from models.layers.block_window import BlockWindow
from models.layers.mixer import build_mixer
from parallel.sequence.context import WholeSequence
from tests.models.tiny import tiny_config

CHUNK, WINDOW_CHUNKS, HEADS, WIDTH = 4, 3, 2, 16


def dense(z: QueriesKeysValues, sinks: int) -> Tensor:
    position = torch.arange(z.query.shape[1])
    blocks_back = position.unsqueeze(1) // CHUNK - position // CHUNK
    visible = (blocks_back < WINDOW_CHUNKS) | (position < sinks)
    visible &= position.unsqueeze(1) >= position
    scores = torch.einsum("bthd,bshd->bhts", z.query, z.key) / WIDTH**0.5
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~visible, -torch.inf).softmax(-1), z.value)


@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize("tokens", [1, 3, 12, 13, 16, 61])
def test_blocks_and_first_tokens_equal_a_masked_softmax(tokens: int, sinks: int) -> None:
    settings = BlockWindowConfig(chunk=CHUNK, window_chunks=WINDOW_CHUNKS, sinks=sinks)
    mixer = build_mixer(tiny_config(["block_window"], block_window=settings), 0)
    assert isinstance(mixer, BlockWindow)
    generator = torch.Generator().manual_seed(tokens)
    shape = (2, tokens, HEADS, WIDTH)
    z = QueriesKeysValues(
        *(torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3))
    )
    found = mixer.attend(torch.empty(0), z, WholeSequence())
    expected = dense(z, sinks)
    weight = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)

    assert (found - expected).abs().max() < 1e-12
    for ours, theirs in zip(
        torch.autograd.grad(found, z, weight), torch.autograd.grad(expected, z, weight), strict=True
    ):
        assert (ours - theirs).abs().max() < 1e-12
