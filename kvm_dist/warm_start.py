"""A new run that starts from the weights of a trained model; optimizer, schedule and data order are fresh."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvm_dist.agreement import on_rank_zero
from kvm_dist.config import RunConfig
from kvm_dist.data.tokenizer import build_tokenizer
from kvm_dist.exit_codes import ConfigError, StorageError
from kvm_dist.load import leaves
from kvm_dist.origin import Origin, note_origin
from kvm_dist.pretrained import MissingTokenizer, Pretrained, open_pretrained
from kvm_dist.run_directory import BACKEND_KEYS, RunDirectory
from models.backbone import Backbone
from models.config import KVMConfig, ModelConfig
from models.kinds.attention import AttentionConfig
from parallel import collectives
from parallel.world import World

# Model keys of which the weights know nothing: how much is remembered, and how it is computed.
FREE_KEYS = (
    "model.kvm.budget",
    "model.kvm.max_slots",
    *BACKEND_KEYS,
    "model.ovq.max_centroids",
    "model.activation_checkpointing",
    "model.base_width",
)
_MOST_NAMED = 4  # parameters that an error names


def start_weights(model: Backbone, config: RunConfig, directory: RunDirectory, world: World) -> Origin | None:
    """Fill `model` with the weights that `train.start_from` names; None where it names none. Collective.

    Rank 0 alone reads them, and notes in the run directory where they came from; all ranks get the same.
    Raises ConfigError for a model or a tokenizer that does not fit, StorageError for a damaged one.
    """
    path = config.train.start_from
    if path is None:
        if world.rank == 0:
            directory.origin_path.unlink(missing_ok=True)  # of a start that came to nothing
        return None

    def read() -> Origin:
        opened = _open(path)
        _require_same_tokenizer(path, opened, config)
        _require_same_model(path, opened.model, model, config.train.start_from_allows)
        model.load_state_dict(opened.model.state_dict())
        origin = Origin(str(opened.path.absolute()), opened.step, weights_sha256(model))
        note_origin(origin, directory)
        return origin

    origin = on_rank_zero(world, read)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(collectives.broadcast(parameter))
    return origin


def weights_sha256(model: Backbone) -> str:
    """One hash over the names and the float32 bytes of all parameters, whatever file they lie in."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _open(path: Path) -> Pretrained:
    if not path.exists():
        raise ConfigError(
            f"train.start_from={path}: nothing is there; give the folder of a checkpoint, a run directory, "
            "or a Hugging Face folder that kvm-dist wrote"
        )
    try:
        return open_pretrained(path, ("parallel.precision=float32", "device=cpu"))
    except StorageError as error:
        raise StorageError(f"train.start_from: {error}") from error


def _require_same_tokenizer(path: Path, opened: Pretrained, config: RunConfig) -> None:
    theirs, own = opened.tokenizer, build_tokenizer(config.data.tokenizer)
    if isinstance(theirs, MissingTokenizer):
        raise ConfigError(
            f"train.start_from={path} has no tokenizer, so nobody knows whether data.tokenizer="
            f"{config.data.tokenizer} is that of its weights; import it again with --tokenizer NAME"
        )
    if own.fingerprint != theirs.fingerprint:
        raise ConfigError(
            f"train.start_from={path} was trained with the tokenizer {theirs.name}, this run has "
            f"data.tokenizer={config.data.tokenizer}: its ids would mean other text. Use the tokenizer of "
            "those weights, with data prepared by it"
        )


def _require_same_model(path: Path, given: Backbone, wanted: Backbone, allowed: list[str]) -> None:
    """Weights may go on under another budget and on another backend; what changes them is refused by key."""
    known = settings_in_force(wanted.config)
    if unknown := [key for key in allowed if not any(_within(one, key) for one in known)]:
        raise ConfigError(
            f"train.start_from_allows: {unknown} name no key of this model; its keys look like "
            "model.kvm.chunk or model.ffn_expansion"
        )
    refused = [*differing_keys(given.config, wanted.config, allowed)]
    unfit = [*_unfit_parameters(_shapes(given), _shapes(wanted))]
    if not refused and not unfit:
        return
    lines = [f"train.start_from={path}: its weights do not fit this model"]
    lines += [f"  {key}: {before!r} there, {now!r} here" for key, before, now in refused]
    lines += [f"  {one}" for one in unfit[:_MOST_NAMED]]
    if len(unfit) > _MOST_NAMED:
        lines.append(f"  and {len(unfit) - _MOST_NAMED} more parameters")
    mend = "take over those settings"
    if not unfit:
        mend += ", or let the weights mean something else: train.start_from_allows=[KEY, ...]"
    raise ConfigError("\n".join([*lines, mend]))


def differing_keys(
    given: ModelConfig, wanted: ModelConfig, allowed: list[str] | tuple[str, ...] = ()
) -> Iterator[tuple[str, Any, Any]]:
    """Keys in force in either model that change parameters or what they mean, with both values."""
    before, now = settings_in_force(given), settings_in_force(wanted)
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and not any(_within(key, one) for one in (*FREE_KEYS, *allowed)):
            yield key, before.get(key), now.get(key)


def settings_in_force(model: ModelConfig) -> dict[str, Any]:
    """The model's keys without those of kinds it has no layer of, nulls replaced by what they stand for."""
    unused = set(model.known_kinds()) - set(model.layer_kinds)
    tree = {name: value for name, value in model.model_dump(mode="json").items() if name not in unused}
    tree |= {
        "layers": model.layer_kinds,
        "head_dim": model.head_width,
        "residual_scale": model.depth_scale,
        "feed_forward_shift": model.shifts_feed_forward,
    }
    del tree["rotary_base"]
    for kind, config in model.used_layer_configs.items():
        if isinstance(config, AttentionConfig):
            tree[kind]["rotary_dims"] = config.rotary(model.head_width)
            tree[kind]["rotary_base"] = config.rotary_base or model.rotary_base
        if isinstance(config, KVMConfig):
            tree[kind]["kv_heads"] = config.key_value_heads(model)
    return leaves({"model": tree})


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith(section + ".")


def _shapes(model: Backbone) -> dict[str, tuple[int, ...]]:
    tensors: Mapping[str, Tensor] = model.state_dict()
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _unfit_parameters(
    given: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    for name in sorted(given.keys() | wanted.keys()):
        if given.get(name) != wanted.get(name):
            here, there = (str(list(one[name])) if name in one else "none" for one in (wanted, given))
            yield f"parameter {name}: {there} there, {here} here"
