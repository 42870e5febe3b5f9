"""Every key that a published `config.json` may have, and what becomes of it.

A key that is not here is refused: whatever it means, it could change the model.
"""

from difflib import get_close_matches
from typing import Any

from models.published.settings_reader import Settings, SettingsReader

MODEL_TYPE = "rwkv7backbone"
MODEL_CLASS = "RWKV7BackboneForCausalLM"

# Read into a ModelConfig; the values are what the published layout holds where a model does not use them.
READ: dict[str, Any] = {
    "vocab_size": 50304,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "d_qk_head": None,
    "d_v_head": None,
    "d_head": None,
    "hidden_size": 768,
    "mup_base_dim": 768,
    "rope_theta": 10000.0,
    "rope_partial_dim": 64,
    "alt_rope_theta": 10000.0,
    "alt_rope_partial_dim": 64,
    "ffn_expansion": 4.0,
    "token_mixer": "kvm",
    "alt_token_mixer": "swa",
    "alt_layer_every": -1,
    "residual_scale": 1.0,
    "use_value_residual": 1,
    "use_tokenshift_att": 1,
    "use_tokenshift_ffn": 1,
    "gptalpha_value_residual_mode": "rwkv",
    "gptalpha_token_shift_mode": "rwkv",
    "kvm_value_residual_mode": "rwkv",
    "kvm_token_shift_mode": "rwkv",
    "ovq_value_residual_mode": "rwkv",
    "ovq_token_shift_mode": "rwkv",
    "swa_value_residual_mode": "rwkv",
    "swa_token_shift_mode": "rwkv",
    "kvm_apply_merge_gate_to_initial_state": 0,
    "kvm_apply_merge_gate_to_appends": 1,
    "kvm_use_merge_gate_keys": 1,
    "kvm_use_merge_gate_values": 1,
    "kvm_use_head_temps": 1,
    "kvm_use_vlens": 1,
    "use_overflow_v_key_weighting": 1,
    "swa_window_size": -1,
    "ovq_chunk_size": 128,
    "ovq_max_centroids": 2048,
    "sink_len": 1,
    "chunk_len": 256,
    "n_max_d_chunks": 10000,
    "n_bswa_chunks": 2,
    "state_budget_mode": "fixed",
    "state_growth_factor": 1.0,
    "state_growth_exponent": 0.5,
    "state_round_down": 1,
    "state_min_len": -1,
    "state_saturation_n": None,
}
MUST_BE_OFF: dict[str, Any] = {
    "alt_share_v0": 0,
    "use_block_lambdas": False,
    "use_skip_connections": False,
    "logit_softcap": 0.0,
    "ovq_normalize_centroids": 0,
    "ovq_use_min_state_size": 0,
    "ovq_use_counts_for_lr_only": 0,
    "ovq_use_delta_rule": 0,
    "use_state_deltarule": 0,
    "use_state_decay": 0,
    "token_mixer_class_path": None,
    "alt_token_mixer_class_path": None,
    "is_encoder_decoder": False,
    "tie_word_embeddings": False,
    "tie_worhidden_sizedings": False,  # so spelled there
}
TRAINING_ONLY: dict[str, Any] = {"use_l2wrap": False}
UNUSED: dict[str, Any] = {"ovq_window_size": 128}  # no mixer reads it
OTHER_MIXERS = ("kda_", "gated_deltanet_", "lact_")  # of mixers that are refused themselves
COSMETIC = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "max_position_embeddings",
        "model_class_path",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "param_dtype",
        "problem_type",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_KNOWN = READ.keys() | MUST_BE_OFF.keys() | TRAINING_ONLY.keys() | UNUSED.keys() | COSMETIC


def check_keys(read: SettingsReader) -> None:
    """Refuse keys that are unknown, that must be off and are not, and another model's class."""
    settings = read.settings
    for name in settings:
        if name not in _KNOWN and not name.startswith(OTHER_MIXERS):
            near = get_close_matches(name, _KNOWN, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            read.refuse(f"{name}={settings[name]!r} is an unknown setting{hint}")
    for name in MUST_BE_OFF:
        if settings.get(name):
            read.refuse(f"{name}={settings[name]!r} is not supported, it must be off")
    if settings.get("model_type", MODEL_TYPE) != MODEL_TYPE:
        read.refuse(f"model_type={settings['model_type']!r} is not supported, wanted {MODEL_TYPE!r}")
    for name in _classes(settings):
        if name.rpartition(".")[2] != MODEL_CLASS:
            read.refuse(f"the model's class is {name!r}, wanted {MODEL_CLASS}")


def _classes(settings: Settings) -> list[str]:
    path, architectures = settings.get("model_class_path"), settings.get("architectures") or []
    return [str(name) for name in ([path] if path else []) + list(architectures)]


def ignored_settings(settings: Settings) -> list[str]:
    """Settings that are on, act in training only, and are not followed."""
    return [name for name in TRAINING_ONLY if settings.get(name)]
