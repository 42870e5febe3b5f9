"""Attention in fixed blocks against a masked softmax over everything."""

import pytest
import torch
from torch import Tensor

from models.layers.attention import QueriesKeysValues
from models.layers.blocked_attention import blocked_attention, pieces

WINDOW = 8


def heads(tokens: int) -> QueriesKeysValues:
    generator = torch.Generator().manual_seed(tokens)
    return QueriesKeysValues(
        *(torch.randn(2, tokens, 3, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    )


def windowed(part: QueriesKeysValues, before: tuple[Tensor, Tensor], start: int) -> Tensor:
    return blocked_attention(part, before, start, WINDOW, WINDOW, lambda position: position - WINDOW + 1)


def dense(z: QueriesKeysValues) -> Tensor:
    position = torch.arange(z.query.shape[1])
    age = position.unsqueeze(1) - position
    scores = torch.einsum("bthd,bshd->bhts", z.query, z.key) / z.query.shape[-1] ** 0.5
    visible = (age >= 0) & (age < WINDOW)
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~visible, -torch.inf).softmax(-1), z.value)


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 17, 61])
def test_a_window_equals_a_masked_softmax_with_its_gradients(tokens: int) -> None:
    z = heads(tokens)
    for tensor in z:
        tensor.requires_grad_()
    found = windowed(z, (z.key[:, :0], z.value[:, :0]), 0)
    expected = dense(z)
    weight = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)

    assert (found - expected).abs().max() < 1e-12
    for ours, theirs in zip(
        torch.autograd.grad(found, z, weight), torch.autograd.grad(expected, z, weight), strict=True
    ):
        assert (ours - theirs).abs().max() < 1e-12


@pytest.mark.parametrize("cut", [1, 5, 8, 16, 30, 60])
def test_a_sequence_goes_on_from_the_tokens_before_a_cut(cut: int) -> None:
    z = heads(61)
    before = (z.key[:, max(cut - WINDOW + 1, 0) : cut], z.value[:, max(cut - WINDOW + 1, 0) : cut])
    rest = QueriesKeysValues(*(tensor[:, cut:] for tensor in z))

    assert (windowed(rest, before, cut) - dense(z)[:, cut:]).abs().max() < 1e-12


def test_pieces_cover_every_token_once_and_end_at_block_edges() -> None:
    for start in (0, 3, 8, 24):
        for tokens in (1, 5, 8, 13, 40, 51):
            found = pieces(start, tokens, WINDOW, WINDOW)
            covered = [p.offset + i for p in found for i in range(p.length * p.count)]
            assert covered == list(range(tokens))
            assert all((start + p.offset) % WINDOW == 0 for p in found if p.aligned)
            assert all((start + p.offset + p.length) % WINDOW == 0 for p in found[:-1])


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_cut_at_block_edges_changes_no_bit(blocks: int) -> None:
    z = QueriesKeysValues(*(tensor.float() for tensor in heads(61)))
    whole = windowed(z, (z.key[:, :0], z.value[:, :0]), 0)
    parts = []
    for low in range(0, 61, blocks * WINDOW):
        kept = slice(max(low - WINDOW + 1, 0), low)
        part = QueriesKeysValues(*(tensor[:, low : low + blocks * WINDOW].contiguous() for tensor in z))
        parts.append(windowed(part, (z.key[:, kept], z.value[:, kept]), low))

    assert torch.equal(torch.cat(parts, dim=1), whole)
