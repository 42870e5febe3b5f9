import pytest
import torch
from safetensors.torch import load_file

from models.backbone import Backbone
from models.published.names import from_authors, name_map, to_authors
from models.published.settings import model_config
from tests.models.golden import GOLDEN
from tests.models.published.test_settings import published
from tests.models.tiny import tiny_config

FAMILIES = ["bswa", "gptalpha", "kvm_sqrt", "kvm_swa", "ovq_swa", "rwkv7"]


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_go_to_our_names_and_back_unchanged(name: str) -> None:
    config = model_config(published(name))
    theirs = load_file(GOLDEN / "checkpoints" / name / "model.safetensors")
    ours = from_authors(theirs, config)

    assert ours.keys() == Backbone(config).state_dict().keys()
    back = to_authors(ours, config)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(z, theirs[key]) and z.shape == theirs[key].shape for key, z in back.items())


def test_weights_without_a_place_are_refused_by_name() -> None:
    config = model_config(published("kvm_sqrt"))
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.attn\.extra"):
        from_authors({"transformer.h.0.attn.extra": torch.ones(1)}, config)
    with pytest.raises(ValueError, match=r"layers\.9\.norm_mixer\.bias"):
        to_authors({"layers.9.norm_mixer.bias": torch.ones(1)}, config)


def test_a_kind_has_places_for_its_own_parameters_only() -> None:
    places = name_map(model_config(published("kvm_swa")))
    assert "transformer.h.1.attn.key_weighting.weight" in places
    assert "transformer.h.0.attn.key_weighting.weight" not in places, "layer 0 is a sliding window"
    assert "transformer.h.1.attn.beta" not in places
    with pytest.raises(ValueError, match="mamba2, which the published layout has no names for"):
        name_map(tiny_config(["mamba2"]))
