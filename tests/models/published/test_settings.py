import json
from typing import Any

import pytest

from models.budget import FixedBudget, PowerLawBudget, SaturatingBudget
from models.published.settings import ignored_settings, model_config
from tests.models.golden import GOLDEN


def published(name: str, **changes: object) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((GOLDEN / "checkpoints" / name / "config.json").read_text())
    return settings | changes


def without(name: str, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in published(name).items() if key not in keys}


def test_settings_become_layers_budgets_and_windows() -> None:
    swa = model_config(published("kvm_swa"))
    assert swa.layer_kinds == ["sliding_window", "kvm", "sliding_window", "kvm"]
    assert (swa.sliding_window.window, swa.sliding_window.rotary_dims) == (8, 16)
    assert (swa.kvm.rotary_dims, swa.kvm.sinks, swa.kvm.window_chunks) == (8, 1, 2)
    assert swa.kvm.budget == SaturatingBudget(limit=32, minimum=1)
    assert swa.kvm.max_slots == 80_000
    assert swa.depth_scale == 0.5
    sqrt = model_config(published("kvm_sqrt", residual_scale=None, d_head=24, swa_window_size=-1))
    assert (sqrt.depth_scale, sqrt.head_width) == (1.0, 24)
    assert sqrt.kvm.budget == PowerLawBudget(factor=3, minimum=8)
    fixed = model_config(published("kvm_sqrt", state_budget_mode="fixed", state_min_len=16))
    assert fixed.kvm.budget == FixedBudget(slots=16)


@pytest.mark.parametrize("dims", [0, 8], ids=["NoPE", "HalfRoPE"])
def test_full_attention_with_windows_on_even_layers_is_read(dims: int) -> None:
    changes = {"alt_layer_every": 2, "rope_partial_dim": dims, "alt_rope_partial_dim": 16}
    model = model_config(published("gptalpha", swa_window_size=0, **changes))
    assert model.layer_kinds == ["sliding_window", "full_attention"] * 2
    assert (model.full_attention.rotary_dims, model.sliding_window.rotary_dims) == (dims, 16)
    assert model.sliding_window.window == 8, "0 stands for a chunk"


@pytest.mark.parametrize(
    ("every", "kinds"), [(1, "ssss"), (2, "sksk"), (3, "skks"), (4, "skkk"), (9, "skkk"), (-1, "kkkk")]
)
def test_alternative_layers_stand_at_every_nth_place_from_the_first(every: int, kinds: str) -> None:
    model = model_config(published("kvm_swa", alt_layer_every=every))
    assert "".join(kind[0] for kind in model.layer_kinds) == kinds


def test_a_window_or_chunk_of_minus_one_is_the_common_chunk() -> None:
    assert model_config(published("ovq_swa", ovq_chunk_size=-1, chunk_len=16)).ovq.chunk == 16
    assert model_config(published("ovq_swa", swa_window_size=-1, chunk_len=16)).sliding_window.window == 16


def test_each_kind_may_have_a_rotary_base_of_its_own() -> None:
    other = model_config(published("kvm_swa", rope_theta=500.0, alt_rope_theta=20_000.0))
    assert (other.rotary_base, other.kvm.rotary_base) == (500.0, None)
    assert other.sliding_window.rotary_base == 20_000.0
    assert model_config(published("kvm_swa")).sliding_window.rotary_base is None


def test_switches_reach_the_model() -> None:
    switches = {
        "kvm_apply_merge_gate_to_appends": 1,
        "kvm_apply_merge_gate_to_initial_state": True,
        "kvm_use_head_temps": 0,
        "kvm_use_vlens": 0,
        "sink_len": 0,
        "use_value_residual": 0,
        "use_tokenshift_att": 0,
    }
    model = model_config(published("kvm_sqrt", **switches))
    assert model.kvm.gate_appends
    assert model.kvm.gate_first_state
    assert not model.kvm.head_temperatures
    assert not model.kvm.value_radius
    assert model.kvm.sinks == 0
    assert not model.value_residual
    assert (model.token_shift, model.shifts_feed_forward) == (False, True)
    ungated = {"kvm_use_merge_gate_keys": 0, "kvm_use_merge_gate_values": 0}
    assert not model_config(published("kvm_sqrt", **ungated)).kvm.merge_gate


def test_settings_of_mixers_that_are_not_used_change_nothing() -> None:
    plain = model_config(published("gptalpha"))
    unused: dict[str, object] = {
        "state_budget_mode": "unheard of",
        "alt_token_mixer": "lact",
        "alt_rope_theta": -1,
        "ovq_max_centroids": None,
        "kvm_use_merge_gate_values": 0,
        "lact_use_muon": 1,
        "kda_conv_size": 7,
    }
    assert model_config(published("gptalpha", **unused)) == plain


REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("kvm_sqrt", {"use_block_lambdas": True}, "use_block_lambdas=True"),
    ("kvm_sqrt", {"use_skip_connections": True}, "use_skip_connections=True"),
    ("kvm_sqrt", {"logit_softcap": 30.0}, "logit_softcap=30.0"),
    ("kvm_swa", {"alt_share_v0": 1}, "alt_share_v0=1"),
    ("ovq_swa", {"ovq_normalize_centroids": 1}, "ovq_normalize_centroids=1"),
    ("ovq_swa", {"ovq_use_min_state_size": 1}, "ovq_use_min_state_size=1"),
    ("ovq_swa", {"ovq_use_counts_for_lr_only": 1}, "ovq_use_counts_for_lr_only=1"),
    ("ovq_swa", {"ovq_use_delta_rule": 1}, "ovq_use_delta_rule=1"),
    ("kvm_sqrt", {"use_state_decay": 1}, "use_state_decay=1"),
    ("kvm_sqrt", {"use_state_deltarule": 1}, "use_state_deltarule=1"),
    ("kvm_sqrt", {"token_mixer_class_path": "a.B"}, "token_mixer_class_path='a.B'"),
    ("kvm_sqrt", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ("kvm_sqrt", {"kvm_token_shift_mode": "none"}, "kvm_token_shift_mode='none'"),
    ("bswa", {"gptalpha_value_residual_mode": "none"}, "gptalpha_value_residual_mode='none'"),
    ("kvm_swa", {"swa_token_shift_mode": "full"}, "swa_token_shift_mode='full'"),
    ("kvm_sqrt", {"kvm_use_merge_gate_values": 0}, "keys=1 and kvm_use_merge_gate_values=0 must agree"),
    ("kvm_sqrt", {"use_overflow_v_key_weighting": 0}, "use_overflow_v_key_weighting=0"),
    ("kvm_sqrt", {"token_mixer": "lact"}, "token_mixer='lact'"),
    ("kvm_swa", {"alt_token_mixer": "kda"}, "alt_token_mixer='kda'"),
    ("kvm_swa", {"alt_layer_every": 0}, "alt_layer_every=0"),
    ("kvm_swa", {"alt_layer_every": -2}, "alt_layer_every=-2"),
    ("kvm_swa", {"alt_token_mixer": "kvm"}, "both 'kvm' with different rotary settings"),
    ("kvm_sqrt", {"alt_layer_every": 2, "alt_token_mixer": "kvm", "alt_rope_partial_dim": 8}, "first values"),
    ("kvm_sqrt", {"state_budget_mode": "random"}, "state_budget_mode='random'"),
    ("kvm_sqrt", {"state_min_len": -1}, "state_min_len=-1"),
    ("kvm_swa", {"state_saturation_n": None}, "state_saturation_n=None"),
    ("kvm_sqrt", {"state_growth_exponent": 1.5}, "state_growth_exponent=1.5"),
    ("kvm_sqrt", {"state_budget_mode": "fixed", "state_min_len": 4}, "state_min_len=4 would never act"),
    ("kvm_sqrt", {"sink_len": 8}, "sink_len=8 must be below chunk_len=8"),
    ("kvm_sqrt", {"rope_partial_dim": 16}, "rope_partial_dim=16 must be below"),
    ("kvm_swa", {"alt_rope_partial_dim": 64}, "alt_rope_partial_dim=64 must be at most"),
    ("kvm_sqrt", {"rope_partial_dim": None}, "rope_partial_dim=None"),
    ("gptalpha", {"rope_partial_dim": 7}, "rope_partial_dim=7 is odd"),
    ("kvm_sqrt", {"d_qk_head": 16}, "d_qk_head=16 and d_v_head=None must agree"),
    ("kvm_sqrt", {"d_qk_head": 16, "d_v_head": 32}, "d_qk_head=16 and d_v_head=32 must agree"),
    ("kvm_sqrt", {"d_head": 16, "d_qk_head": 8, "d_v_head": 8}, "d_head=16 and d_qk_head=8 must agree"),
    ("kvm_sqrt", {"num_attention_heads": 3}, "hidden_size=32 is not divisible by num_attention_heads=3"),
    ("rwkv7", {"d_head": 8}, "2 heads of width 8 are not hidden_size=32"),
    ("rwkv7", {"use_tokenshift_att": 0}, "use_tokenshift_att=0"),
    ("kvm_sqrt", {"residual_scale": 0.0}, "residual_scale=0.0"),
    ("kvm_sqrt", {"use_value_residual": 2}, "use_value_residual=2"),
    ("kvm_sqrt", {"vocab_size": True}, "vocab_size=True"),
    ("kvm_sqrt", {"chunk_len": 8.0}, "chunk_len=8.0"),
    ("kvm_sqrt", {"hidden_act": "gelu"}, "hidden_act='gelu' is an unknown setting"),
    ("kvm_sqrt", {"chunk_length": 8}, "did you mean chunk_len"),
    ("kvm_sqrt", {"model_type": "llama"}, "model_type='llama'"),
    ("kvm_sqrt", {"model_class_path": "model.other.OtherForCausalLM"}, "OtherForCausalLM"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=[str(case[1]) for case in REFUSED])
def test_settings_we_cannot_follow_are_refused_by_name(
    name: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=r"config\.json: ") as refusal:
        model_config(published(name, **changes))
    assert message in str(refusal.value)


@pytest.mark.parametrize("key", ["token_mixer", "chunk_len", "sink_len", "rope_partial_dim", "vocab_size"])
def test_a_setting_that_is_missing_is_named_not_guessed(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is missing"):
        model_config(without("kvm_sqrt", key))


def test_everything_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(ValueError, match="chunk_len=0") as refusal:
        model_config(published("kvm_swa", chunk_len=0, logit_softcap=1.0, head_count=4))
    assert "logit_softcap" in str(refusal.value)
    assert "head_count" in str(refusal.value)


def test_settings_that_act_in_training_only_are_reported() -> None:
    assert ignored_settings(published("kvm_sqrt")) == []
    assert ignored_settings(published("kvm_sqrt", use_l2wrap=True)) == ["use_l2wrap"]
    assert model_config(published("kvm_sqrt", use_l2wrap=True)) == model_config(published("kvm_sqrt"))
