"""The chunk form of RWKV-7 against a loop in float64 and against flash-linear-attention's plain path."""

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import RWKV7Config
from models.kinds.recurrence import CHUNK
from models.layers import rwkv7
from models.layers.rwkv7_chunk import chunk_maps
from tests.models.layers.recurrences import Result, chunked, doubles, with_gradients

RWKV7 = chunked(chunk_maps)


def loop(inputs: list[Tensor], state: Tensor) -> Result:
    reads = []
    for r, log_w, k, v, a, b in zip(*(z.unbind(1) for z in inputs), strict=True):  # each [B, H, .]
        removed = torch.einsum("bhk,bhkv->bhv", a, state)
        state = log_w.exp().unsqueeze(-1) * state + b.unsqueeze(-1) * removed.unsqueeze(-2)
        state = state + k.unsqueeze(-1) * v.unsqueeze(-2)
        reads.append(torch.einsum("bhk,bhkv->bhv", r, state))
    return torch.stack(reads, dim=1), state


def naive(inputs: list[Tensor], state: Tensor) -> Result:
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_chunkwise

    tokens = inputs[0].shape[1]
    padded = [F.pad(z, (0, 0, 0, 0, 0, -tokens % 32)).transpose(1, 2) for z in inputs]
    r, log_w, k, v, a, b = padded
    out, last = dplr_chunkwise(r * r.shape[-1] ** 0.5, k, v, a, b, log_w, initial_state=state)
    return out.transpose(1, 2)[:, :tokens], last


def random_inputs(tokens: int, keys: int, values: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Decays from none to the strongest; K and V differ, so that no transposed state passes."""
    generator = torch.Generator().manual_seed(tokens + keys)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = (2, tokens, 3, keys)
    removed = F.normalize(normal(*shape), dim=-1)
    inputs = [
        normal(*shape),
        -0.6065 * torch.sigmoid(4 * normal(*shape)),
        normal(*shape),
        normal(2, tokens, 3, values),
        -removed,
        removed * torch.sigmoid(normal(*shape)),
    ]
    state = normal(2, 3, keys, values)
    return [z.to(dtype).requires_grad_() for z in inputs], state.to(dtype).requires_grad_()


@pytest.mark.parametrize("tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 100])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 3e-6), (torch.float64, 1e-13)])
def test_outputs_states_and_gradients_equal_a_float64_loop(
    tokens: int, dtype: torch.dtype, allowed: float
) -> None:
    inputs, state = random_inputs(tokens, keys=16, values=24, dtype=dtype)
    found = with_gradients(RWKV7, inputs, state)
    exact = doubles(inputs, state)
    for ours, expected in zip(found, with_gradients(loop, *exact), strict=True):
        assert ours.dtype == dtype
        assert (ours - expected).abs().max() <= allowed * expected.abs().max()


@pytest.mark.parametrize("tokens", [64, 77])
def test_outputs_states_and_gradients_equal_the_plain_path_of_fla(tokens: int) -> None:
    inputs, state = random_inputs(tokens, keys=16, values=24, dtype=torch.float32)
    for ours, expected in zip(
        with_gradients(RWKV7, inputs, state), with_gradients(naive, inputs, state), strict=True
    ):
        assert (ours - expected).abs().max() <= 5e-6 * expected.abs().max()


def test_the_strongest_decay_stays_finite_and_exact() -> None:
    inputs, state = random_inputs(96, keys=16, values=24, dtype=torch.float32)
    inputs[1] = torch.full_like(inputs[1], -0.6065).requires_grad_()
    exact = doubles(inputs, state)
    found = with_gradients(RWKV7, inputs, state)
    for ours, expected in zip(found, with_gradients(loop, *exact), strict=True):
        assert (ours - expected).abs().max() <= 3e-6 * expected.abs().max()


@pytest.mark.parametrize("cuts", [[32], [96], [32, 64, 96], [160]], ids=str)
def test_calls_that_hand_the_state_over_give_the_bits_of_one_call(cuts: list[int]) -> None:
    inputs, state = random_inputs(177, keys=16, values=24, dtype=torch.float32)
    with torch.no_grad():
        whole, last = RWKV7(inputs, state)
        parts = []
        for low, high in pairwise([0, *cuts, 177]):
            part, state = RWKV7([z[:, low:high] for z in inputs], state)
            parts.append(part)

    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert torch.equal(state, last)


def test_kernels_are_told_how_strong_a_decay_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """On matrix units, in chunks that no decay of this layer overflows, and at whose edges shards are cut."""
    import fla.ops.rwkv7
    from fla.ops.generalized_delta_rule.dplr.chunk import gate_bound_is_safe

    inputs, state = random_inputs(64, keys=16, values=16, dtype=torch.float32)
    called: list[inspect.BoundArguments] = []
    own = inspect.signature(fla.ops.rwkv7.chunk_rwkv7)

    def chunk_rwkv7(*args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        called.append(own.bind(*args, **more))
        return inputs[3], state

    monkeypatch.setattr(fla.ops.rwkv7, "chunk_rwkv7", chunk_rwkv7)
    rwkv7._fla_recurrence(inputs, state)
    given = called[0].arguments
    assert [given[name] is one for name, one in zip("rwkvab", inputs, strict=True)] == [True] * 6
    assert given["initial_state"] is state
    assert (given["safe_gate"], given["output_final_state"], given["scale"]) == (True, True, 1.0)
    assert gate_bound_is_safe(given["lower_bound"], given["chunk_size"])
    assert given["lower_bound"] == pytest.approx(-(torch.e**-0.5))
    assert RWKV7Config().position_multiple % given["chunk_size"] == 0
