"""Every parameter's first value against the published recipe."""

import math

import pytest
import torch
from torch import Tensor

from models.backbone import Backbone
from models.config import KVMConfig, ModelConfig, RWKV7Config
from models.initialise import initialise

WIDTH, LAYERS, HEAD = 128, 4, 32
PATTERN = ["kvm", "rwkv7", "ovq", "rwkv7"]


def build(seed: int = 0) -> dict[str, Tensor]:
    config = ModelConfig(
        vocab_size=300,
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=4,
        layers=PATTERN,
        kvm=KVMConfig(chunk=16),
        rwkv7=RWKV7Config(head_dim=HEAD),
    )
    model = Backbone(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    initialise(model, seed)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


FRESH = build()


def channel() -> Tensor:
    return torch.arange(WIDTH) / WIDTH


def ramp() -> Tensor:
    return torch.arange(WIDTH) / (WIDTH - 1) - 0.5


def is_orthogonal(weight: Tensor, gain: float) -> bool:
    rows = weight if weight.shape[0] <= weight.shape[1] else weight.T
    return torch.allclose(rows @ rows.T, gain**2 * torch.eye(len(rows)), atol=1e-5 * gain**2)


def is_default_linear(weight: Tensor) -> bool:
    bound = weight.shape[1] ** -0.5
    uniform = abs(weight.std() - bound / math.sqrt(3)) < 0.1 * bound and abs(weight.mean()) < 0.1 * bound
    return bool(uniform and weight.abs().max() <= bound)


def test_every_parameter_is_filled_and_is_a_function_of_the_seed_alone() -> None:
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again, other = build(0), build(1)

    assert all(z.isfinite().all() for z in FRESH.values())
    assert all(torch.equal(z, again[name]) for name, z in FRESH.items())
    drawn = {name for name, z in FRESH.items() if not torch.equal(z, other[name])}
    assert "embedding.weight" in drawn
    assert "layers.0.mixer.gate.weight" in drawn
    model = Backbone(ModelConfig(hidden_size=WIDTH, num_layers=1, num_heads=4, layers=["rwkv7"]))
    torch.set_rng_state(state)
    initialise(model, 0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_no_bit_depends_on_how_many_threads_there_are(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = build()
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert [name for name, z in FRESH.items() if not torch.equal(z, found[name])] == []


def test_backbone_and_feed_forward() -> None:
    embedding = FRESH["embedding.weight"]
    assert 0.9e-4 < embedding.abs().max() <= 1e-4
    assert abs(embedding.mean()) < 1e-6
    assert is_orthogonal(FRESH["head.weight"], 0.5 * (300 / WIDTH) ** 0.5)
    for index in range(LAYERS):
        part = f"layers.{index}.feed_forward."
        assert is_orthogonal(FRESH[part + "expand.weight"], 1.0)
        assert not FRESH[part + "contract.weight"].any()
        exponent = (1 - index / LAYERS) ** 4
        assert torch.allclose(FRESH[part + "shift.amount"], 1 - channel() ** exponent)
    norms = [name for name in FRESH if ".norm_" in f".{name}" and not name.startswith("mixer")]
    assert norms
    for name in norms:
        assert torch.equal(FRESH[name], torch.full_like(FRESH[name], float(name.endswith("weight")))), name


@pytest.mark.parametrize("index", [0, 2])
def test_attention_kinds(index: int) -> None:
    part, ratio = f"layers.{index}.mixer.projections.", 1 - index / LAYERS
    for name in ("query", "key", "value"):
        assert is_default_linear(FRESH[f"{part}{name}.weight"]), name
        factor = 0.2 if name == "query" else 0.7
        assert torch.allclose(FRESH[f"{part}shifts.{name}.amount"], 1 - channel() ** (factor * ratio))
    assert not FRESH[f"layers.{index}.mixer.output.weight"].any()
    assert torch.allclose(FRESH[part + "value_residual.gate.bias"], 0.73 - 0.4 * ramp())
    assert not FRESH[part + "value_residual.gate.down.weight"].any()
    assert is_orthogonal(FRESH[part + "value_residual.gate.up.weight"], 0.1)


def test_kvm_and_ovq_own_parameters() -> None:
    assert is_default_linear(FRESH["layers.0.mixer.gate.weight"])
    for name in ("window_temperature", "state_temperature", "state_norm_weight"):
        assert (FRESH[f"layers.0.mixer.{name}"] == 1).all()
    assert not FRESH["layers.0.mixer.state_norm_bias"].any()
    assert (FRESH["layers.2.mixer.query_scale"] == 1).all()


@pytest.mark.parametrize("index", [1, 3])
def test_rwkv7(index: int) -> None:
    mixer = {
        name.removeprefix(f"layers.{index}.mixer."): z
        for name, z in FRESH.items()
        if name.startswith(f"layers.{index}.mixer.")
    }
    ratio, depth = 1 - index / LAYERS, index / (LAYERS - 1)
    factors = {"receptance": 0.2, "decay": 0.9, "key": 0.7, "value": 0.7, "rate": 0.9, "gate": 0.2}
    for name, factor in factors.items():
        assert torch.allclose(mixer[f"shifts.{name}.amount"], 1 - channel() ** (factor * ratio)), name
    for name, gain in (("receptance", 1.0), ("key", 0.1), ("value", 1.0)):
        assert is_orthogonal(mixer[f"{name}.weight"], gain), name
    assert not mixer["output.weight"].any()
    half = (HEAD - 1) / 2
    zigzag = torch.tensor([(n % HEAD - half) / half * abs((n % HEAD - half) / half) for n in range(WIDTH)])
    rise = torch.tensor([-6 + 6 * (n / (WIDTH - 1)) ** (1 + depth**0.3) for n in range(WIDTH)])
    assert torch.allclose(mixer["decay.bias"], rise + 0.5 + 2.5 * zigzag, atol=1e-5)
    assert torch.allclose(mixer["rate.bias"], -0.19 + 0.3 * zigzag + 0.4 * ramp(), atol=1e-6)
    assert torch.allclose(mixer["value_residual.gate.bias"], 0.73 - 0.4 * ramp())
    for name in ("decay", "rate", "gate", "value_residual.gate"):
        assert not mixer[f"{name}.down.weight"].any(), name
        assert is_orthogonal(mixer[f"{name}.up.weight"], 0.1), name
    assert torch.allclose(mixer["removal"], 0.71 - 0.1 * ramp())
    assert (mixer["rate_mix"] == 1.02).all()
    assert (mixer["bonus"] == -0.04).all()
    assert torch.allclose(mixer["norm.weight"], torch.tensor(((index + 1) / LAYERS) ** 0.7))
    assert not mixer["norm.bias"].any()


def test_low_ranks_follow_the_width() -> None:
    assert RWKV7Config().ranks(768) == {"decay": 64, "rate": 64, "value": 32, "gate": 128}
    assert RWKV7Config().ranks(32) == {"decay": 32, "rate": 32, "value": 32, "gate": 32}
    assert RWKV7Config(gate_rank=7).ranks(768)["gate"] == 7
