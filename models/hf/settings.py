"""The `config.json` of the authors' published checkpoints, read into a ModelConfig. Imports no torch.

What this package does not implement is refused by name, never ignored.
"""

from collections.abc import Callable, Mapping
from typing import Any

from models.budget import Budget, FixedBudget, PowerLawBudget, SaturatingBudget
from models.config import (
    BlockWindowConfig,
    FullAttentionConfig,
    KVMConfig,
    LayerConfig,
    ModelConfig,
    OVQConfig,
    RWKV7Config,
    SlidingWindowConfig,
)

Settings = Mapping[str, Any]

_MUST_BE_OFF = (
    "use_block_lambdas",
    "use_skip_connections",
    "logit_softcap",
    "alt_share_v0",
    "ovq_normalize_centroids",
    "ovq_use_min_state_size",
    "ovq_use_counts_for_lr_only",
    "ovq_use_delta_rule",
    "use_state_deltarule",
    "use_state_decay",
)
_TRAINING_ONLY = ("use_l2wrap",)


def model_config(settings: Settings) -> ModelConfig:
    """The model that a published `config.json` describes. ValueError names every setting we cannot follow."""
    kinds, layers = _kinds(settings)
    problems = _problems(settings, list(kinds))
    if problems:
        raise ValueError("config.json: " + "; ".join(problems))
    return ModelConfig(
        vocab_size=settings["vocab_size"],
        hidden_size=settings["hidden_size"],
        num_layers=settings["num_hidden_layers"],
        num_heads=settings["num_attention_heads"],
        head_dim=_head_dim(settings),
        layers=layers,
        ffn_expansion=settings.get("ffn_expansion", 4.0),
        residual_scale=settings.get("residual_scale") or 1.0,
        rotary_base=settings.get("rope_theta", 10_000.0),
        base_width=settings.get("mup_base_dim", 768),
        value_residual=bool(settings.get("use_value_residual", 1)),
        token_shift=bool(settings.get("use_tokenshift_att", 1)),
        **dict(kinds.values()),
    )


def ignored_settings(settings: Settings) -> list[str]:
    """Settings that are on, act in training only, and are not followed."""
    return [name for name in _TRAINING_ONLY if settings.get(name)]


def _kinds(settings: Settings) -> tuple[dict[str, tuple[str, LayerConfig]], list[str]]:
    """Authors' mixer name -> our kind and its settings; and the layer pattern."""
    main, every = settings["token_mixer"], settings.get("alt_layer_every", -1)
    kinds = {main: _kind(main, settings, settings.get("rope_partial_dim"))}
    if every < 1:
        return kinds, [kinds[main][0]]
    other = settings["alt_token_mixer"]
    alternative = _kind(other, settings, settings.get("alt_rope_partial_dim"))
    if other == main and alternative != kinds[main]:
        raise ValueError(
            f"config.json: both kinds of layers are {main} with different settings, not supported"
        )
    kinds[other] = alternative
    return kinds, [alternative[0]] + [kinds[main][0]] * (every - 1)


def _kind(mixer: str, settings: Settings, rotary_dims: int | None) -> tuple[str, LayerConfig]:
    if mixer not in _MIXERS:
        raise ValueError(f"config.json: token mixer {mixer!r} is not supported; known are {sorted(_MIXERS)}")
    name, build = _MIXERS[mixer]
    return name, build(settings, rotary_dims)


def _kvm(settings: Settings, rotary_dims: int | None) -> KVMConfig:
    chunk = settings["chunk_len"]
    max_chunks = settings.get("n_max_d_chunks")
    return KVMConfig(
        chunk=chunk,
        window_chunks=settings["n_bswa_chunks"],
        sinks=settings["sink_len"],
        rotary_dims=rotary_dims,
        budget=_budget(settings),
        max_slots=max_chunks * chunk if max_chunks else None,
        head_temperatures=bool(settings.get("kvm_use_head_temps", 1)),
        merge_gate=bool(settings.get("kvm_use_merge_gate_keys", 1)),
        gate_appends=bool(settings.get("kvm_apply_merge_gate_to_appends", 1)),
        gate_first_state=bool(settings.get("kvm_apply_merge_gate_to_initial_state", 0)),
        value_radius=bool(settings.get("kvm_use_vlens", 1)),
    )


def _budget(settings: Settings) -> Budget:
    schedule, minimum = settings["state_budget_mode"], settings["state_min_len"]
    round_down = settings.get("state_round_down", 1)
    if schedule == "fixed":
        return FixedBudget(slots=minimum)
    if schedule == "power_law":
        factor, exponent = settings["state_growth_factor"], settings["state_growth_exponent"]
        return PowerLawBudget(factor=factor, exponent=exponent, minimum=minimum, round_down=round_down)
    if schedule == "kvm_saturation":
        return SaturatingBudget(limit=settings["state_saturation_n"], minimum=minimum, round_down=round_down)
    raise ValueError(
        f"config.json: state_budget_mode={schedule!r} is not supported; "
        "known are fixed, power_law, kvm_saturation"
    )


def _rwkv7(settings: Settings, rotary_dims: int | None) -> RWKV7Config:
    width = _head_dim(settings) or settings["hidden_size"] // settings["num_attention_heads"]
    return RWKV7Config(head_dim=width)


def _sliding_window(settings: Settings, rotary_dims: int | None) -> SlidingWindowConfig:
    window = settings.get("swa_window_size", -1)
    return SlidingWindowConfig(
        window=window if window > 0 else settings["chunk_len"], rotary_dims=rotary_dims
    )


def _full_attention(settings: Settings, rotary_dims: int | None) -> FullAttentionConfig:
    return FullAttentionConfig(rotary_dims=rotary_dims)


def _block_window(settings: Settings, rotary_dims: int | None) -> BlockWindowConfig:
    return BlockWindowConfig(
        chunk=settings["chunk_len"],
        window_chunks=settings["n_bswa_chunks"],
        sinks=settings["sink_len"],
        rotary_dims=rotary_dims,
    )


def _ovq(settings: Settings, rotary_dims: int | None) -> OVQConfig:
    chunk = settings.get("ovq_chunk_size", -1)
    return OVQConfig(
        chunk=chunk if chunk > 0 else settings["chunk_len"],
        max_centroids=settings["ovq_max_centroids"],
        rotary_dims=rotary_dims,
    )


_MIXERS: dict[str, tuple[str, Callable[[Settings, int | None], LayerConfig]]] = {
    "kvm": ("kvm", _kvm),
    "rwkv7": ("rwkv7", _rwkv7),
    "swa": ("sliding_window", _sliding_window),
    "gptalpha": ("full_attention", _full_attention),
    "gptalpha_bswa": ("block_window", _block_window),
    "ovq": ("ovq", _ovq),
}


def _head_dim(settings: Settings) -> int | None:
    """d_head, else d_qk_head and d_v_head, which must agree, else null: hidden_size / heads."""
    width = settings.get("d_head") or settings.get("d_qk_head")
    return width or settings.get("d_v_head")


def _problems(settings: Settings, mixers: list[str]) -> list[str]:
    problems = [
        f"{name}={settings[name]} is not supported, it must be off"
        for name in _MUST_BE_OFF
        if settings.get(name)
    ]
    for mixer in mixers:
        family = "gptalpha" if mixer == "gptalpha_bswa" else mixer
        for part in ("value_residual_mode", "token_shift_mode"):
            name = f"{family}_{part}"
            if settings.get(name, "rwkv") != "rwkv":
                problems.append(f"{name}={settings[name]!r} is not supported, it must be 'rwkv'")
    for first, second in (
        ("kvm_use_merge_gate_keys", "kvm_use_merge_gate_values"),
        ("use_tokenshift_att", "use_tokenshift_ffn"),
        ("rope_theta", "alt_rope_theta"),
    ):
        if second in settings and first in settings and settings[first] != settings[second]:
            problems.append(f"{first}={settings[first]} and {second}={settings[second]} must agree")
    if not settings.get("d_head") and settings.get("d_qk_head") != settings.get("d_v_head"):
        problems.append("d_qk_head and d_v_head must agree")
    return problems
