import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.backbone import Backbone
from models.hf.names import from_authors, to_authors
from models.hf.settings import ignored_settings, model_config
from models.hf.tokenizer import load_tokenizer
from tests.models.golden import GOLDEN

FAMILIES = ["bswa", "gptalpha", "kvm_sqrt", "kvm_swa", "ovq_swa", "rwkv7"]


def published(name: str, **changes: object) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((GOLDEN / "checkpoints" / name / "config.json").read_text())
    return settings | changes


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


def test_settings_become_layers_budgets_and_windows() -> None:
    swa = model_config(published("kvm_swa"))
    assert swa.layer_kinds == ["sliding_window", "kvm", "sliding_window", "kvm"]
    assert swa.sliding_window.window == 8
    assert swa.sliding_window.rotary_dims == 16
    assert swa.kvm.rotary_dims == 8
    assert swa.kvm.budget.kind == "saturating"
    assert swa.kvm.max_slots == 80_000
    assert swa.depth_scale == 0.5
    sqrt = model_config(published("kvm_sqrt", residual_scale=None, d_head=24, swa_window_size=-1))
    assert sqrt.depth_scale == 1.0
    assert sqrt.head_width == 24
    assert sqrt.kvm.budget.kind == "power_law"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_block_lambdas": True}, "use_block_lambdas"),
        ({"logit_softcap": 30.0}, "logit_softcap"),
        ({"kvm_token_shift_mode": "none"}, "kvm_token_shift_mode"),
        ({"kvm_use_merge_gate_values": 0}, "kvm_use_merge_gate_keys=1 and kvm_use_merge_gate_values=0"),
        ({"use_tokenshift_ffn": 0}, "use_tokenshift_att"),
        ({"token_mixer": "lact"}, "'lact' is not supported"),
        ({"state_budget_mode": "random"}, "state_budget_mode='random'"),
        ({"d_qk_head": 16}, "d_qk_head and d_v_head"),
    ],
)
def test_settings_we_cannot_follow_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_config(published("kvm_sqrt", **changes))


def test_settings_that_act_in_training_only_are_reported() -> None:
    assert ignored_settings(published("kvm_sqrt")) == []
    assert ignored_settings(published("kvm_sqrt", use_l2wrap=True)) == ["use_l2wrap"]


def test_a_missing_tokenizer_is_named(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="nothing-here"):
        load_tokenizer(str(tmp_path / "nothing-here"))
