"""The mixers of flash-linear-attention's recurrences against their definitions; where their ops can run."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import DeltaNetConfig, GatedDeltaNetConfig, GLAConfig, KDAConfig, Mamba2Config
from models.initialise import initialise
from models.kinds.recurrence import RecurrenceConfig
from models.layers import chunk_recurrence, recurrence
from models.layers.decay_controls import softplus
from models.layers.delta_rule import DeltaRule
from models.layers.deltanet import DeltaNet
from models.layers.gated_deltanet import GatedDeltaNet
from models.layers.gla import GLA
from models.layers.kda import KDA
from models.layers.mamba2 import Mamba2
from models.layers.recurrence import Operands, Recurrence, choose_backend
from models.layers.short_convolution import ShortConvolution
from models.parameter_groups import parameter_groups
from parallel.sequence.context import WholeSequence
from tests.models.shards import run_on_shards
from tests.models.tiny import RECURRENCES, SIMPLER_RECURRENCES, tiny_batch, tiny_config, tiny_model

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def mixer(kind: str, **changes: RecurrenceConfig) -> Recurrence:
    """In float64, every parameter away from its first value."""
    made = tiny_model([kind], **changes).layers[0].mixer
    assert isinstance(made, Recurrence)
    return made.double()


def convolved(z: Tensor, convolution: ShortConvolution) -> Tensor:
    weight, width = convolution.weight.unsqueeze(1), z.shape[-1]
    out = F.conv1d(z.transpose(1, 2), weight, convolution.bias, padding=3, groups=width)
    return F.silu(out[..., : z.shape[1]]).transpose(1, 2)


def heads_of(z: Tensor, heads: int) -> Tensor:
    return z.unflatten(-1, (heads, -1))


def l2_normed(z: Tensor) -> Tensor:
    return z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def rms_normed(z: Tensor) -> Tensor:
    return z / (z.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def delta_rule(layer: DeltaRule, x: Tensor, log_decay: Tensor, largest_rate: float) -> Tensor:
    """Token by token, x [B, T, d], log_decay [B, T, H, K or 1] -> [B, T, H, V]."""
    heads = layer.heads.number
    assert layer.convolutions is not None
    maps = {"query": layer.query, "key": layer.key, "value": layer.value}
    query, key, value = (
        heads_of(convolved(linear(x), layer.convolutions[name]), heads)  # type: ignore[arg-type]
        for name, linear in maps.items()
    )
    query, key = l2_normed(query) / math.sqrt(query.shape[-1]), l2_normed(key)
    rate = largest_rate * layer.rate(x).sigmoid().unsqueeze(-1)
    state = x.new_zeros(len(x), heads, key.shape[-1], value.shape[-1])
    reads = []
    for t in range(x.shape[1]):
        state = log_decay[:, t].exp().unsqueeze(-1) * state
        held = torch.einsum("bhk,bhkv->bhv", key[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], rate[:, t] * (value[:, t] - held))
        reads.append(torch.einsum("bhk,bhkv->bhv", query[:, t], state))
    return torch.stack(reads, dim=1)


@pytest.mark.parametrize("negative", [False, True])
def test_gated_deltanet_is_its_definition(negative: bool) -> None:
    config = GatedDeltaNetConfig(head_dim=6, negative_eigenvalues=negative)
    layer = mixer("gated_deltanet", gated_deltanet=config)
    assert isinstance(layer, GatedDeltaNet)
    x = torch.randn(2, 37, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    decay = -layer.decay.log_rate.exp() * F.softplus(layer.step(x) + layer.decay.step_bias)
    out = delta_rule(layer, x, decay.unsqueeze(-1), 1.0 + negative)
    out = rms_normed(out) * layer.norm.weight * F.silu(heads_of(layer.gate(x), layer.heads.number))
    expected = layer.output(out.flatten(2))
    assert (layer(x, x, WholeSequence()) - expected).abs().max() < 1e-12 * expected.abs().max()


@pytest.mark.parametrize("negative", [False, True])
def test_kda_is_its_definition(negative: bool) -> None:
    layer = mixer("kda", kda=KDAConfig(head_dim=6, expand_v=1.5, negative_eigenvalues=negative))
    assert isinstance(layer, KDA)
    x = torch.randn(2, 37, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    steps = F.softplus(layer.step.up(layer.step.down(x)) + layer.decay.step_bias)
    decay = -layer.decay.log_rate.exp().unsqueeze(-1) * heads_of(steps, layer.heads.number)
    out = delta_rule(layer, x, decay, 1.0 + negative)
    gate = (layer.gate.up(layer.gate.down(x)) + layer.gate.bias).sigmoid()
    out = rms_normed(out) * layer.norm.weight * heads_of(gate, layer.heads.number)
    expected = layer.output(out.flatten(2))
    assert (layer(x, x, WholeSequence()) - expected).abs().max() < 1e-12 * expected.abs().max()


def test_deltanet_is_its_definition() -> None:
    layer = mixer("deltanet", deltanet=DeltaNetConfig(head_dim=6, expand_v=1.5))
    assert isinstance(layer, DeltaNet)
    x = torch.randn(2, 37, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = delta_rule(layer, x, torch.zeros(2, 37, 1, 1, dtype=torch.float64), 1.0)
    expected = layer.output((rms_normed(out) * layer.norm.weight).flatten(2))
    assert (layer(x, x, WholeSequence()) - expected).abs().max() < 1e-12 * expected.abs().max()


def test_gla_is_its_definition() -> None:
    layer = mixer("gla", gla=GLAConfig(num_heads=4, decay_rank=8, decay_divisor=2.0))
    assert isinstance(layer, GLA)
    x = torch.randn(2, 37, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    query, key, value = (heads_of(linear(x), 4) for linear in (layer.query, layer.key, layer.value))
    kept = layer.decay.up(layer.decay.down(x)) + layer.decay.bias
    decay = (heads_of(F.logsigmoid(kept), 4) / 2.0).exp()
    state = x.new_zeros(2, 4, 4, 8)
    reads = []
    for t in range(x.shape[1]):
        state = decay[:, t].unsqueeze(-1) * state + torch.einsum("bhk,bhv->bhkv", key[:, t], value[:, t])
        reads.append(torch.einsum("bhk,bhkv->bhv", query[:, t] / 2, state))  # sqrt of 4 key dims
    out = rms_normed(torch.stack(reads, dim=1)) * layer.norm.weight * F.silu(heads_of(layer.gate(x), 4))
    expected = layer.output(out.flatten(2))
    assert (layer(x, x, WholeSequence()) - expected).abs().max() < 1e-12 * expected.abs().max()


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_is_its_definition(groups: int) -> None:
    layer = mixer("mamba2", mamba2=Mamba2Config(head_dim=8, state_size=12, expand=2.0, groups=groups))
    assert isinstance(layer, Mamba2)
    assert layer.convolutions is not None
    assert layer.gate is not None
    heads = layer.heads.number
    x = torch.randn(2, 37, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    c, b, values = (
        convolved(linear(x), layer.convolutions[name])  # type: ignore[arg-type]
        for name, linear in {"query": layer.query, "key": layer.key, "value": layer.value}.items()
    )
    c, b = (heads_of(z, groups).repeat_interleave(heads // groups, dim=2) for z in (c, b))
    values = heads_of(values, heads)
    step = F.softplus(layer.step(x) + layer.decay.step_bias)
    decay = (-layer.decay.log_rate.exp() * step).exp()
    state = x.new_zeros(2, heads, 12, 8)
    reads = []
    for t in range(x.shape[1]):
        written = torch.einsum("bhk,bhv->bhkv", b[:, t], step[:, t].unsqueeze(-1) * values[:, t])
        state = decay[:, t, :, None, None] * state + written
        reads.append(torch.einsum("bhk,bhkv->bhv", c[:, t], state))
    out = torch.stack(reads, dim=1) + layer.skip.unsqueeze(-1) * values
    out = heads_of((out.flatten(2) * F.silu(layer.gate(x))), groups)
    expected = layer.output(rms_normed(out).flatten(2) * layer.norm.weight)
    assert (layer(x, x, WholeSequence()) - expected).abs().max() < 1e-12 * expected.abs().max()


@pytest.mark.parametrize("kind", RECURRENCES)
def test_decays_steps_and_convolutions_start_as_published(kind: str) -> None:
    settings = {
        "gated_deltanet": GatedDeltaNetConfig(num_heads=64, head_dim=2),
        "kda": KDAConfig(num_heads=64, head_dim=2),
        "mamba2": Mamba2Config(head_dim=1, expand=2.0, state_size=8),
    }
    model = tiny_model([kind], **{kind: settings[kind]})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    initialise(model, seed=0)
    layer = model.layers[0].mixer
    assert isinstance(layer, GatedDeltaNet | KDA | Mamba2)
    assert all(z.isfinite().all() for z in layer.parameters())
    rates, steps = layer.decay.log_rate.exp(), softplus(layer.decay.step_bias)
    lowest = 0.0 if kind == "gated_deltanet" else 1.0
    assert lowest <= rates.min() < lowest + 1.5
    assert 14 < rates.max() <= 16
    assert 1e-3 * (1 - 1e-3) <= steps.min() < 2e-3
    assert 0.05 < steps.max() <= 0.1 * (1 + 1e-3)
    assert layer.convolutions is not None
    for convolution in layer.convolutions.values():
        for parameter in convolution.parameters():
            assert 0.4 < parameter.abs().max() <= 0.5
    assert (layer.norm.weight == 1).all()
    assert not layer.output.weight.any()
    if isinstance(layer, Mamba2):
        assert (layer.skip == 1).all()


def test_every_parameter_of_the_simpler_recurrences_is_filled() -> None:
    model = tiny_model(SIMPLER_RECURRENCES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    initialise(model, seed=0)
    assert all(z.isfinite().all() for z in model.parameters())
    assert not model.get_parameter("layers.1.mixer.decay.bias").any()


def test_softplus_is_that_of_pytorch() -> None:
    z = torch.linspace(-90, 90, 1001, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(softplus(z).sum(), z)
    assert torch.allclose(softplus(z), F.softplus(z, threshold=1000), rtol=1e-14)
    assert torch.allclose(gradient, z.sigmoid(), rtol=1e-14)


KDA_HEADS = 128


def test_matmuls_run_on_cpus_and_kernels_on_gpus() -> None:
    kda = KDAConfig()
    assert choose_backend(kda, "kda", CPU, torch.float64, KDA_HEADS) == "torch"
    assert choose_backend(kda, "kda", GPU, torch.bfloat16, KDA_HEADS) == "fla"
    assert choose_backend(KDAConfig(backend="torch"), "kda", GPU, torch.bfloat16, KDA_HEADS) == "torch"


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "key", "problem"),
    [
        ("fla", "cpu", torch.float32, 128, "runs in Triton on GPUs, not on the device 'cpu'"),
        ("auto", "mps", torch.float32, 128, "runs in Triton on GPUs, not on the device 'mps'"),
        ("auto", "cuda", torch.float64, 128, "takes no float64"),
        ("auto", "cuda", torch.bfloat16, 320, "takes heads of at most 256 key dims on a GPU, not 320"),
    ],
)
def test_an_op_that_cannot_run_is_named_with_its_device_and_a_way_out(
    backend: str, device: str, dtype: torch.dtype, key: int, problem: str
) -> None:
    config = KDAConfig.model_validate({"backend": backend})
    with pytest.raises(ValueError, match=f"chunk_kda of flash-linear-attention {problem}; use") as caught:
        choose_backend(config, "kda", torch.device(device), dtype, key)
    assert f"model.kda.backend={backend}:" in str(caught.value)
    assert "use model.kda.backend=torch" in str(caught.value)


def test_an_op_without_float32_says_so() -> None:
    assert choose_backend(DeltaNetConfig(), "deltanet", GPU, torch.bfloat16, KDA_HEADS) == "fla"
    with pytest.raises(ValueError, match="chunk_delta_rule of flash-linear-attention takes no float32"):
        choose_backend(DeltaNetConfig(), "deltanet", GPU, torch.float32, KDA_HEADS)


def test_an_op_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="chunk_simple_gla of flash-linear-attention is not installed"):
        choose_backend(Mamba2Config(), "mamba2", GPU, torch.bfloat16, KDA_HEADS)


@pytest.mark.parametrize("kind", [*RECURRENCES, *SIMPLER_RECURRENCES])
def test_a_model_on_a_device_without_the_op_names_it(kind: str) -> None:
    model = copy.deepcopy(tiny_model([kind])).to("meta")
    mixer = model.layers[0].mixer
    mixer.config = mixer.config.model_copy(update={"backend": "fla"})
    with pytest.raises(ValueError, match=rf"model\.{kind}\.backend=fla: chunk_\w+ of .*device 'meta'"):
        model(torch.zeros(1, 8, dtype=torch.int64, device="meta"), WholeSequence())


def test_settings_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"model\.kda\.expand_v=1\.3 x head_dim=8 is 10\.4, no whole number"):
        tiny_config(["kda"], kda=KDAConfig(head_dim=8, expand_v=1.3))
    with pytest.raises(ValueError, match=r"model\.mamba2\.expand=1\.0 x model\.hidden_size=32 must be a mul"):
        tiny_config(["mamba2"], mamba2=Mamba2Config(expand=1.0))
    with pytest.raises(ValueError, match=r"model\.gla\.expand_k=0\.6 x model\.hidden_size=32 must be a mul"):
        tiny_config(["gla"], gla=GLAConfig(expand_k=0.6))
    with pytest.raises(ValueError, match=r"model\.mamba2\.groups=3 does not divide the 4 heads"):
        tiny_config(["mamba2"], mamba2=Mamba2Config(expand=1.0, head_dim=8, groups=3))


def in_matmuls(layer: Recurrence, operands: Operands, state: Tensor) -> tuple[Tensor, Tensor]:
    """In place of a kernel: the same recurrence, given what a kernel is given."""
    maps = layer.chunk_maps(operands)
    states, last = chunk_recurrence.carry(maps, state)
    return chunk_recurrence.read(maps, states, operands.value.shape[1]), last


@pytest.mark.parametrize("recompute", [False, True])
def test_the_way_of_kernels_hands_over_the_same_states(
    monkeypatch: pytest.MonkeyPatch, recompute: bool
) -> None:
    model = tiny_model([*RECURRENCES, *SIMPLER_RECURRENCES], activation_checkpointing=recompute)
    ids, labels = tiny_batch(85)
    expected, expected_gradients, expected_messages = run_on_shards(model, ids, labels, [32])
    monkeypatch.setattr(recurrence, "choose_backend", lambda *_: "fla")
    for kind in (GatedDeltaNet, KDA, Mamba2, DeltaNet, GLA):
        monkeypatch.setattr(kind, "kernel", in_matmuls)
    logits, gradients, messages = run_on_shards(model, ids, labels, [32])

    assert torch.equal(logits, expected)
    assert messages == expected_messages
    for name, parts in expected_gradients.items():
        for own, part in zip(gradients[name], parts, strict=True):
            assert (own - part).abs().max() <= 2e-6 * part.abs().max() + 1e-6, name


def test_convolutions_are_vectors_and_low_ranks_do_not_follow_the_width() -> None:
    """To muP: no decay and an unscaled rate; the second matrix of a fixed rank keeps its rate."""
    wide = tiny_model(["kda"], hidden_size=64, base_width=32)
    scales = {
        name.removeprefix("layers.0.mixer."): (group.learning_rate_scale, group.weight_decay_scale)
        for group in parameter_groups(wide)
        for name in group.names
    }
    assert scales["convolutions.key.weight"] == scales["decay.log_rate"] == (1.0, 0.0)
    assert scales["step.up.weight"] == (1.0, 1.0)
    assert scales["step.down.weight"] == scales["rate.weight"] == (0.5, 2.0)
