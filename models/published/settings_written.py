"""A ModelConfig as the `config.json` of the authors' published layout."""

from collections.abc import Iterator
from typing import Any

from models.budget import Budget, FixedBudget, PowerLawBudget
from models.config import (
    BlockWindowConfig,
    KVMConfig,
    LayerConfig,
    ModelConfig,
    OVQConfig,
    RWKV7Config,
    SlidingWindowConfig,
)
from models.kinds.attention import AttentionConfig
from models.published.settings import MIXERS, model_config
from models.published.settings_keys import MODEL_CLASS, MODEL_TYPE, MUST_BE_OFF, READ, TRAINING_ONLY, UNUSED

_UNCAPPED_CHUNKS = 10_000  # their default; reached by 16*sqrt(N) slots of chunks of 256 at 2.6e10 tokens
_HOW_NOT_WHAT = {"activation_checkpointing", "backend"}


def published_settings(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """What the authors' code needs to build this model; the inverse of `model_config`.

    ValueError names whatever that layout cannot say. A KVM without a cap on its slots gets their default cap.
    """
    settings = {**READ, **MUST_BE_OFF, **TRAINING_ONLY, **UNUSED, **_backbone(model)}
    written: dict[str, str] = {}
    for kind, config in model.used_layer_configs.items():
        for name, value in _kind_settings(model, kind, config):
            if name in written and settings[name] != value:
                raise ValueError(
                    f"the published layout has one {name} for all kinds of layers, but model.{kind} needs "
                    f"{value!r} and model.{written[name]} {settings[name]!r}"
                )
            settings[name], written[name] = value, kind
    back = model_config(settings)
    wanted, got = _effective(model), _effective(back)
    lost = [f"{key}={value!r}" for key, value in sorted(wanted.items()) if got.get(key) != value]
    if lost:
        raise ValueError(f"the published layout cannot say {', '.join(lost)}")
    return settings | {
        "model_type": MODEL_TYPE,
        "architectures": [MODEL_CLASS],
        "dtype": dtype,
        "param_dtype": dtype,
    }


def _backbone(model: ModelConfig) -> dict[str, Any]:
    main, alternative, every = _pattern(model)
    values: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "d_head": model.head_dim,
        "hidden_size": model.hidden_size,
        "mup_base_dim": model.base_width,
        "rope_theta": model.rotary_base,
        "alt_rope_theta": model.rotary_base,
        "ffn_expansion": model.ffn_expansion,
        "residual_scale": model.depth_scale,
        "use_value_residual": int(model.value_residual),
        "use_tokenshift_att": int(model.token_shift),
        "use_tokenshift_ffn": int(model.shifts_feed_forward),
        "alt_layer_every": every,
        "token_mixer": _mixer(main),
    }
    for prefix, kind in (("", main), ("alt_", alternative)):
        config = model.layer_config(kind) if kind else None
        if isinstance(config, AttentionConfig):
            values[f"{prefix}rope_partial_dim"] = config.rotary(model.head_width)
            values[f"{prefix}rope_theta"] = config.rotary_base or model.rotary_base
    return values | ({"alt_token_mixer": _mixer(alternative)} if alternative else {})


def _pattern(model: ModelConfig) -> tuple[str, str | None, int]:
    """Main kind, alternative kind, and at every how many layers it stands, from the first one on."""
    kinds = model.layer_kinds
    if len(set(kinds)) == 1:
        return kinds[0], None, -1
    every = kinds.index(kinds[0], 1) if kinds[0] in kinds[1:] else len(kinds)
    main = kinds[1]
    if every == 1 or kinds != [main if index % every else kinds[0] for index in range(len(kinds))]:
        raise ValueError(
            f"model.layers={model.layers}: the published layout knows one mixer, or another one at every "
            "n-th layer from the first one on"
        )
    return main, kinds[0], every


def _mixer(kind: str) -> str:
    for mixer, (ours, _) in MIXERS.items():
        if ours == kind:
            return mixer
    raise ValueError(f"model.layers names {kind}, which the published layout has no mixer for")


def _kind_settings(model: ModelConfig, kind: str, config: LayerConfig) -> Iterator[tuple[str, Any]]:
    if isinstance(config, KVMConfig | BlockWindowConfig):
        yield from {
            "chunk_len": config.chunk,
            "n_bswa_chunks": config.window_chunks,
            "sink_len": config.sinks,
        }.items()
    if isinstance(config, KVMConfig):
        yield from _kvm(config).items()
    elif isinstance(config, SlidingWindowConfig):
        yield "swa_window_size", config.window
    elif isinstance(config, OVQConfig):
        yield from {
            "ovq_chunk_size": config.chunk,
            "ovq_window_size": config.chunk,
            "ovq_max_centroids": config.max_centroids,
        }.items()
    elif isinstance(config, RWKV7Config):
        alone = model.used_layer_configs.keys() == {kind}  # then nothing else uses heads
        if alone:
            yield "num_attention_heads", model.hidden_size // config.head_dim
        if model.head_dim is not None or not (alone or model.head_width == config.head_dim):
            yield "d_head", config.head_dim


def _kvm(config: KVMConfig) -> dict[str, Any]:
    chunks, rest = divmod(config.max_slots or _UNCAPPED_CHUNKS * config.chunk, config.chunk)
    if rest:
        raise ValueError(
            f"model.kvm.max_slots={config.max_slots} is no multiple of chunk={config.chunk}, as the "
            "published layout counts it"
        )
    return {
        "n_max_d_chunks": chunks,
        "kvm_use_head_temps": int(config.head_temperatures),
        "kvm_use_merge_gate_keys": int(config.merge_gate),
        "kvm_use_merge_gate_values": int(config.merge_gate),
        "kvm_apply_merge_gate_to_appends": int(config.gate_appends),
        "kvm_apply_merge_gate_to_initial_state": int(config.gate_first_state),
        "kvm_use_vlens": int(config.value_radius),
        **_budget(config.budget),
    }


def _budget(budget: Budget) -> dict[str, Any]:
    if isinstance(budget, FixedBudget):
        return {"state_budget_mode": "fixed", "state_min_len": budget.slots}
    shared = {"state_min_len": budget.minimum, "state_round_down": budget.round_down}
    if isinstance(budget, PowerLawBudget):
        growth = {"state_growth_factor": budget.factor, "state_growth_exponent": budget.exponent}
        return shared | growth | {"state_budget_mode": "power_law"}
    return shared | {"state_budget_mode": "kvm_saturation", "state_saturation_n": budget.limit}


def _effective(model: ModelConfig) -> dict[str, Any]:
    """What a model computes: defaults resolved, unused kinds and what only says how left out."""
    configs = model.used_layer_configs
    shown = model.model_dump(mode="json", exclude={*ModelConfig.known_kinds(), "layers", "head_dim"})
    shown |= {
        "layers": model.layer_kinds,
        "residual_scale": model.depth_scale,
        "feed_forward_shift": model.shifts_feed_forward,
    }
    attention = any(isinstance(config, AttentionConfig) for config in configs.values())
    if attention:
        shown["head_dim"] = model.head_width
    else:
        del shown["num_heads"], shown["rotary_base"]
    for kind, config in configs.items():
        values = config.model_dump(mode="json")
        if isinstance(config, AttentionConfig):
            values["rotary_dims"] = config.rotary(model.head_width)
            values["rotary_base"] = config.rotary_base or model.rotary_base
        if isinstance(config, KVMConfig):
            values["max_slots"] = config.max_slots or _UNCAPPED_CHUNKS * config.chunk
            values["kv_heads"] = config.key_value_heads(model)
        if isinstance(config, RWKV7Config):
            values |= {f"{name}_rank": rank for name, rank in config.ranks(model.hidden_size).items()}
        shown |= {f"{kind}.{name}": value for name, value in values.items()}
    if attention:
        del shown["rotary_base"]  # said by every kind
    return {
        f"model.{key}": value for key, value in shown.items() if key.rpartition(".")[2] not in _HOW_NOT_WHAT
    }
