import pytest
import torch

from models.backbone import Backbone
from models.config import KVMConfig, ModelConfig
from models.parameter_groups import parameter_groups


def scales(**changes: int) -> dict[str, tuple[float, float]]:
    """Learning-rate and decay factor of every parameter."""
    config = ModelConfig(
        num_layers=2, layers=["kvm", "rwkv7"], kvm=KVMConfig(chunk=16), num_heads=8, **changes
    )
    with torch.device("meta"):  # shapes alone matter here
        model = Backbone(config)
    return {
        name: (group.learning_rate_scale, group.weight_decay_scale)
        for group in parameter_groups(model)
        for name in group.names
    }


def test_every_parameter_is_in_one_group_and_groups_are_few() -> None:
    model = Backbone(ModelConfig(num_layers=4, hidden_size=128, num_heads=4))
    groups = parameter_groups(model)
    names = [name for group in groups for name in group.names]

    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert len(groups) <= 6
    assert len({(g.learning_rate_scale, g.weight_decay_scale) for g in groups}) == len(groups)


def test_matrices_scale_with_their_inputs_and_keep_learning_rate_times_decay() -> None:
    wide = scales(hidden_size=1536, base_width=768)
    assert wide["layers.0.mixer.projections.query.weight"] == (0.5, 2.0)
    assert wide["layers.0.mixer.gate.weight"] == (0.5, 2.0)
    assert wide["layers.1.mixer.receptance.weight"] == (0.5, 2.0)
    assert wide["layers.1.mixer.decay.down.weight"] == (0.5, 2.0)
    assert wide["head.weight"] == (0.5, 2.0)
    assert wide["layers.0.feed_forward.contract.weight"] == (0.125, 8.0)


def test_the_second_matrix_of_a_low_rank_map_scales_with_its_own_rank() -> None:
    wide = scales(
        hidden_size=3072, base_width=768
    )  # ranks at 3072 and 768: decay 96 and 64, gate 384 and 128
    assert wide["layers.1.mixer.decay.up.weight"] == pytest.approx((64 / 96, 96 / 64))
    assert wide["layers.1.mixer.gate.up.weight"] == pytest.approx((128 / 384, 384 / 128))
    narrow = scales(hidden_size=256, base_width=256)
    assert narrow["layers.1.mixer.gate.up.weight"] == (1.0, 1.0)


def test_embedding_vectors_and_scalars_are_unscaled_and_only_the_embedding_decays() -> None:
    wide = scales(hidden_size=1536, base_width=768)
    assert wide["embedding.weight"] == (1.0, 1.0)
    for name in (
        "norm_head.weight",
        "layers.0.mixer.window_temperature",
        "layers.0.mixer.projections.value_residual.gate.bias",
        "layers.0.feed_forward.shift.amount",
        "layers.1.mixer.bonus",
        "layers.1.mixer.norm.bias",
    ):
        assert wide[name] == (1.0, 0.0), name
