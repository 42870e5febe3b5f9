import copy
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import models.layers.mixer
from models.backbone import Backbone
from models.budget import FixedBudget
from models.config import KVMConfig, LayerConfig, ModelConfig
from models.initialise import initialise
from models.loss import token_losses
from parallel.sequence.context import SequenceContext, WholeSequence
from tests.models.tiny import HYBRID, RECURRENCES, SIMPLER_RECURRENCES, tiny_batch, tiny_config, tiny_model

ATTENTION_KINDS = ["kvm", "sliding_window", "full_attention", "block_window", "ovq"]
EVERY_KIND = [*ATTENTION_KINDS, "rwkv7", *RECURRENCES, *SIMPLER_RECURRENCES]


def loss_and_gradients(model: Backbone, tokens: int = 75) -> tuple[Tensor, dict[str, Tensor]]:
    ids, labels = tiny_batch(tokens)
    total, valid = token_losses(model(ids, WholeSequence()), labels)
    loss = total / valid
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


@pytest.mark.parametrize("layers", [*([kind] for kind in EVERY_KIND), EVERY_KIND], ids=str)
def test_every_parameter_gets_a_finite_gradient_and_none_is_a_scalar(layers: list[str]) -> None:
    model = tiny_model(layers)
    _, gradients = loss_and_gradients(model)
    for name, parameter in model.named_parameters():
        assert parameter.dim() > 0, name
        assert gradients[name].isfinite().all(), name


def test_every_parameter_is_trained_but_the_value_gates_of_the_embedding_s_own_layer() -> None:
    model = tiny_model(EVERY_KIND * 2)
    _, gradients = loss_and_gradients(model)
    idle = {name for name, z in gradients.items() if not z.any()}

    assert idle == {name for name in gradients if name.startswith("layers.0.") and "value_residual" in name}


@pytest.mark.parametrize("tokens", [1, 2, 16, 33, 75])
@pytest.mark.parametrize("switches", [{}, {"token_shift": False, "value_residual": False}], ids=str)
def test_recomputing_activations_changes_neither_loss_nor_gradients(
    tokens: int, switches: dict[str, bool]
) -> None:
    loss, gradients = loss_and_gradients(tiny_model(EVERY_KIND, **switches), tokens)
    again, gradients_again = loss_and_gradients(
        tiny_model(EVERY_KIND, activation_checkpointing=True, **switches), tokens
    )

    assert torch.equal(loss, again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[name]), name


@pytest.mark.parametrize("layers", [HYBRID, EVERY_KIND], ids=str)
def test_a_later_token_never_changes_an_earlier_logit(layers: list[str]) -> None:
    model = tiny_model(layers)
    ids, _ = tiny_batch(75)
    changed = ids.clone()
    changed[:, 50:] = (changed[:, 50:] + 1) % 37
    with torch.no_grad():
        before, after = model(ids, WholeSequence()), model(changed, WholeSequence())

    assert torch.equal(before[:, :48], after[:, :48])  # whole blocks: their keys end at their own edge
    assert (before[:, :50] - after[:, :50]).abs().max() < 1e-5
    assert not torch.equal(before[:, 50:], after[:, 50:])


@pytest.mark.parametrize("recompute", [False, True])
def test_bfloat16_weights_train_close_to_float32(recompute: bool) -> None:
    model = tiny_model(["rwkv7", "sliding_window", "full_attention"], activation_checkpointing=recompute)
    half = copy.deepcopy(model).to(torch.bfloat16)
    loss, gradients = loss_and_gradients(model)
    half_loss, half_gradients = loss_and_gradients(half)

    assert half_loss.dtype == torch.float32
    assert abs(half_loss - loss) < 0.05
    for name, gradient in gradients.items():
        assert half_gradients[name].dtype == torch.bfloat16
        norm = gradient.norm()
        assert (half_gradients[name].float() - gradient).norm() < 0.15 * norm + 1e-3, name


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_kind_runs_forward_and_backward_in_bfloat16(kind: str) -> None:
    model = tiny_model([kind, kind]).to(torch.bfloat16)
    loss, gradients = loss_and_gradients(model)

    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_residual_branches_are_scaled_by_depth() -> None:
    assert tiny_config(["rwkv7"] * 24).depth_scale == 0.5
    assert tiny_config(["rwkv7"] * 6).depth_scale == 1.0
    assert tiny_config(["rwkv7"], residual_scale=0.25).depth_scale == 0.25
    ids, _ = tiny_batch(9)
    small, whole = tiny_model(["rwkv7"], residual_scale=1e-6), tiny_model(["rwkv7"], residual_scale=1.0)
    embedded = small.head(small.norm_head(small.norm_embedding(small.embedding(ids))))

    assert (small(ids, WholeSequence()) - embedded).abs().max() < 1e-4
    assert (whole(ids, WholeSequence()) - embedded).abs().max() > 0.1


def test_half_of_a_sequence_s_labels_may_be_ignored() -> None:
    logits = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.tensor([[0, 1, 2, 3, 4, 0], [-100] * 6])
    total, valid = token_losses(logits, labels)
    expected = -logits.log_softmax(-1)[0].gather(-1, labels[0].unsqueeze(-1)).sum()

    assert valid.item() == 6
    assert total.dtype == torch.float32
    assert torch.allclose(total, expected)
    nothing, none = token_losses(logits[1:], labels[1:])
    nothing.backward()
    assert none.item() == 0
    assert nothing.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


class AverageConfig(LayerConfig):
    implementation: ClassVar[str] = "tests.models.test_backbone:Average"

    half_life: float = 2.0


class ToyModelConfig(ModelConfig):
    average: AverageConfig = AverageConfig()


class Average(models.layers.mixer.Mixer):
    """A decaying mean of the tokens so far."""

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__(model, index)
        self.decay = 0.5 ** (1 / models.layers.mixer.settings(model, index, AverageConfig).half_life)

    def forward(self, x: Tensor, first_value: Tensor, context: SequenceContext) -> Tensor:
        age = torch.arange(x.shape[1])
        weight = (self.decay ** (age.unsqueeze(1) - age)).tril()
        return weight @ x


def test_a_new_kind_is_a_config_type_a_class_and_a_field() -> None:
    values = tiny_config(["rwkv7"]).model_dump() | {"layers": ["average", "rwkv7"], "num_layers": 3}
    config = ToyModelConfig(**values)
    model = Backbone(config)
    initialise(model, 0)
    loss, _ = loss_and_gradients(model)

    assert config.layer_kinds == ["average", "rwkv7", "average"]
    assert loss.isfinite()
    assert config.position_multiple == 32


def test_a_config_names_what_is_wrong_with_a_layer_in_use() -> None:
    with pytest.raises(ValueError, match=r"model\.kvm\.rotary_dims=3 is odd"):
        tiny_config(["kvm"], kvm=KVMConfig(chunk=16, rotary_dims=3))
    with pytest.raises(ValueError, match=r"model\.kvm\.rotary_dims=16 must be below the head width 16"):
        tiny_config(["kvm"], kvm=KVMConfig(chunk=16, rotary_dims=16))
    with pytest.raises(ValueError, match=r"hidden_size=48 is not divisible by model\.rwkv7\.head_dim"):
        tiny_config(["rwkv7"], hidden_size=48, rwkv7=ModelConfig().rwkv7)
    with pytest.raises(ValueError, match=r"ffn_expansion=0\.5 x model\.hidden_size=32 is below 32"):
        tiny_config(["kvm"], ffn_expansion=0.5)
    with pytest.raises(ValueError, match=r"model\.kvm\.sinks=16 must be below chunk=16"):
        tiny_config(["kvm"], kvm=KVMConfig(chunk=16, sinks=16))
    with pytest.raises(ValueError, match=r"model\.kvm\.budget\.slots=8 would never act"):
        tiny_config(["kvm"], kvm=KVMConfig(chunk=16, budget=FixedBudget(slots=8)))
    with pytest.raises(ValueError, match=r"unknown kind \['mamba'\]"):
        tiny_config(["mamba"])
    tiny_config(["rwkv7"], kvm=KVMConfig(chunk=16, rotary_dims=3))  # not in use


def test_shards_align_to_every_kind_in_use() -> None:
    assert tiny_config(HYBRID).position_multiple == 32
    assert tiny_config(["kvm", "sliding_window"]).position_multiple == 16
    assert tiny_config(["full_attention"]).position_multiple == 1
