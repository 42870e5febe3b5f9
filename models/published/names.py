"""Parameter names of the authors' published checkpoints, to ours and back."""

from collections.abc import Mapping

from torch import Tensor

from models.config import ModelConfig

_BACKBONE = {
    "transformer.wte.weight": "embedding.weight",
    "transformer.ln_emb.weight": "norm_embedding.weight",
    "transformer.ln_emb.bias": "norm_embedding.bias",
    "transformer.ln_head.weight": "norm_head.weight",
    "transformer.ln_head.bias": "norm_head.bias",
    "lm_head.weight": "head.weight",
}
_BLOCK = {
    "ln_attn.weight": "norm_mixer.weight",
    "ln_attn.bias": "norm_mixer.bias",
    "ln_mlp.weight": "norm_feed_forward.weight",
    "ln_mlp.bias": "norm_feed_forward.bias",
    "mlp.x_k": "feed_forward.shift.amount",
    "mlp.c_fc.weight": "feed_forward.expand.weight",
    "mlp.c_proj.weight": "feed_forward.contract.weight",
}
_ATTENTION = {
    "x_q": "projections.shifts.query.amount",
    "x_k": "projections.shifts.key.amount",
    "x_v": "projections.shifts.value.amount",
    "c_q.weight": "projections.query.weight",
    "c_k.weight": "projections.key.weight",
    "c_v.weight": "projections.value.weight",
    "c_proj.weight": "output.weight",
    "v_gate0": "projections.value_residual.gate.bias",
    "v_gate1.weight": "projections.value_residual.gate.down.weight",
    "v_gate2.weight": "projections.value_residual.gate.up.weight",
}
_HEAD_NORMS = {
    "ln_q.weight": "projections.norm_query.weight",
    "ln_q.bias": "projections.norm_query.bias",
    "ln_k.weight": "projections.norm_key.weight",
    "ln_k.bias": "projections.norm_key.bias",
}
_KVM = {
    "ln_s_k.weight": "state_norm_weight",
    "ln_s_k.bias": "state_norm_bias",
    "key_weighting.weight": "gate.weight",
    "front_head_temp": "window_temperature",
    "state_head_temp": "state_temperature",
}
_OVQ = {"beta": "query_scale"}
_RWKV7 = {
    "x_r": "shifts.receptance.amount",
    "x_w": "shifts.decay.amount",
    "x_k": "shifts.key.amount",
    "x_v": "shifts.value.amount",
    "x_a": "shifts.rate.amount",
    "x_g": "shifts.gate.amount",
    "receptance.weight": "receptance.weight",
    "key.weight": "key.weight",
    "value.weight": "value.weight",
    "output.weight": "output.weight",
    "w0": "decay.bias",
    "w1.weight": "decay.down.weight",
    "w2.weight": "decay.up.weight",
    "a0": "rate.bias",
    "a1.weight": "rate.down.weight",
    "a2.weight": "rate.up.weight",
    "g1.weight": "gate.down.weight",
    "g2.weight": "gate.up.weight",
    "v0": "value_residual.gate.bias",
    "v1.weight": "value_residual.gate.down.weight",
    "v2.weight": "value_residual.gate.up.weight",
    "k_k": "removal",
    "k_a": "rate_mix",
    "r_k": "bonus",
    "ln_x.weight": "norm.weight",
    "ln_x.bias": "norm.bias",
}
_MIXERS = {
    "kvm": _ATTENTION | _HEAD_NORMS | _KVM,
    "sliding_window": _ATTENTION | _HEAD_NORMS,
    "full_attention": _ATTENTION | _HEAD_NORMS,
    "block_window": _ATTENTION | _HEAD_NORMS,
    "ovq": _ATTENTION | _OVQ,
    "rwkv7": _RWKV7,
}
_THREE_DIMS = {"mlp.x_k", "attn.v_gate0"} | {
    f"attn.{name}" for name in ("w0", "a0", "v0", "k_k", "k_a", "x_r", "x_w", "x_a", "x_g")
}  # stored as [1, 1, d]; RWKV-7's x_k and x_v too


def name_map(model: ModelConfig) -> dict[str, str]:
    """Authors' name -> our name, of every parameter such layers may have; some are switched off by settings.

    ValueError for a kind of layer that the published layout does not know.
    """
    names = dict(_BACKBONE)
    for index, kind in enumerate(model.layer_kinds):
        if kind not in _MIXERS:
            raise ValueError(f"model.layers names {kind}, which the published layout has no names for")
        theirs, ours = f"transformer.h.{index}.", f"layers.{index}."
        names |= {theirs + a: ours + b for a, b in _BLOCK.items()}
        names |= {f"{theirs}attn.{a}": f"{ours}mixer.{b}" for a, b in _MIXERS[kind].items()}
    return names


def published_shape(name: str, shape: tuple[int, ...], model: ModelConfig) -> tuple[int, ...]:
    """The shape in which the published layout keeps our parameter of `shape` under its own `name`."""
    return (1, 1, *shape) if _is_three_dims(name, model) else shape


def from_authors(tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """A published checkpoint's tensors under our names and shapes."""
    names = name_map(model)
    unknown = sorted(set(tensors) - set(names))
    if unknown:
        raise ValueError(f"the checkpoint holds parameters this model has no place for: {unknown}")
    return {names[name]: z.flatten() if z.shape[:2] == (1, 1) else z for name, z in tensors.items()}


def to_authors(tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Our tensors under the names and shapes of the published layout."""
    names = {ours: theirs for theirs, ours in name_map(model).items()}
    unknown = sorted(set(tensors) - set(names))
    if unknown:
        raise ValueError(f"the published layout has no place for {unknown}")
    return {
        names[name]: z.view(published_shape(names[name], tuple(z.shape), model))
        for name, z in tensors.items()
    }


def _is_three_dims(name: str, model: ModelConfig) -> bool:
    if not name.startswith("transformer.h."):
        return False
    index, within = name.removeprefix("transformer.h.").split(".", 1)
    if within in ("attn.x_k", "attn.x_v"):
        return model.layer_kinds[int(index)] == "rwkv7"
    return within in _THREE_DIMS
