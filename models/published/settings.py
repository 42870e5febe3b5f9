"""The `config.json` of the authors' published checkpoints, read into a ModelConfig.

What this package does not implement is refused by name, never ignored.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from models.budget import Budget, FixedBudget, PowerLawBudget, SaturatingBudget
from models.config import (
    MOST_LAYERS,
    BlockWindowConfig,
    FullAttentionConfig,
    KVMConfig,
    LayerConfig,
    ModelConfig,
    OVQConfig,
    RWKV7Config,
    SlidingWindowConfig,
)
from models.published.settings_keys import READ, check_keys, ignored_settings
from models.published.settings_reader import Settings, SettingsReader

__all__ = ["MIXERS", "Settings", "ignored_settings", "model_config"]


@dataclass(frozen=True)
class _Rotary:
    """Rotary settings of one kind of layer."""

    dims: int
    base: float | None  # None: that of the model


def model_config(settings: Settings) -> ModelConfig:
    """The model that a published `config.json` describes. ValueError names every setting we cannot follow."""
    read = SettingsReader(settings)
    check_keys(read)
    kinds, layers = _kinds(read)
    values = {
        "vocab_size": read.integer("vocab_size", 2),
        "hidden_size": read.integer("hidden_size", 1),
        "num_layers": read.integer("num_hidden_layers", 1),
        "num_heads": read.integer("num_attention_heads", 1),
        "head_dim": _head_dim(read),
        "ffn_expansion": read.positive("ffn_expansion", 4.0),
        "residual_scale": _residual_scale(read),
        "rotary_base": read.positive("rope_theta", 10_000.0),
        "base_width": read.integer("mup_base_dim", 1, 768),
        "value_residual": read.switch("use_value_residual", True),
        "token_shift": read.switch("use_tokenshift_att", True),
        "feed_forward_shift": read.switch("use_tokenshift_ffn", True),
    }
    _check_modes(read, [mixer for mixer, (kind, _) in MIXERS.items() if kind in kinds])
    if not read.problems:
        try:
            return ModelConfig.model_validate({**values, **kinds, "layers": layers})
        except ValidationError as error:
            read.problems += _in_their_words(error, layers, settings)
    raise ValueError("config.json: " + "; ".join(read.problems))


def _kinds(read: SettingsReader) -> tuple[dict[str, LayerConfig], list[str]]:
    """Settings by our name of the kinds in use, and the layer pattern."""
    every, layers = _alternative_every(read), read.integer("num_hidden_layers", 1)
    base = read.positive("rope_theta", 10_000.0)
    found: list[tuple[str, LayerConfig]] = []
    if every:
        other = read.positive("alt_rope_theta", 10_000.0)
        found.append(_kind(read, "alt_token_mixer", "alt_rope_partial_dim", None if other == base else other))
    if every != 1 and (not every or layers > 1):
        found.append(_kind(read, "token_mixer", "rope_partial_dim", None))
    if len(found) == 2 and found[0][0] == found[1][0]:
        return _one_mixer_twice(read, found)
    pattern = (
        [found[0][0]] + [found[-1][0]] * (min(every, layers, MOST_LAYERS) - 1) if every else [found[0][0]]
    )
    return dict(found), pattern[:layers]


def _alternative_every(read: SettingsReader) -> int:
    """Layers from one alternative layer to the next, 0 if there are none."""
    every = read.settings.get("alt_layer_every", -1)
    return 0 if every == -1 else read.integer("alt_layer_every", 1)


def _one_mixer_twice(
    read: SettingsReader, found: list[tuple[str, LayerConfig]]
) -> tuple[dict[str, LayerConfig], list[str]]:
    """Alternative layers of the main mixer: those are other layers only if something tells them apart."""
    kind = found[0][0]
    mixer = read.settings["token_mixer"]
    if found[0][1] != found[1][1]:
        read.refuse(
            f"token_mixer and alt_token_mixer are both {mixer!r} with different rotary settings, which is "
            "not supported"
        )
    elif read.switch("use_value_residual", True):
        read.refuse(
            f"token_mixer and alt_token_mixer are both {mixer!r}, each with first values of its own "
            "(use_value_residual), which is not supported"
        )
    return {kind: found[0][1]}, [kind]


def _kind(
    read: SettingsReader, mixer_name: str, dims_name: str, base: float | None
) -> tuple[str, LayerConfig]:
    mixer = read.settings.get(mixer_name)
    if not isinstance(mixer, str) or mixer not in MIXERS:
        read.word(mixer_name, tuple(MIXERS))
        return "kvm", KVMConfig()
    name, build = MIXERS[mixer]
    dims = 0 if mixer == "rwkv7" else read.integer(dims_name, 0)
    return name, build(read, _Rotary(dims, base))


def _kvm(read: SettingsReader, rotary: _Rotary) -> KVMConfig:
    chunk = read.integer("chunk_len", 1)
    gate = read.switch("kvm_use_merge_gate_keys", True)
    if gate != read.switch("kvm_use_merge_gate_values", True):
        first, second = "kvm_use_merge_gate_keys", "kvm_use_merge_gate_values"
        got = [read.settings.get(name, 1) for name in (first, second)]
        read.refuse(f"{first}={got[0]} and {second}={got[1]} must agree")
    if not read.switch("use_overflow_v_key_weighting", True):
        read.refuse("use_overflow_v_key_weighting=0 is not supported, it must be on")
    return KVMConfig(
        chunk=chunk,
        window_chunks=read.integer("n_bswa_chunks", 1),
        sinks=read.integer("sink_len", 0),
        rotary_dims=rotary.dims,
        rotary_base=rotary.base,
        budget=_budget(read),
        max_slots=read.integer("n_max_d_chunks", 1) * chunk,
        head_temperatures=read.switch("kvm_use_head_temps", True),
        merge_gate=gate,
        gate_appends=read.switch("kvm_apply_merge_gate_to_appends", True),
        gate_first_state=read.switch("kvm_apply_merge_gate_to_initial_state", False),
        value_radius=read.switch("kvm_use_vlens", True),
    )


def _budget(read: SettingsReader) -> Budget:
    schedule = read.word("state_budget_mode", ("fixed", "power_law", "kvm_saturation"))
    minimum = read.integer("state_min_len", 1)
    if schedule == "fixed":
        return FixedBudget(slots=minimum)
    round_down = read.integer("state_round_down", 1, 1)
    if schedule == "power_law":
        factor, exponent = read.positive("state_growth_factor"), read.positive("state_growth_exponent")
        if exponent > 1:
            read.refuse(f"state_growth_exponent={exponent} is not supported, wanted 1 at most")
            exponent = 1.0
        return PowerLawBudget(factor=factor, exponent=exponent, minimum=minimum, round_down=round_down)
    limit = read.integer("state_saturation_n", 1)
    return SaturatingBudget(limit=limit, minimum=minimum, round_down=round_down)


def _rwkv7(read: SettingsReader, rotary: _Rotary) -> RWKV7Config:
    width, heads = read.integer("hidden_size", 1), read.integer("num_attention_heads", 1)
    head = _head_dim(read) or max(1, width // heads)
    if head * heads != width:
        read.refuse(
            f"num_attention_heads={heads} heads of width {head} are not hidden_size={width}, as rwkv7 needs"
        )
    if not read.switch("use_tokenshift_att", True):
        read.refuse("use_tokenshift_att=0 is not supported with rwkv7, whose token shift is always on")
    return RWKV7Config(head_dim=head)


def _sliding_window(read: SettingsReader, rotary: _Rotary) -> SlidingWindowConfig:
    window = read.integer_or("swa_window_size", (-1, 0), read.integer("chunk_len", 1), -1)
    if window < 2:
        read.refuse(f"swa_window_size or chunk_len gives a window of {window} token, wanted 2 or more")
    return SlidingWindowConfig(window=max(window, 2), rotary_dims=rotary.dims, rotary_base=rotary.base)


def _full_attention(read: SettingsReader, rotary: _Rotary) -> FullAttentionConfig:
    return FullAttentionConfig(rotary_dims=rotary.dims, rotary_base=rotary.base)


def _block_window(read: SettingsReader, rotary: _Rotary) -> BlockWindowConfig:
    return BlockWindowConfig(
        chunk=read.integer("chunk_len", 1),
        window_chunks=read.integer("n_bswa_chunks", 1),
        sinks=read.integer("sink_len", 0),
        rotary_dims=rotary.dims,
        rotary_base=rotary.base,
    )


def _ovq(read: SettingsReader, rotary: _Rotary) -> OVQConfig:
    return OVQConfig(
        chunk=read.integer_or(
            "ovq_chunk_size", (-1, 0), read.integer("chunk_len", 1), READ["ovq_chunk_size"]
        ),
        max_centroids=read.integer("ovq_max_centroids", 1),
        rotary_dims=rotary.dims,
        rotary_base=rotary.base,
    )


# The published mixer -> our kind and how its settings are read.
MIXERS: dict[str, tuple[str, Callable[[SettingsReader, _Rotary], LayerConfig]]] = {
    "kvm": ("kvm", _kvm),
    "rwkv7": ("rwkv7", _rwkv7),
    "swa": ("sliding_window", _sliding_window),
    "gptalpha": ("full_attention", _full_attention),
    "gptalpha_bswa": ("block_window", _block_window),
    "ovq": ("ovq", _ovq),
}


def _head_dim(read: SettingsReader) -> int | None:
    """d_head, else d_qk_head and d_v_head, which must agree, else null: hidden_size / heads."""
    names = ("d_head", "d_qk_head", "d_v_head")
    head, query, value = (read.optional_integer(name) for name in names)
    if query != value:
        read.refuse(f"d_qk_head={query} and d_v_head={value} must agree")
    if head is not None and query not in (None, head):
        read.refuse(f"d_head={head} and d_qk_head={query} must agree")
    return head or query


def _residual_scale(read: SettingsReader) -> float:
    return 1.0 if read.settings.get("residual_scale") is None else read.positive("residual_scale")


def _check_modes(read: SettingsReader, mixers: list[str]) -> None:
    for mixer in mixers:
        family = "gptalpha" if mixer == "gptalpha_bswa" else mixer
        for part in ("value_residual_mode", "token_shift_mode"):
            read.word(f"{family}_{part}", ("rwkv",), "rwkv")


def _in_their_words(error: ValidationError, layers: list[str], settings: Settings) -> list[str]:
    """What ModelConfig says is wrong, under the names of the published file."""
    alternative = layers[0] if len(layers) > 1 or settings.get("alt_layer_every", -1) == 1 else None
    names = {
        rf"model\.{alternative}\.rotary_dims": "alt_rope_partial_dim",
        r"model\.\w+\.rotary_dims": "rope_partial_dim",
        r"model\.\w+\.sinks": "sink_len",
        r"model\.\w+\.max_slots": "n_max_d_chunks x chunk_len",
        r"model\.\w+\.budget\.slots": "state_min_len",
        r"model\.\w+\.budget\.limit": "state_saturation_n",
        r"model\.num_heads": "num_attention_heads",
        r"model\.num_layers": "num_hidden_layers",
        r"model\.head_dim": "d_head",
        r"model\.": "",
        r"\bchunk=": "chunk_len=",
    }
    found = []
    for problem in error.errors():
        text = problem["msg"].removeprefix("Value error, ")
        if problem["loc"]:
            text = f"model.{'.'.join(map(str, problem['loc']))}={problem['input']}: {text}"
        for ours, theirs in names.items():
            text = re.sub(ours, theirs, text)
        found += text.splitlines()
    return found
