"""The chunk forms of the delta rule and of linear attention against loops in float64 and against fla's."""

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.backbone import Backbone
from models.config import ModelConfig
from models.initialise import initialise
from models.kinds.recurrence import CHUNK
from models.layers import chunk_recurrence, delta_rule_chunk, linear_attention_chunk
from models.layers.decayed_scores import decayed_scores
from parallel.sequence.context import WholeSequence
from tests.models.layers.recurrences import Recurrence, Result, chunked, doubles, with_gradients

KEYS, VALUES, HEADS = 12, 20, 3  # they differ, so that no transposed state passes


def loop(inputs: list[Tensor], state: Tensor) -> Result:
    """As the recurrences are defined, token by token. Inputs: query, key, value, log decay, and the rate of
    the delta rule."""
    reads = []
    for q, k, v, log_w, *rate in zip(*(z.unbind(1) for z in inputs), strict=True):  # each [B, H, .]
        state = log_w.exp().unsqueeze(-1) * state
        if rate:
            v = rate[0] * (v - torch.einsum("bhk,bhkv->bhv", k, state))
        state = state + k.unsqueeze(-1) * v.unsqueeze(-2)
        reads.append(torch.einsum("bhk,bhkv->bhv", q.expand_as(k), state))
    return torch.stack(reads, dim=1), state


def fla_gated_deltanet(inputs: list[Tensor], state: Tensor) -> Result:
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    q, k, v, log_w, rate = inputs
    return naive_recurrent_gated_delta_rule(
        q, k, v, rate.squeeze(-1), log_w.squeeze(-1), 1.0, state, output_final_state=True
    )


def fla_kda(inputs: list[Tensor], state: Tensor) -> Result:
    from fla.ops.kda.naive import naive_recurrent_kda

    q, k, v, log_w, rate = inputs
    return naive_recurrent_kda(q, k, v, log_w, rate.squeeze(-1), 1.0, state, output_final_state=True)


def fla_simple_gla(inputs: list[Tensor], state: Tensor) -> Result:
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    q, k, v, log_w = inputs
    return naive_recurrent_simple_gla(q, k, v, log_w.squeeze(-1), 1.0, state)


def fla_gla(inputs: list[Tensor], state: Tensor) -> Result:
    from fla.ops.gla.naive import naive_recurrent_gla

    q, k, v, log_w = inputs
    return naive_recurrent_gla(q * KEYS**0.5, k, v, log_w, state, output_final_state=True)


class Case(NamedTuple):
    chunked: Recurrence
    fla: Recurrence
    decays: int  # a head
    rates: bool


CASES = {
    "gated_deltanet": Case(chunked(delta_rule_chunk.chunk_maps), fla_gated_deltanet, 1, True),
    "kda": Case(chunked(delta_rule_chunk.chunk_maps), fla_kda, KEYS, True),
    "mamba2": Case(chunked(linear_attention_chunk.chunk_maps), fla_simple_gla, 1, False),
    "gla": Case(chunked(linear_attention_chunk.chunk_maps), fla_gla, KEYS, False),
}


def random_inputs(
    case: Case, tokens: int, dtype: torch.dtype, strongest: float = 3.0
) -> tuple[list[Tensor], Tensor]:
    """Log decays from about 0 to -strongest, strong and weak ones next to each other; rates up to 2."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = (2, tokens, HEADS)
    inputs = [
        normal(*shape, KEYS),
        F.normalize(normal(*shape, KEYS), dim=-1),
        normal(*shape, VALUES),
        -strongest * torch.sigmoid(4 * normal(*shape, case.decays)),
    ]
    if case.rates:
        inputs.append(2 * torch.sigmoid(normal(*shape, 1)))
    state = normal(2, HEADS, KEYS, VALUES)
    return [z.to(dtype).requires_grad_() for z in inputs], state.to(dtype).requires_grad_()


def assert_close(found: list[Tensor], expected: list[Tensor], allowed: float) -> None:
    for ours, wanted in zip(found, expected, strict=True):
        smallest = torch.finfo(torch.float32).tiny  # what float32 can hold
        assert (ours - wanted).abs().max() <= allowed * wanted.abs().max() + smallest


@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, CHUNK + 1, 100])
@pytest.mark.parametrize("name", CASES)
def test_outputs_states_and_gradients_equal_a_float64_loop(name: str, tokens: int) -> None:
    case = CASES[name]
    for dtype, allowed in ((torch.float32, 3e-6), (torch.float64, 1e-13)):
        inputs, state = random_inputs(case, tokens, dtype)
        found = with_gradients(case.chunked, inputs, state)
        assert {z.dtype for z in found} == {dtype}
        assert_close(found, with_gradients(loop, *doubles(inputs, state)), allowed)


@pytest.mark.parametrize("name", CASES)
def test_outputs_states_and_gradients_equal_the_plain_path_of_fla(name: str) -> None:
    inputs, state = random_inputs(CASES[name], 77, torch.float32)
    found = with_gradients(CASES[name].chunked, inputs, state)
    assert_close(found, with_gradients(CASES[name].fla, inputs, state), 5e-6)


@pytest.mark.parametrize("strongest", [60.0, 1e4])
@pytest.mark.parametrize("name", CASES)
def test_channels_that_forget_within_a_chunk_stay_finite_and_exact(name: str, strongest: float) -> None:
    """Their factors apart from each other would overflow; the tokens after them still see each other."""
    inputs, state = random_inputs(CASES[name], 70, torch.float32, strongest)
    found = with_gradients(CASES[name].chunked, inputs, state)
    assert_close(found, with_gradients(loop, *doubles(inputs, state)), 3e-6)


@pytest.mark.parametrize("cuts", [[32], [32, 64, 96], [160]], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_calls_that_hand_the_state_over_give_the_bits_of_one_call(name: str, cuts: list[int]) -> None:
    case = CASES[name]
    inputs, state = random_inputs(case, 177, torch.float32)
    with torch.no_grad():
        whole, last = case.chunked(inputs, state)
        parts = []
        for low, high in pairwise([0, *cuts, 177]):
            part, state = case.chunked([z[:, low:high] for z in inputs], state)
            parts.append(part)

    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert torch.equal(state, last)


def test_heads_may_share_queries_and_keys() -> None:
    (q, k, v, log_w), state = random_inputs(CASES["mamba2"], 45, torch.float64)
    q, k = (z.detach()[:, :, :1].requires_grad_() for z in (q, k))
    found = with_gradients(CASES["mamba2"].chunked, [q, k, v, log_w], state)

    def copied(inputs: list[Tensor], state: Tensor) -> Result:
        q, k, *others = inputs
        return loop([q.expand(-1, -1, HEADS, -1), k.expand(-1, -1, HEADS, -1), *others], state)

    assert_close(found, with_gradients(copied, [q, k, v, log_w], state), 1e-13)


@pytest.mark.parametrize("decays", [1, KEYS])
def test_scores_are_sums_under_the_decay_between_two_tokens(decays: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, keys = (
        torch.randn(3, 2, 32, KEYS, generator=generator),
        torch.randn(3, 32, KEYS, generator=generator),
    )
    log_decay = -torch.rand(3, 32, decays, generator=generator, dtype=torch.float64)
    total = log_decay.cumsum(-2)
    decay = (total.unsqueeze(-2) - total.unsqueeze(-3)).exp().expand(3, 32, 32, KEYS)
    expected = torch.einsum("nmid,njd,nijd->nmij", rows.double(), keys.double(), decay).tril()
    assert (decayed_scores(rows, keys, total) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("tokens", [1, 2, 7, CHUNK])
def test_the_running_sum_of_gpus_is_that_of_cpus(tokens: int) -> None:
    z = torch.randn(2, 3, tokens, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z.requires_grad_()
    weights = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view_as(z)
    found, wanted = chunk_recurrence._sum_by_doubling(z), chunk_recurrence.running_sum(z)
    assert torch.allclose(found, wanted, rtol=1e-14, atol=1e-14)
    (found,), (wanted,) = (torch.autograd.grad(one, z, weights) for one in (found, wanted))
    assert torch.allclose(found, wanted, rtol=1e-14, atol=1e-14)


class Refusing(TorchDispatchMode):
    """As torch on a GPU where algorithms must be deterministic, which they are by default."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.cumsum.default, "cumsum_cuda_kernel is not deterministic"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ModelConfig.kinds_with_backends())
def test_plain_matmuls_run_on_gpus_where_the_same_bits_are_wanted(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_recurrence, "running_sum", (by_doubling := chunk_recurrence._sum_by_doubling))
    for module in (delta_rule_chunk, linear_attention_chunk):
        monkeypatch.setattr(module, "running_sum", by_doubling)
    config = ModelConfig(
        vocab_size=16,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        layers=[kind],
        **{kind: {"backend": "torch"}},
    )
    model, tokens = Backbone(config), torch.arange(40).view(1, -1) % 16
    initialise(model, 0)
    with Refusing():
        model(tokens, WholeSequence(), tokens).backward()
